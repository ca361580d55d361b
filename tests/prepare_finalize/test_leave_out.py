"""Transports that go on without a rank: outputs, membership, and what those without a rank mask answer."""

import os
import signal
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.errors import CommError, ConfigError, ShapeError, UnsupportedError
from moe_mk.experts.base import ExpertsContext
from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.emulated import deep_ep
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize, TransportContext
from moe_mk.quant import BF16
from moe_mk.tokens import Routing
from tests.support.library_layers import CPU, EXPERTS, TOP_K, Model, batch, expect_exact, flight_of

LIBRARIES = ["deepep_ll", "nvlink_one_sided"]
RETURNING = ["deepep_ll"]
ALL = (0, 1, 2)


def mask_of(*active: int) -> torch.Tensor:
    return torch.tensor([int(rank in active) for rank in ALL], dtype=torch.int32)


def transport_of(model: Model, rank: int, layer: int = 0) -> PrepareFinalize:
    return model.layers[rank][layer].prepare_finalize


def leave_out(model: Model, active: tuple[int, ...]) -> None:
    model.world.together([partial(transport_of(model, rank).leave_out, mask_of(*active)) for rank in active])


def without(routing: Routing, place: ExpertMap, away: tuple[int, ...]) -> Routing:
    """The routing with assignments to ranks that are away dropped; weights of the others stay."""
    rank_TK = place.tables(CPU).rank_of_P[routing.ids_TK.clamp_min(0).long()]
    dropped_TK = torch.isin(rank_TK.long(), torch.tensor(away, dtype=torch.int64))
    return Routing(routing.ids_TK.masked_fill(dropped_TK, -1), routing.weights_TK)


def go(model: Model, ranks: tuple[int, ...], seed: int, layer: int = 0) -> None:
    """One call of some ranks, compared with the dense result; the others make no call at all."""
    away = tuple(rank for rank in ALL if rank not in ranks)

    def call(rank: int) -> None:
        x_TH, routing = given = batch(seed + rank)
        y_TH = wait(flight_of(model.layers[rank][layer], given))
        expect_exact(y_TH, (x_TH, without(routing, model.place, away)))

    model.world.together([partial(call, rank) for rank in ranks])


@pytest.mark.parametrize("lost", ALL)
@pytest.mark.parametrize("name", LIBRARIES)
def test_outputs_without_a_rank_are_the_dense_ones_with_its_assignments_dropped(name: str, lost: int) -> None:
    model = Model(name, layers=2, ranks=3)
    go(model, ALL, 0)
    stay = tuple(rank for rank in ALL if rank != lost)
    for _ in range(2):  # repeating it changes nothing
        leave_out(model, stay)
    for step in range(4):
        go(model, stay, 10 * step, layer=step % 2)  # layers that share a buffer share the mask


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_rank_that_is_not_left_out_is_named_by_the_error(name: str) -> None:
    model = Model(name, layers=1, ranks=3)
    go(model, ALL, 0)
    model.world.timeout_s = 0.2

    def call(rank: int) -> int | None:
        with pytest.raises(CommError) as ended:
            wait(flight_of(model.layers[rank][0], batch(rank)))
        assert "peer 1" in str(ended.value)
        return ended.value.peer

    assert model.world.together([partial(call, rank) for rank in (0, 2)]) == [1, 1]


@pytest.mark.parametrize("name", RETURNING)
def test_a_rank_that_kept_its_buffer_may_come_back(name: str) -> None:
    model = Model(name, layers=1, ranks=3)
    go(model, ALL, 0)
    leave_out(model, (0, 2))
    go(model, (0, 2), 10)
    leave_out(model, ALL)
    go(model, ALL, 20)


@pytest.mark.parametrize("name", ["nvlink_one_sided"])
def test_a_rank_left_out_of_nvlink_cannot_come_back(name: str) -> None:
    model = Model(name, layers=1, ranks=3)
    leave_out(model, (0, 2))
    with pytest.raises(UnsupportedError, match=r"(?s)ranks \[1\] were left out and cannot take part again.*new group"):
        leave_out(model, ALL)
    go(model, (0, 2), 0)  # the refusal changes nothing


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_mask_is_checked_and_changes_between_calls_only(name: str) -> None:
    model = Model(name, layers=2, ranks=3)
    transport = transport_of(model, 0)
    with pytest.raises(ConfigError, match="rank 0 cannot leave out itself"):
        transport.leave_out(mask_of(1, 2))
    with pytest.raises(ShapeError, match="has W=2"):
        transport.leave_out(torch.ones(2, dtype=torch.int32))
    with pytest.raises(ShapeError, match="float32"):
        transport.leave_out(torch.ones(3))

    def inside(rank: int) -> None:
        given = batch(rank)
        flight = flight_of(model.layers[rank][0], given)
        next(flight)
        away = (rank + 1) % 3
        with pytest.raises(UnsupportedError, match=r"inside a step"):
            transport_of(model, rank, 1).leave_out(mask_of(*(set(ALL) - {away})).bool())
        expect_exact(wait(flight), given)

    model.world.together([partial(inside, rank) for rank in ALL])


