"""Gradients through an exchange of two processes: by gradcheck, against one process, four all-to-alls a step."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import DistributedCommunicator
from moe_mk.comm.single import SingleRank
from moe_mk.errors import ConfigError, ShapeError
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.lab.training import TrainingExchange
from moe_mk.placement.expert_map import ExpertMap
from tests.support.worlds import world_of

EXPERTS, HIDDEN, TOKENS = 4, 3, 4
F64 = torch.float64


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, two different experts each, one choice that goes nowhere, and weights."""
    ids = torch.rand((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(rank)).argsort(1)[:, :2]
    ids[0, 1] = -1
    return drawn(TOKENS, HIDDEN, seed=10 + rank), ids, drawn(TOKENS, 2, seed=20 + rank)


MATRICES = [drawn(HIDDEN, HIDDEN, seed=e) for e in range(EXPERTS)]


def dense(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, matrices: list[Tensor]) -> Tensor:
    """The same layer in one place."""
    every_ETH = torch.stack([torch.tanh(x_TH @ m.T) for m in matrices])
    chosen_TKH = every_ETH[ids_TK.clamp_min(0), torch.arange(len(x_TH))[:, None]]
    return (chosen_TKH * (weights_TK * (ids_TK >= 0))[..., None]).sum(1)


world = world_of(2)


def one_step(rank: int) -> dict[str, object]:
    """Gradcheck in the own tokens and weights, then gradients of everything after one step, and what was sent."""
    place = ExpertMap.round_robin(EXPERTS, 2)
    mine = [MATRICES[e].clone().requires_grad_() for e in place.local_to_global(rank)]
    comm = DistributedCommunicator(dist.group.WORLD, timeout_s=30.0)  # type: ignore[arg-type]
    exchange = TrainingExchange(comm, place)
    x, ids, weights = batch(rank)
    x.requires_grad_(), weights.requires_grad_()

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        return exchange(x, ids, weights, lambda slot, rows: torch.tanh(rows @ mine[slot].T))

    correct = torch.autograd.gradcheck(layer, (x, weights))
    for each in (x, weights, *mine):
        each.grad = None
    comm.traffic.reset()
    y = layer(x, weights)
    y.square().sum().backward()
    hops = {phase: calls for phase, calls in comm.traffic.calls_by_phase.items() if phase.startswith(HOPS)}
    grads = [x.grad, weights.grad, *(m.grad for m in mine)]
    return {"correct": correct, "calls": hops, "y": y.detach(), "grads": grads, "owned": place.local_to_global(rank)}


HOPS = ("dispatch", "combine")


@pytest.mark.slow
@pytest.mark.row(23)
def test_two_processes_go_backwards_as_one_does(world: RankWorld) -> None:
    found = world.call(one_step)
    matrices = [m.clone().requires_grad_() for m in MATRICES]
    batches = [batch(rank) for rank in range(2)]
    for x, _, weights in batches:
        x.requires_grad_(), weights.requires_grad_()
    outputs = [dense(x, ids, weights, matrices) for x, ids, weights in batches]
    sum(y.square().sum() for y in outputs).backward()  # type: ignore[union-attr]
    for rank, stated in enumerate(found):
        assert stated["correct"] is True
        torch.testing.assert_close(stated["y"], outputs[rank].detach())
        x, _, weights = batches[rank]
        expected = [x.grad, weights.grad, *(matrices[e].grad for e in stated["owned"])]  # type: ignore[attr-defined]
        for one, other in zip(stated["grads"], expected, strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(one, other)


@pytest.mark.row(23)
def test_a_step_makes_four_all_to_alls(world: RankWorld) -> None:
    for stated in world.call(one_step):
        calls = dict(stated["calls"])  # type: ignore[call-overload]
        assert (calls.pop("dispatch counts"), calls.pop("dispatch ids")) == (1, 1)  # where to, without gradients
        assert calls == {"dispatch": 1, "combine": 1, "combine backward": 1, "dispatch backward": 1}


def idle_step(rank: int) -> list[float]:
    """Rank 1 brings nothing, and computes for rank 0."""
    place = ExpertMap.linear(EXPERTS, 2)
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    comm = DistributedCommunicator(dist.group.WORLD, timeout_s=30.0)  # type: ignore[arg-type]
    x = torch.ones((1 - rank, HIDDEN), dtype=F64, requires_grad=True)
    ids = torch.tensor([[0, 3]])[: 1 - rank]
    weights = torch.tensor([[0.5, 0.25]], dtype=F64)[: 1 - rank]
    y = TrainingExchange(comm, place)(x, ids, weights, lambda _, rows: rows * scale)
    y.sum().backward()
    assert scale.grad is not None
    return [float(y.sum()), float(scale.grad)]


def test_an_idle_rank_takes_part(world: RankWorld) -> None:
    # Three ones times 2, weighed .5 on rank 0 and .25 on rank 1: the sum is 4.5, the slopes 1.5 and 0.75.
    assert world.call(idle_step) == [[4.5, 1.5], [0.0, 0.75]]


def test_one_rank_needs_no_group() -> None:
    x, ids, weights = batch(0)
    exchange = TrainingExchange(SingleRank(), ExpertMap.linear(EXPERTS, 1))
    y = exchange(x, ids, weights, lambda slot, rows: torch.tanh(rows @ MATRICES[slot].T))
    torch.testing.assert_close(y, dense(x, ids, weights, MATRICES))
    assert exchange(x[:0], ids[:0], weights[:0], lambda _, rows: rows).shape == (0, HIDDEN)


def test_replicas_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="this placement has 2 of 2 on 2"):
        TrainingExchange(SingleRank(), ExpertMap.linear(2, 2))
    with pytest.raises(ShapeError, match="weights"):
        TrainingExchange(SingleRank(), ExpertMap.linear(4, 1))(*batch(0)[:2], torch.ones(1, 2), lambda _, x: x)
