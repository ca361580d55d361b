"""Outputs of a backend in every case of the kit, for digests, diagnosis, and comparison with real processes.

Ranks as processes of this machine, for tests: a gloo world on loopback that runs functions and always ends.

Starting a world costs seconds, calling it milliseconds: keep one `RankWorld` for a module of tests.
"""

from __future__ import annotations

import io
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import communicator
from moe_mk.errors import MoEMKError
from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.lab.testing.experts import _rows, random_experts
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.transports import NO_WEIGHTS, _VirtualTransport, suited_to
from moe_mk.permute import permute
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportContext
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import BatchedTokens
from moe_mk.trace.clock import now

R = TypeVar("R")

PRELOADED = (
    __name__, "moe_mk.layer", "moe_mk.rebalance", *EXPERTS.modules, *PREPARE_FINALIZE.modules, "torch.distributed",
    "safetensors.torch", "yaml",
)  # fmt: skip
"""Modules imported once for all worlds of a process."""
ROOT = Path(__file__).parents[3]
"""The folder of this package, from which the server of the worlds imports it."""
START_S = 120.0
"""Seconds that processes may take to import torch and connect."""
GRACE_S = 20.0
"""Seconds that the other ranks may continue after one has raised; peers of a dead process have their whole time."""


class RankError(MoEMKError):
    """Ranks that raised, died or did not finish in time."""

    def __init__(self, problems: Mapping[int, str], results: Mapping[int, object], world_size: int) -> None:
        self.problems, self.results = dict(sorted(problems.items())), dict(results)
        texts = [f"rank {rank}: {problem}" for rank, problem in self.problems.items()]
        super().__init__(f"{len(texts)} of {world_size} ranks failed\n" + "\n".join(texts))


class RankWorld:
    """`world_size` processes in one default gloo group, alive until `close`.

    They are forks of a server that has imported torch and this package and has used neither, so that they share
    nothing with the caller but its environment at the time of the first world.
    Functions are called by their import path, so they must stand at the top of a module. Results come back as
    `torch.save` writes them and are read with `weights_only`: tensors, numbers, texts, lists, tuples and dicts.
    A rank that died makes the next call start a new world.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def call(self, fn: Callable[..., R], *args: object, timeout_s: float = 60.0) -> list[R]:
        """Run `fn(rank, *args)` on every rank and return what each returned, by rank.

        Raises RankError with the traceback of every rank that raised, died, or was late by the time; it has the
        results of the others. The world is ended if any rank died or was late.
        """
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.connection.send((fn, args))
        try:
            problems, results = self._collect(timeout_s)
        except BaseException:
            self.close()
            raise
        if problems:
            raise RankError(problems, results, self.world_size)
        return [cast(R, results[rank]) for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill all processes of the group."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moe-mk-")  # kept: groups made later meet there too
        meeting = (Path(self._folder.name) / "meeting").as_uri()
        try:
            self._ranks = [_Rank(rank, self.world_size, meeting) for rank in range(self.world_size)]
            problems, _ = self._collect(START_S)  # each rank reports once that it is connected
        except BaseException:
            self.close()
            raise
        if problems:
            raise RankError(problems, {}, self.world_size)

    def _collect(self, timeout_s: float) -> tuple[dict[int, str], dict[int, object]]:
        """One answer from every rank: errors and results by rank."""
        problems: dict[int, str] = {}
        results: dict[int, object] = {}
        waiting = {rank.connection: index for index, rank in enumerate(self._ranks)}
        deadline, broken = now() + timeout_s, False
        while waiting and (ready := wait_for_any(list(waiting), max(deadline - now(), 0.0))):
            for connection in cast("list[Connection]", ready):
                index = waiting.pop(connection)
                try:
                    failed, answer = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=True)
                except (EOFError, ConnectionError):
                    process, broken = self._ranks[index].process, True
                    process.join(GRACE_S)
                    problems[index] = f"the process ended with exit code {process.exitcode}"
                    continue
                except Exception:  # whatever the reader of weights refuses, in whatever words
                    failed, answer = True, "returned more than tensors, numbers, texts, lists, tuples and dicts"
                if failed:
                    problems[index] = str(answer)
                    deadline = min(deadline, now() + GRACE_S)
                else:
                    results[index] = answer
        late = "waited in vain for the ranks that failed" if problems else f"did not finish within {timeout_s:g} s"
        problems |= dict.fromkeys(waiting.values(), late)
        if broken or waiting:
            self.close()
        return problems, results


def run_ranks(fn: Callable[..., R], world_size: int, *args: object, timeout_s: float = 60.0) -> list[R]:
    """Run `fn(rank, *args)` in `world_size` processes with a default gloo group; see `RankWorld.call`."""
    with RankWorld(world_size) as world:
        return world.call(fn, *args, timeout_s=timeout_s)


class _Rank:
    """One process and our end of its pipe."""

    def __init__(self, rank: int, world_size: int, meeting: str) -> None:
        forks = get_context("forkserver")
        forks.set_forkserver_preload(list(PRELOADED))
        with chdir(ROOT):  # Python 3.11 starts the server without the caller's sys.path, and searches this folder first
            ensure_running()
        self.connection, theirs = forks.Pipe()
        self.process = forks.Process(target=_serve, args=(rank, world_size, meeting, theirs), daemon=True)
        self.process.start()
        theirs.close()


def _serve(rank: int, world_size: int, meeting: str, requests: Connection) -> None:
    """Connect to the others, then answer requests until the pipe is closed."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=START_S)
        )
        _answer(requests, False, None)
        while True:
            try:
                fn, args = requests.recv()
                _answer(requests, False, fn(rank, *args))
            except EOFError:
                raise
            except Exception:
                _answer(requests, True, traceback.format_exc())
    except EOFError:
        return


