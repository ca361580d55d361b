"""What a relay holds and hands on: by hand, and the same bits whether bytes are few or many, by kernels or by torch."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from moe_mk.comm import LockstepWorld
from moe_mk.flight import Flight, interleave
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.cases import hostile_routings
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext, hierarchical, packing
from moe_mk.prepare_finalize.hierarchical import Held, Leg, handed_on, wanted
from moe_mk.prepare_finalize.packing import side_by_side
from moe_mk.prepare_finalize.rows import exchange as row_exchange
from moe_mk.prepare_finalize.rows import sums as row_sums
from moe_mk.prepare_finalize.rows.sums import Part
from moe_mk.quant import BF16, FP8_1x128
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens
from tests.support.tiers import slow

CPU, HIDDEN, EXPERTS, TOP_K, MOST = torch.device("cpu"), 128, 12, 3, 8
LIMITS: tuple[tuple[ModuleType, str], ...] = (
    (hierarchical, "SMALL_BYTES"), (packing, "SMALL_BYTES"), (row_exchange, "SMALL_BYTES"), (row_sums, "FEW_BYTES"),
)  # fmt: skip


def many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat all rows as if they were many."""
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, 1)


@pytest.fixture(params=["few bytes", "many bytes"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many bytes":
        many_bytes(monkeypatch)


def numbered(first: int, count: int) -> Tensor:
    """Rows of two values and one byte of a tail: (n, n + 100, n + 200)."""
    number_X = torch.arange(first, first + count)
    return torch.stack((number_X, number_X + 100, number_X + 200), dim=1).to(torch.uint8)


@pytest.mark.usefixtures("_either_way")
def test_held_rows_are_numbered_through_and_written_by_rank() -> None:
    # Rank 1 of nodes {0}, {1}, {2}: one row of node 0, own tokens 1 2 3, two rows of node 2. Rank 0 gets rows 0 and 4,
    # rank 1 rows 1 2 3 5, rank 2 row 5.
    between = Leg(torch.empty(0, dtype=torch.int64), (0, 0, 0), (1, 0, 2), 3)
    crossed = side_by_side(torch.cat((numbered(0, 1), numbered(4, 2))), 2)
    held = Held((crossed[: between.received[0]], side_by_side(numbered(1, 3), 2), crossed[between.received[0] :]))
    assert len(held) == 6
    row_X, counts = torch.tensor([0, 4, 1, 2, 3, 5, 5]), (2, 4, 1)
    write = held.writer(row_X, counts)
    for span in (slice(0, 2), slice(2, 6), slice(6, 7), slice(2, 7), slice(0, 7), slice(3, 3)):
        packed = torch.full((span.stop - span.start, 3), 99, dtype=torch.uint8)
        if span.start != span.stop:
            write(side_by_side(packed, 2), span)
        assert packed.tolist() == [[n, n + 100, n + 200] for n in row_X[span].tolist()], span


def test_rows_for_a_peer_are_those_that_name_its_place() -> None:
    place_XK = torch.tensor([[0, 1], [1, -1], [2, 2], [-1, -1], [0, 2]])
    assert {peer: row_X.tolist() for peer, row_X in wanted(place_XK, {0: 5, 2: 7, 3: 9}).items()} == {
        5: [0, 4], 7: [2, 4], 9: []
    }  # fmt: skip


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch"])
def test_sums_for_others_are_rounded_and_those_for_own_tokens_are_not(native: bool) -> None:
    # Held: row 0 of an earlier node, own tokens as rows 1 and 2, row 3 of a later one. 1 + 2^-9 is 1 in bf16.
    small, rows = 2.0**-9, torch.bfloat16
    parts = [
        Part(torch.tensor([[1.0], [1.0], [3.0]], dtype=rows), torch.tensor([0, 1, 3])),
        Part(torch.tensor([[small], [small], [5.0]], dtype=rows), torch.tensor([0, 1, 2])),
    ]
    going = torch.full((2, 1), 9.0, dtype=rows)
    kernels = row_exchange.ready() if native else None
    own = handed_on(parts, slice(1, 3), going, kernels)
    assert going.flatten().tolist() == [1.0, 3.0]
    total = torch.zeros(2)
    for part in own:
        total[part.row_X] += part.rows[:, 0].float()
    assert total.tolist() == [1.0 + small, 5.0]


def there_and_back(comm_ranks: int, per_node: int, name: str, wire: QuantScheme, pieces: int | None) -> list[bytes]:
    """The bits of what arrives and of what returns, over all hostile routings."""
    seen: list[bytes] = []
    for case in hostile_routings(comm_ranks, num_experts=EXPERTS, top_k=TOP_K):
        if case.expert_map.num_physical != EXPERTS or max(case.num_tokens) > MOST:
            continue
        place = ExpertMap.linear(EXPERTS, comm_ranks)
        made = [
            PREPARE_FINALIZE[name](
                TransportContext(
                    comm, place, place.tables(CPU), wire, BF16, HIDDEN, TOP_K, CPU, max_num_tokens=MOST,
                    ranks_per_node=per_node, relay_tokens=pieces,
                )
            )
            for comm in LockstepWorld(comm_ranks).communicators()
        ]  # fmt: skip

        def flight(rank: int, x_TH: Tensor, routing: Routing) -> Flight[Tensor]:
            tokens = yield from made[rank].prepare(x_TH, routing)  # noqa: B023
            assert isinstance(tokens, RowTokens)
            seen.extend(bits_of(tokens.x_RH, tokens.ids_RK, tokens.weights_RK))
            y_RH = tokens.x_RH.dequantize(torch.float32) * tokens.weights_RK.sum(dim=1, keepdim=True)
            return (yield from made[rank].finalize(ExpertOutput(y_RH.bfloat16(), OutputStage.REDUCED), tokens))  # noqa: B023

        draw = torch.Generator().manual_seed(7)
        x = [torch.randn((count, HIDDEN), generator=draw).bfloat16() for count in case.num_tokens]
        flights = [flight(rank, *given) for rank, given in enumerate(zip(x, case.routings, strict=True))]
        seen.extend(bits_of(*interleave(flights)))
    return seen


@pytest.mark.parametrize(
    "name,ranks,per_node,pieces,wire",
    [
        ("hierarchical", 4, 2, None, FP8_1x128), ("hierarchical", 4, 2, 3, FP8_1x128),
        *slow(("hierarchical", 4, 1, 3, BF16), ("hierarchical", 4, 2, None, BF16)),
        *slow(("hierarchical", 6, 2, None, FP8_1x128), ("hierarchical", 2, 2, None, BF16)),
        *slow(("all_to_all", 4, 2, None, FP8_1x128)),
    ],
    ids=str,
)  # fmt: skip
def test_no_bit_depends_on_how_many_bytes_travel_or_on_kernels(
    name: str, ranks: int, per_node: int, pieces: int | None, wire: QuantScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = there_and_back(ranks, per_node, name, wire, pieces)
    many_bytes(monkeypatch)
    many = there_and_back(ranks, per_node, name, wire, pieces)
    monkeypatch.setattr(row_exchange, "ready", lambda: None)
    by_torch = there_and_back(ranks, per_node, name, wire, pieces)
    assert len(few) > 100 and few == many == by_torch
