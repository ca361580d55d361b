"""Rows to windows and sums of rows in native code: by hand, bit for bit against torch, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.native import Isa, Native
from moe_mk.kernels.native.exchange import (
    BYTES_FOR_THREADS,
    ROW_TYPES,
    Rounding,
    RowFormat,
    SortedRows,
    add_up,
    receive,
    send_rows,
    sort_rows,
    wait,
)
from moe_mk.kernels.reference.quantize_rows import quantize_rows

IsaHere = tuple[Native, Isa]
RANK_OF_P = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)
SLOT_OF_P = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.int32)


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_tokens_are_sorted_by_the_ranks_they_visit(native: Native) -> None:
    # Experts 0 1 | 2 3 | 4 5 on three ranks. Token 0 visits 0 twice, token 1 nobody, token 2 ranks 2 and 0.
    rows = sort_rows(native, int32([[0, 1], [-1, -1], [5, 0]]), RANK_OF_P, 3)
    assert rows.counts == [2, 0, 1] == rows.counts_W.tolist()
    assert rows.token_of_WT[0, :2].tolist() == [0, 2] and rows.token_of_WT[2, :1].tolist() == [2]
    assert sort_rows(native, torch.empty((0, 2), dtype=torch.int32), RANK_OF_P, 3).counts == [0, 0, 0]
    with pytest.raises(ShapeError, match="an id is neither -1 nor"):
        sort_rows(native, int32([[6, 0]]), RANK_OF_P, 3)


def sent(
    native: Native, x: tuple[Tensor, Tensor | None], form: RowFormat, ids_TK: Tensor, ranks: int, isa: Isa | None = None
) -> tuple[SortedRows, list[Tensor], list[Tensor]]:
    """Rows and tails as they lie at each rank."""
    weights_TK = torch.arange(ids_TK.numel(), dtype=torch.float32).view(ids_TK.shape) + 0.5
    rows = sort_rows(native, ids_TK, RANK_OF_P, ranks)
    tail_bytes = form.scale_bytes + 8 * form.top_k
    values, tails = (
        [torch.full((count + 1, width), 0xAA, dtype=torch.uint8) for count in rows.counts]
        for width in (form.value_bytes, tail_bytes)
    )
    to = [part.data_ptr() for part in values], [part.data_ptr() for part in tails]
    send_rows(native, form, rows, x, (ids_TK, weights_TK), (RANK_OF_P, SLOT_OF_P), *to, isa=isa)
    assert all(bool((part[-1] == 0xAA).all()) for part in (*values, *tails)), "nothing is written behind the rows"
    return rows, [part[:-1] for part in values], [part[:-1] for part in tails]


def test_rows_and_tails_by_hand(native: Native) -> None:
    x_TX = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8)
    scales_TX = torch.tensor([[10], [11], [12]], dtype=torch.uint8)
    _, values, tails = sent(native, (x_TX, scales_TX), RowFormat(3, 1, 2), int32([[0, 1], [-1, -1], [5, 0]]), 3)
    assert [part.tolist() for part in values] == [[[1, 2, 3], [7, 8, 9]], [], [[7, 8, 9]]]
    scales_RB, ids_RK, weights_RK = receive(
        native, RowFormat(3, 1, 2), [2, 0, 1], [0, 0, 0], [part.data_ptr() for part in tails], 0
    )
    assert scales_RB.tolist() == [[10], [12], [12]]
    # Token 0 has slots 0 and 1 at rank 0; token 2 has slot 1 at rank 2 (its first choice), slot 0 at rank 0.
    assert ids_RK.tolist() == [[0, 1], [-1, 0], [1, -1]]
    assert weights_RK.tolist() == [[0.5, 1.5], [0.0, 5.5], [4.5, 0.0]]


def test_rows_that_lie_apart_are_put_in_order(native: Native) -> None:
    first, second = (torch.full((count, 4), number, dtype=torch.uint8) for count, number in ((2, 1), (1, 2)))
    window, tails = torch.zeros((3, 4), dtype=torch.uint8), torch.zeros((3, 8), dtype=torch.uint8)
    window[2] = 9  # there already: no address, no copy
    places = [first.data_ptr(), 0]
    receive(native, RowFormat(4, 0, 1), [2, 1], places, [tails.data_ptr()] * 2, window.data_ptr())
    assert window.tolist() == [[1] * 4, [1] * 4, [9] * 4]
    receive(native, RowFormat(4, 0, 1), [0, 1], [0, second.data_ptr()], [tails.data_ptr()] * 2, window[2:].data_ptr())
    assert window.tolist() == [[1] * 4, [1] * 4, [2] * 4]


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("hidden", [7168, 200, 96])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_rows_rounded_on_the_way_have_the_bits_of_the_reference(
    isa_here: IsaHere, dtype: torch.dtype, hidden: int, ue8m0: bool, generator: torch.Generator
) -> None:
    native, isa = isa_here
    spread = 10.0 ** torch.randint(-6, 4, (24, 1), generator=generator)
    x_TH = (torch.randn((24, hidden), generator=generator) * spread).to(dtype)
    x_TH[3] = 0.0
    x_TH[4, ::3] *= 1e-5  # below the smallest normal code
    x_TH[5] = torch.arange(hidden).sub(hidden // 2).to(dtype)  # many quotients right between two codes
    groups = -(-hidden // 128)
    rounding, width = (Rounding.FP8_UE8M0, 1) if ue8m0 else (Rounding.FP8, 4)
    form = RowFormat(hidden, groups * width, 1, rounding)
    ids_TK = torch.arange(24, dtype=torch.int32)[:, None] % 4
    rows, values, tails = sent(native, (x_TH, None), form, ids_TK, 2, isa)
    codes, scales = quantize_rows(x_TH, 128, power_of_two=ue8m0)
    expected = scales.to(torch.float8_e8m0fnu) if ue8m0 else scales
    for rank in range(2):
        tokens = rows.token_of_WT[rank, : rows.counts[rank]].long()
        assert torch.equal(values[rank], codes.view(torch.uint8)[tokens])
        assert torch.equal(tails[rank][:, : groups * width], expected.view(torch.uint8).view(24, -1)[tokens])


@pytest.mark.slow
def test_all_bf16_numbers_under_many_scales_have_the_bits_of_the_reference(isa_here: IsaHere) -> None:
    native, isa = isa_here
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    finite = every[every.isfinite() & (every.abs() < 1e30) & (every.abs() > 1e-30)]
    finite = finite[: len(finite) // 127 * 127].view(-1, 127)
    for largest in torch.linspace(1.0, 2.0, 33).tolist():
        near = finite[(finite.abs() <= 1.0).all(dim=1)]
        x_TH = torch.cat((near, torch.full((len(near), 1), largest)), dim=1).bfloat16().view(len(near), 128)
        ids_TK = torch.zeros((len(near), 1), dtype=torch.int32)
        form = RowFormat(128, 4, 1, Rounding.FP8)
        _, values, _ = sent(native, (x_TH, None), form, ids_TK, 1, isa)
        assert torch.equal(values[0], quantize_rows(x_TH, 128)[0].view(torch.uint8))


def test_a_group_with_a_nan_becomes_nan(isa_here: IsaHere) -> None:
    native, isa = isa_here
    x_TH = torch.ones((1, 256)).bfloat16()
    x_TH[0, 130] = float("nan")
    form = RowFormat(256, 8, 1, Rounding.FP8)
    _, values, tails = sent(native, (x_TH, None), form, int32([[0]]), 1, isa)
    back = values[0].view(torch.float8_e4m3fn).float()
    assert not back[0, :128].isnan().any() and back[0, 128:].isnan().all()
    assert tails[0][0, :8].clone().view(torch.float32).isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("hidden,ranks", [(200, 1), (96, 2), (1000, 3), (7168, 5)])
def test_sums_have_the_bits_of_adding_rank_after_rank(
    isa_here: IsaHere, dtype: torch.dtype, hidden: int, ranks: int, generator: torch.Generator
) -> None:
    native, isa = isa_here
    rank_of_P = torch.arange(ranks, dtype=torch.int32)
    scores = torch.rand((40, ranks), generator=generator)
    ids_TK = torch.where(scores < 0.7, torch.arange(ranks), -1).to(torch.int32)
    rows = sort_rows(native, ids_TK, rank_of_P, ranks)
    parts = [torch.randn((count, hidden), generator=generator).to(dtype) for count in rows.counts]
    total = torch.zeros((40, hidden))
    for rank, part in enumerate(parts):
        total[rows.token_of_WT[rank, : rows.counts[rank]].long()] += part.float()
    got = add_up(native, rows, [part.data_ptr() for part in parts], hidden, dtype, isa=isa)
    assert torch.equal(got, total.to(dtype))


def test_f16_sums_keep_small_large_and_infinite_numbers(isa_here: IsaHere) -> None:
    native, isa = isa_here
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = every[~every.isnan()].view(1, -1)
    other = numbers.roll(12345, dims=1).contiguous()
    rows = sort_rows(native, int32([[0, 1]]), torch.arange(2, dtype=torch.int32), 2)
    got = add_up(native, rows, [numbers.data_ptr(), other.data_ptr()], numbers.shape[1], torch.float16, isa=isa)
    expected = (numbers.float() + other.float()).half()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_threads_change_nothing(native: Native, generator: torch.Generator) -> None:
    x_TH = torch.randn((300, 7168), generator=generator).bfloat16()
    assert x_TH.nbytes > BYTES_FOR_THREADS
    ids_TK = (torch.arange(600, dtype=torch.int32).view(300, 2) * 7) % 6
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            rows, values, tails = sent(native, (x_TH, None), RowFormat(7168, 224, 2, Rounding.FP8), ids_TK, 3)
            y = [torch.randn((count, 7168), generator=generator.manual_seed(5)).bfloat16() for count in rows.counts]
            made.append([*values, *tails, add_up(native, rows, [e.data_ptr() for e in y], 7168, torch.bfloat16)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_waiting_ends_with_the_epoch_or_with_the_time(native: Native) -> None:
    words = torch.tensor([3 << 32 | 7, 4 << 32], dtype=torch.int64)
    addresses = [words[i:].data_ptr() for i in range(2)]
    assert wait(native, addresses, 3, 10**9), "a fast peer is not missed"
    assert not wait(native, addresses, 4, 100)
    words[0] = -(1 << 32)  # epoch 2^32 - 1: behind what comes after it
    assert not wait(native, addresses[:1], 1 << 32, 100) and wait(native, addresses[:1], (1 << 32) - 1, 0)


@pytest.mark.parametrize(
    "x,form,complaint",
    [
        (torch.zeros((1, 8)), RowFormat(8, 0, 1), r"rows have 32 \+ 0 bytes, expected 8 \+ 0"),
        (torch.zeros((1, 8), dtype=torch.float64), RowFormat(8, 4, 1, Rounding.FP8), r"float64, expected \(T, 8\)"),
        (torch.zeros((1, 256)), RowFormat(256, 4, 1, Rounding.FP8), r"4 bytes of scales, 2 groups of 128"),
        (torch.zeros((8, 2)).T, RowFormat(32, 0, 1), r"values must lie close within a row"),
    ],
)
def test_rows_of_another_shape_are_refused(native: Native, x: Tensor, form: RowFormat, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        sent(native, (x, None), form, torch.zeros((len(x), 1), dtype=torch.int32), 1)
