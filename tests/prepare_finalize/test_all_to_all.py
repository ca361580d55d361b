"""A dispatch of two ranks followed by hand: who gets which row, with which ids, and what returns."""

import pytest
import torch
from torch import Tensor

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.flight import interleave
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize, TransportContext
from moe_mk.quant.plain import FP32
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens

CPU = torch.device("cpu")
PLACE = ExpertMap.linear(4, 2)  # rank 0 holds experts 0 and 1, rank 1 experts 2 and 3


def transports(name: str, place: ExpertMap = PLACE, hidden: int = 2) -> list[PrepareFinalize]:
    comms = LockstepWorld(place.num_ranks).communicators()
    tables = place.tables(CPU)
    return [PREPARE_FINALIZE[name](TransportContext(c, place, tables, FP32, FP32, hidden, 2, CPU)) for c in comms]


# Rank 0 has tokens a, b; rank 1 has c.     a -> experts 0 and 3     b -> expert 2, and nowhere     c -> experts 0 and 1
X = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]
ROUTINGS = [
    Routing(torch.tensor([[0, 3], [2, -1]], dtype=torch.int32), torch.tensor([[0.5, 0.25], [1.0, 0.0]])),
    Routing(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([[0.75, 0.125]])),
]


def dispatched(name: str) -> tuple[list[PrepareFinalize], list[RowTokens]]:
    ranks = transports(name)
    tokens = interleave([t.prepare(x, r) for t, x, r in zip(ranks, X, ROUTINGS, strict=True)])
    assert all(isinstance(t, RowTokens) for t in tokens)
    return ranks, tokens  # type: ignore[return-value]


@pytest.mark.row(26)
def test_each_rank_gets_each_token_once_with_the_slots_that_are_its_own() -> None:
    _, (first, second) = dispatched("all_to_all")
    # Rank 0 gets a (for expert 0) from itself and c (for 0 and 1) from rank 1: one row, although two experts want it.
    assert first.x_RH.values.tolist() == [[1.0, 2.0], [5.0, 6.0]]
    assert first.ids_RK.tolist() == [[0, -1], [0, 1]]
    assert first.weights_RK.tolist() == [[0.5, 0.0], [0.75, 0.125]]
    # Rank 1 gets a (expert 3 is its slot 1) and b (expert 2 is its slot 0).
    assert second.x_RH.values.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert second.ids_RK.tolist() == [[-1, 1], [0, -1]]
    assert second.weights_RK.tolist() == [[0.0, 0.25], [1.0, 0.0]]


@pytest.mark.row(78)
def test_all_gather_gives_everybody_everything_and_hides_the_others_experts() -> None:
    _, (first, second) = dispatched("all_gather")
    assert first.x_RH.values.tolist() == second.x_RH.values.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert first.ids_RK.tolist() == [[0, -1], [-1, -1], [0, 1]]
    assert second.ids_RK.tolist() == [[-1, 1], [0, -1], [-1, -1]]
    assert first.weights_RK.tolist() == [[0.5, 0.0], [0.0, 0.0], [0.75, 0.125]]
    assert second.weights_RK.tolist() == [[0.0, 0.25], [1.0, 0.0], [0.0, 0.0]]


def test_sums_return_to_the_row_they_left() -> None:
    ranks, tokens = dispatched("all_to_all")
    sums = [torch.tensor([[10.0, 0.0], [20.0, 0.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]])]
    outputs = [ExpertOutput(y, OutputStage.REDUCED) for y in sums]
    combined = interleave([t.finalize(y, x) for t, y, x in zip(ranks, outputs, tokens, strict=True)])
    # a: 10 from rank 0 and 1 from rank 1.   b: from rank 1 alone.   c: from rank 0 alone.
    assert combined[0].tolist() == [[11.0, 1.0], [2.0, 2.0]]
    assert combined[1].tolist() == [[20.0, 0.0]]


def test_sums_are_added_in_rank_order_in_f32_and_rounded_once() -> None:
    # 1 + 2^-9 + 2^-9 in bf16 one after the other stays 1; added in f32 first it is 1 + 2^-8, rounded to even: 1.
    # With three parts of 2^-8 the true sum is 1.01171875, which only a sum in f32 comes near to.
    place = ExpertMap.linear(4, 4)
    ranks = transports("all_to_all", place)
    one = torch.tensor([[1.0, 1.0]])
    nothing = torch.zeros(0, 2)
    ids = [torch.tensor([[0, 1]], dtype=torch.int32), *[torch.zeros((0, 2), dtype=torch.int32)] * 3]
    routings = [Routing(i, torch.ones(i.shape)) for i in ids]
    tokens = interleave([t.prepare(x, r) for t, x, r in zip(ranks, [one, *[nothing] * 3], routings, strict=True)])
    parts: list[Tensor] = [torch.full(t.x_RH.shape, v) for t, v in zip(tokens, (1.0, 2.0**-8, 0, 0), strict=True)]  # type: ignore[union-attr]
    outputs = [ExpertOutput(p.to(torch.bfloat16), OutputStage.REDUCED) for p in parts]
    combined = interleave([t.finalize(y, x) for t, y, x in zip(ranks, outputs, tokens, strict=True)])[0]
    assert combined.dtype is torch.bfloat16
    assert torch.equal(combined, torch.full((1, 2), 1.0 + 2.0**-8).to(torch.bfloat16))


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_bytes_on_the_wire_are_rows_to_others_times_their_size(name: str) -> None:
    ranks, _ = dispatched(name)
    row = 2 * 4 + 2 * (4 + 4)  # two f32 values, two ids and two weights
    sent = {"all_to_all": [2, 1], "all_gather": [2, 1]}[name]  # a and b to rank 1, c to rank 0
    for transport, rows in zip(ranks, sent, strict=True):
        assert transport.context.comm.traffic.bytes_by_phase["dispatch"] == rows * row