def test_one_more_workspace_is_refused_while_a_rank_is_left_out() -> None:
    model = Model("nvlink_one_sided", layers=1, ranks=3)
    leave_out(model, (0, 2))

    def two_calls(rank: int) -> None:
        first = flight_of(model.layers[rank][0], batch(rank))
        next(first)
        with pytest.raises(UnsupportedError, match=r"one more workspace .* ranks \[1\] are left out"):
            next(flight_of(model.layers[rank][0], batch(rank)))
        wait(first)

    model.world.together([partial(two_calls, rank) for rank in (0, 2)])
    go(model, (0, 2), 0)  # the refusal ends no other call


def test_a_rank_that_deepep_masked_itself_ends_in_an_error_with_its_number() -> None:
    model = Model("deepep_ll", layers=2, ranks=3)
    for rank in (0, 2):  # as its kernels do after their timeout
        transport_of(model, rank)._session.buffer.buffer.low_latency_update_mask_buffer(1, True)  # type: ignore[attr-defined]

    def call(rank: int) -> None:
        with pytest.raises(CommError, match=rf"rank {rank}, phase 'combine'.*the kernels masked rank 1 after"):
            wait(flight_of(model.layers[rank][0], batch(rank)))
        with pytest.raises(CommError, match="masked rank 1"):
            next(flight_of(model.layers[rank][1], batch(rank)))
        with pytest.raises(CommError, match="masked rank 1"):
            transport_of(model, rank).leave_out(mask_of(0, 2))

    model.world.together([partial(call, rank) for rank in (0, 2)])


@pytest.mark.parametrize("name", ["uccl_ep", "deepep_ht", "nvlink_two_sided", "all_to_all"])
def test_transports_without_a_rank_mask_say_so_with_the_way_out(name: str) -> None:
    assert not PREPARE_FINALIZE[name].traits.masks_ranks
    ranks = 2 if name == "deepep_ht" else 3
    transport = transport_of(Model(name, layers=1, ranks=ranks), 0)
    transport.leave_out(torch.ones(ranks, dtype=torch.bool))  # all ranks: nothing is asked for
    mask_W = torch.ones(ranks, dtype=torch.int32)
    mask_W[1] = 0
    stated = rf"(?s)transport '{name}' cannot leave out ranks \[1\].*no rank mask.*RebalanceManager.rank_lost\(\)"
    with pytest.raises(UnsupportedError, match=stated):
        transport.leave_out(mask_W)


def test_builds_of_deepep_without_enable_shrink_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    build = deep_ep.Buffer.__init__

    def older(self: Any, group: object, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
              low_latency_mode: bool = False, num_qps_per_rank: int = 24) -> None:  # fmt: skip
        build(self, group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank)

    monkeypatch.setattr(deep_ep.Buffer, "__init__", older)
    model = Model("deepep_ll", layers=1, ranks=3)
    with pytest.raises(UnsupportedError, match=r"(?s)ranks \[1\].*no rank mask of the installed deep_ep"):
        transport_of(model, 0).leave_out(mask_of(0, 2))
    go(model, ALL, 0)


def test_traits_name_every_transport_that_masks_ranks() -> None:
    masking = {name for name, kind in PREPARE_FINALIZE.items() if kind.traits.masks_ranks}
    assert {n for n in masking if not PREPARE_FINALIZE.is_foreign(n)} == {*LIBRARIES, "one_sided_gpu"}
    assert masking == {n for n, kind in PREPARE_FINALIZE.items() if kind.leave_out is not PrepareFinalize.leave_out}


def survive(rank: int, names: list[str]) -> list[int]:
    """A call of three processes over each library, then one is killed; the others leave it out and go on."""
    place, layers = ExpertMap.linear(EXPERTS, 3), []
    for name in names:
        comm = DistributedCommunicator(dist.new_group(timeout=timedelta(seconds=30.0)))
        context = TransportContext(
            comm, place, place.tables(CPU), BF16, BF16, 4, TOP_K, CPU, max_num_tokens=6, allow_emulated=True
        )
        experts = IdentityExperts(ExpertsContext(BF16, BF16, "silu", place.num_slots(rank), 4, 4, CPU))
        layers.append(FusedMoEKernel(PREPARE_FINALIZE[name](context), experts))
        expect_exact(wait(flight_of(layers[-1], batch(rank))), batch(rank))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    steps = []
    for layer in layers:
        layer.prepare_finalize.leave_out(mask_of(0, 2))
        for step in range(3):
            x_TH, routing = given = batch(10 * step + rank)
            expect_exact(wait(flight_of(layer, given)), (x_TH, without(routing, place, (1,))))
        steps.append(3)
    return steps


@pytest.mark.stress
@pytest.mark.parametrize("names", [LIBRARIES], ids=["all"])
def test_processes_go_on_without_one_that_was_killed(names: list[str]) -> None:
    with RankWorld(3) as world, pytest.raises(RankError, match="rank 1: .* exit code -9") as ended:
        world.call(survive, names)
    assert ended.value.results == dict.fromkeys((0, 2), [3] * len(names)), ended.value