def _answer(requests: Connection, failed: bool, answer: object) -> None:
    buffer = io.BytesIO()
    torch.save((failed, answer), buffer)
    requests.send_bytes(buffer.getvalue())


CPU = torch.device("cpu")
HIDDEN, INNER, SLOTS, TOP_K = 192, 128, 5, 3
TIMEOUT_S = 60.0


def suitable_cases(name: str, num_ranks: int) -> list[RoutingCase]:
    """The hostile cases of a transport, by its traits."""
    return suited_to(PREPARE_FINALIZE[name].traits, hostile_routings(num_ranks))


def outputs_of_transport(
    name: str,
    num_ranks: int,
    wire: QuantScheme,
    dtype: Plain,
    ranks_per_node: int | None = None,
    *,
    cases: Sequence[RoutingCase] | None = None,
    hidden: int = HIDDEN,
) -> list[Tensor]:
    """Outputs of every rank in every case, on ranks of one process. cases: None is the hostile ones."""
    outputs: list[Tensor] = []
    chosen = suitable_cases(name, num_ranks) if cases is None else suited_to(PREPARE_FINALIZE[name].traits, cases)
    for case in chosen:
        ranks = _VirtualTransport(name, case, wire, dtype, hidden, CPU, ranks_per_node)
        outputs += ranks.run(ranks.tokens())
    return outputs


def call_of_transport(
    name: str, num_ranks: int, wire: QuantScheme, dtype: Plain, ranks_per_node: int | None = None
) -> Callable[[], object]:
    """The simplest case on persistent ranks, for repeated calls."""
    ranks = _VirtualTransport(name, suitable_cases(name, num_ranks)[0], wire, dtype, HIDDEN, CPU, ranks_per_node)
    tokens = ranks.tokens()
    return lambda: ranks.run(tokens)


def outputs_on_processes(
    name: str, num_ranks: int, ranks_per_node: int | None = None, modules: Sequence[str] = ()
) -> list[Tensor]:
    """Run `outputs_of_transport` in bf16 on real processes over gloo. Raises RankError if any rank fails.

    modules: imported by the processes first.
    """
    by_rank = run_ranks(_rank_outputs, num_ranks, name, num_ranks, ranks_per_node, tuple(modules), timeout_s=TIMEOUT_S)
    return [outputs[case] for case in range(len(by_rank[0])) for outputs in by_rank]


def _rank_outputs(
    rank: int, name: str, num_ranks: int, ranks_per_node: int | None, modules: tuple[str, ...]
) -> list[Tensor]:
    for module in modules:
        import_module(module)
    comm = communicator(dist.group.WORLD, timeout_s=TIMEOUT_S / 2, layer=name)
    partial = PREPARE_FINALIZE[name].traits.partial
    outputs = []
    for case in suitable_cases(name, num_ranks):
        draw = torch.Generator("cpu").manual_seed(0 if partial else rank)
        shape = (case.num_tokens[rank], HIDDEN)
        x_TH = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(torch.bfloat16)
        outputs.append(wait(_kernel(name, case, comm, ranks_per_node).steps(x_TH, case.routings[rank], NO_WEIGHTS)))
    return outputs


def _kernel(name: str, case: RoutingCase, comm: Communicator, ranks_per_node: int | None) -> FusedMoEKernel:
    top_k, slots = case.routings[0].ids_TK.shape[1], case.expert_map.num_slots(comm.rank)
    tables = case.expert_map.tables(CPU)
    context = TransportContext(
        comm, case.expert_map, tables, BF16, BF16, HIDDEN, top_k, CPU, max_num_tokens=64, ranks_per_node=ranks_per_node
    )
    experts = IdentityExperts(ExpertsContext(BF16, BF16, "silu", slots, HIDDEN, HIDDEN, CPU))
    return FusedMoEKernel(PREPARE_FINALIZE[name](context), experts)


def outputs_of_experts(
    name: str,
    weights: QuantScheme,
    dtype: Plain,
    compute: QuantScheme,
    sizes: tuple[int, int] = (HIDDEN, INNER),
    *,
    cases: Sequence[RoutingCase] | None = None,
) -> list[Tensor]:
    """Outputs of experts in every case and layout, without padding. cases: None is the hostile ones."""
    chosen = hostile_routings(1, num_experts=SLOTS, top_k=TOP_K) if cases is None else cases
    slots = chosen[0].expert_map.num_slots(0)
    backend = EXPERTS[name](ExpertsContext(dtype, compute, "silu", slots, *sizes, CPU))
    own = backend.relayout(random_experts(weights, slots, *sizes, CPU))
    outputs = []
    for case in chosen:
        rows = _rows(case, dtype, dtype, sizes[0], slots)
        for layout in backend.traits.consumes:
            tokens = permute(rows, (layout,))
            y = backend.run(tokens, own).y
            if isinstance(tokens, BatchedTokens):
                assert tokens.home is not None
                y = y[tokens.home.row_LS >= 0]
            outputs.append(y)
    return outputs


def call_of_experts(
    name: str, weights: QuantScheme, dtype: Plain, compute: QuantScheme, sizes: tuple[int, int] = (HIDDEN, INNER)
) -> Callable[[], object]:
    """One run over the simplest case, for repeated calls."""
    backend = EXPERTS[name](ExpertsContext(dtype, compute, "silu", SLOTS, *sizes, CPU))
    own = backend.relayout(random_experts(weights, SLOTS, *sizes, CPU))
    rows = _rows(hostile_routings(1, num_experts=SLOTS, top_k=TOP_K)[0], dtype, dtype, sizes[0], SLOTS)
    tokens = permute(rows, (backend.traits.consumes[0],))
    return lambda: backend.run(tokens, own)
