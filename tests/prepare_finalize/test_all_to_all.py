"""A dispatch of two ranks followed by hand: who gets which row, with which ids, and what returns."""

import pytest
import torch

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
