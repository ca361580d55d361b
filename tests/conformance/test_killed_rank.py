"""A rank is killed in the middle of a dispatch: every survivor gets CommError that names it and the phase, in time. One
world of four processes serves many. Each has a group of its own, makes one whole call, then the last rank begins a
dispatch of each and is killed while they are all under way; the others call after that."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.errors import CommError
from moe_mk.experts.base import ExpertsContext
from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.prepare_finalize.all_to_all import PointToPoint
from moe_mk.quant.plain import BF16
from moe_mk.tokens import Routing
from tests.support.formats import FORMATS
from tests.support.worlds import world_of

RANKS, NODES, HIDDEN, TOKENS, TOP_K = 4, 2, 64, 4, 2
VICTIM, OPEN_S, TIMEOUT_S = RANKS - 1, 60.0, 3.0
CPU = torch.device("cpu")
Outcome = tuple[int, str, str, float]
"""Rank and phase that an error names, its text, and the seconds until it came."""


def on_cpu_processes(name: str) -> bool:
    """Whether a transport may serve ranks that are processes of this machine, an emulated library included."""
    form = next(form for form in FORMATS if form.dtype == BF16)
    tokens = next(iter(PREPARE_FINALIZE[name].traits.tokens))
    asked = form.problem(ep=RANKS, tokens=tokens, allow_emulated=True, ranks_per_node=RANKS // NODES)
    codes = {reason.code for reason in PREPARE_FINALIZE[name].reasons_against(asked)}
    return codes <= {"fabric"} and PREPARE_FINALIZE[name].traits.max_ranks != 1


NAMES = [name for name, _ in PREPARE_FINALIZE.items() if on_cpu_processes(name)]
ALONE = [name for name in NAMES if PREPARE_FINALIZE.is_foreign(name)]
"""Those of plugins: a process has one workspace of a library for each geometry, which two backends cannot share."""
PARTS = [[name for name in NAMES if name not in ALONE], ALONE]
X = torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN).remainder(7).to(torch.bfloat16)


def routing(rank: int) -> Routing:
    """Every token to two experts of different ranks, none of them its own."""
    first = torch.arange(TOKENS, dtype=torch.int32) % (RANKS - 1)
    ranks_TK = torch.stack(((rank + 1 + first) % RANKS, (rank + 1 + (first + 1) % (RANKS - 1)) % RANKS), dim=1)
    return Routing((2 * ranks_TK).to(torch.int32), torch.full((TOKENS, TOP_K), 0.5))


def opened(rank: int, name: str) -> FusedMoEKernel:
    group = dist.new_group(timeout=timedelta(seconds=OPEN_S))
    comm, place = DistributedCommunicator(group, timeout_s=OPEN_S), ExpertMap.linear(2 * RANKS, RANKS)
    per_node = RANKS // NODES if name == "hierarchical" else None
    context = TransportContext(
        comm, place, place.tables(CPU), BF16, BF16, HIDDEN, TOP_K, CPU, max_num_tokens=TOKENS, allow_emulated=True,
        ranks_per_node=per_node,
    )  # fmt: skip
    experts = IdentityExperts(ExpertsContext(BF16, BF16, "silu", 2, HIDDEN, HIDDEN, CPU))
    return FusedMoEKernel(PREPARE_FINALIZE[name](context), experts)


def forward(rank: int, kernel: FusedMoEKernel) -> bool:
    """Whether a call gives back what went in: identity experts, weights that sum to one."""
    mine = routing(0 if kernel.prepare_finalize.traits.partial else rank)
    y_TH = wait(kernel.steps(X, mine, NO_WEIGHTS))
    if kernel.prepare_finalize.traits.partial:
        y_TH = wait(kernel.prepare_finalize.context.comm.all_reduce(y_TH, "sum"))
    return torch.equal(y_TH, X)


def killed_mid_dispatch(rank: int, names: list[str], sign: str) -> dict[str, Outcome]:
    kernels = {name: opened(rank, name) for name in names}
    whole = [forward(rank, kernel) for kernel in kernels.values()]
    assert all(whole), whole
    for kernel in kernels.values():
        be_impatient(kernel)
    dist.barrier()
    if rank == VICTIM:
        for kernel in kernels.values():
            flight = kernel.steps(X, routing(rank), NO_WEIGHTS)
            threading.Thread(target=lambda flight=flight: next(flight), daemon=True).start()
        time.sleep(0.5)  # each has sent its part, and waits for the others inside a library or in the air
        Path(sign).touch()
        os._exit(9)
    wait_for(sign)
    return {name: outcome(rank, kernel, f"{sign} {name}") for name, kernel in kernels.items()}


def be_impatient(kernel: FusedMoEKernel) -> None:
    """Shorten the waits that are to come, those of a library over its group too."""
    comm = kernel.prepare_finalize.context.comm
    comm = comm.inner if isinstance(comm, PointToPoint) else comm
    assert isinstance(comm, DistributedCommunicator)
    comm.timeout_s = TIMEOUT_S
    distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), comm.group)


def wait_for(*signs: str) -> None:
    while not all(Path(sign).exists() for sign in signs):
        time.sleep(0.02)


def outcome(rank: int, kernel: FusedMoEKernel, sign: str) -> Outcome:
    """What a survivor meets. All begin together, so that none is late only because it waited in the last transport."""
    Path(f"{sign} {rank}").touch()
    wait_for(*(f"{sign} {other}" for other in range(RANKS) if other != VICTIM))
    began = time.monotonic()
    try:
        forward(rank, kernel)
    except CommError as error:
        return error.rank, error.phase, str(error), time.monotonic() - began
    return -1, "", "no error", time.monotonic() - began


def whole_calls(rank: int, names: list[str]) -> dict[str, bool]:
    return {name: forward(rank, opened(rank, name)) for name in names}


world = world_of(RANKS)


@pytest.fixture(scope="module")
def survivors(world: RankWorld, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Outcome]]:
    found: dict[int, dict[str, Outcome]] = {}
    for part, names in enumerate(PARTS):
        sign = str(tmp_path_factory.mktemp("killed") / f"sign{part}")
        with pytest.raises(RankError, match=f"rank {VICTIM}: the process ended with exit code 9") as died:
            world.call(killed_mid_dispatch, names, sign, timeout_s=100.0)
        assert sorted(died.value.problems) == [VICTIM], died.value.problems
        for rank, outcomes in died.value.results.items():
            found.setdefault(rank, {}).update(outcomes)  # type: ignore[arg-type]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_survivors_get_commerror_that_names_rank_and_phase_in_time(
    name: str, survivors: dict[int, dict[str, Outcome]]
) -> None:
    assert sorted(survivors) == [rank for rank in range(RANKS) if rank != VICTIM]
    for rank, outcomes in survivors.items():
        named, phase, text, seconds = outcomes[name]
        assert named == rank and phase and f"rank {rank}, phase '{phase}" in text, text
        assert seconds < OPEN_S / 2, f"{name}: rank {rank} waited {seconds:.1f} s, far beyond {TIMEOUT_S:g} s"
        assert name != "one_sided" or f"peer {VICTIM}" in text, "flags of each peer report which one is dead"


def test_every_transport_that_can_run_on_cpu_processes_was_killed() -> None:
    assert set(NAMES) >= {"all_gather", "all_to_all", "hierarchical", "one_sided", "replicated"}
    left_out = {name for name, _ in PREPARE_FINALIZE.items()} - set(NAMES)
    assert left_out == {"no_ep", "one_sided_gpu"}, f"{left_out} cannot run here"


@pytest.mark.stress
def test_the_next_world_works(world: RankWorld, survivors: dict[int, dict[str, Outcome]]) -> None:
    assert survivors
    names = PARTS[0]
    assert world.call(whole_calls, names, timeout_s=100.0) == [dict.fromkeys(names, True)] * RANKS
