"""Sums of groups of rows: by hand, in order, and the same bits by kernels and by torch."""

import pytest
import torch
from torch import Tensor

from moe_mk.kernels.native.exchange import ready
from moe_mk.lab.testing.bits import bits_of
from moe_mk.prepare_finalize.rows import sums as row_sums
from moe_mk.prepare_finalize.rows.sums import ROWS_AT_ONCE, Part, add_up, cut, flattened

KERNELS = pytest.mark.skipif(ready() is None, reason="the native kernels are not compiled")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# By groups: the share of the rows that each part of a group has.
SHARES = {
    "flat": [[0.5, 1.0, 0.0, 0.9]],
    "flat, all rows": [[1.0, 1.0, 1.0]],
    "flat, nearly all rows": [[0.995, 0.99, 1.0, 0.98]],
    "two nodes, mine first": [[0.5, 1.0], [0.7]],
    "two nodes, mine second": [[0.7], [0.5, 1.0]],
    "three nodes, mine last": [[0.5], [1.0], [0.6, 0.9]],
    "nodes of one": [[0.5], [1.0], [0.6]],
    "nobody": [[0.0], [0.0, 0.0]],
    "no part": [[]],
}


@pytest.fixture(autouse=True)
def _kernels_for_few_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sums, "FEW_BYTES", 0)


def part(rows: list[list[float]], row_X: list[int], dtype: torch.dtype = torch.float32) -> Part:
    return Part(
        torch.tensor(rows, dtype=dtype).view(len(row_X), len(rows[0]) if rows else 1),
        torch.tensor(row_X, dtype=torch.int64),
    )


def drawn(shares: list[list[float]], rows: int, dtype: torch.dtype, hidden: int = 24) -> list[list[Part]]:
    draw = torch.Generator().manual_seed(rows)

    def one(share: float) -> Part:
        row_X = torch.nonzero(torch.rand(rows, generator=draw) < share).flatten()
        return Part((torch.randn((len(row_X), hidden), generator=draw) * 100).to(dtype), row_X)

    return [[one(share) for share in group] for group in shares]


def one_by_one(groups: list[list[Part]], out_RH: Tensor) -> Tensor:
    """The definition: groups from zero, then their sum from zero, all in f32."""
    total_RH = torch.zeros(out_RH.shape)
    for group in groups:
        partial_RH = torch.zeros(out_RH.shape)
        for each in group:
            for row, row_H in zip(each.row_X.tolist(), each.rows, strict=True):
                partial_RH[row] += row_H
        total_RH += partial_RH
    return total_RH.to(out_RH.dtype)


def test_sums_by_hand() -> None:
    # Row 0 has 1 and 10, row 1 has 20 alone, row 2 has nothing, row 3 has 2 and 300.
    groups = [[part([[1.0], [2.0]], [0, 3]), part([[10.0], [20.0]], [0, 1])], [part([[300.0]], [3])]]
    for native in (None, ready()):
        assert add_up(groups, torch.full((4, 1), 7.0), native).flatten().tolist() == [11.0, 20.0, 0.0, 302.0]


def test_groups_meet_before_they_are_added() -> None:
    # In f32 1 + 1e8 is 1e8. As a group of its own the pair is 1e8 - 1e8 = 0 and leaves the 1 before it alone; flat, the
    # 1 is lost: (1 + 1e8) - 1e8 = 0.
    first, pair = [part([[1.0]], [0])], [part([[1e8]], [0]), part([[-1e8]], [0])]
    for native in (None, ready()):
        assert add_up([first, pair], torch.empty(1, 1), native).item() == 1.0
        assert add_up([first, first, pair], torch.empty(1, 1), native).item() == 2.0
        assert add_up([[*first, *pair]], torch.empty(1, 1), native).item() == 0.0, "one group is a flat sum"


def test_only_orders_of_equal_bits_are_flat() -> None:
    a, b, c = (part([[number]], [0]) for number in (1.0, 2.0, 3.0))
    assert flattened([[a, b], [c]]) == [a, b, c]
    assert flattened([[c], [a, b]]) == [a, b, c], "two groups may change places"
    assert flattened([[c], [a, b], [c]]) == [a, b, c, c]
    assert flattened([[a], [b], [c]]) == [a, b, c]
    assert flattened([[a], [b], [c, c]]) is None and flattened([[a, b], [c, c]]) is None


@KERNELS
@pytest.mark.parametrize("rows", [0, 1, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_kernels_and_torch_give_the_bits_of_the_definition(
    shares: list[list[float]], dtype: torch.dtype, rows: int
) -> None:
    groups = drawn(shares, rows, dtype)
    by_torch, by_kernels = (
        add_up(groups, torch.full((rows, 24), 9, dtype=dtype), native) for native in (None, ready())
    )
    assert bits_of(by_torch) == bits_of(by_kernels) == bits_of(one_by_one(groups, by_torch))


@pytest.mark.parametrize("native", [None, pytest.param(ready(), marks=KERNELS)], ids=["torch", "kernels"])
def test_a_sum_of_negative_zeros_is_zero_as_from_zero(native: object) -> None:
    minus = part([[-0.0, 1.0]], [0], torch.bfloat16)
    for groups in ([[minus]], [[minus], [minus]], [[minus, minus], [minus]]):
        got = add_up(groups, torch.empty(1, 2, dtype=torch.bfloat16), native)  # type: ignore[arg-type]
        assert not bool(torch.signbit(got).any())


def test_rows_of_other_strides_and_dtypes_are_added_too() -> None:
    wide = torch.arange(12, dtype=torch.float32).view(3, 4)
    for native in (None, ready()):
        got = add_up([[Part(wide[:, 1:3], torch.tensor([0, 1, 3]))]], torch.empty(4, 2, dtype=torch.bfloat16), native)
        assert got.tolist() == [[1.0, 2.0], [5.0, 6.0], [0.0, 0.0], [9.0, 10.0]]


def test_parts_are_cut_at_edges_and_count_from_there() -> None:
    whole, none = part([[1.0], [2.0], [3.0]], [1, 4, 6]), part([], [])
    first, second, third = cut([0, 2, 6, 9], [whole, none])
    assert [[each.rows.flatten().tolist(), each.row_X.tolist()] for each in first] == [[[1.0], [1]], [[], []]]
    assert [each.row_X.tolist() for each in second] == [[2], []] and [each.row_X.tolist() for each in third] == [
        [0],
        [],
    ]
