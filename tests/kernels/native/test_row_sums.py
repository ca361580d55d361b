"""Sums of rows from several places in native code: on every instruction set the bits of adding one after the other."""

import pytest
import torch
from torch import Tensor

from moe_mk.kernels.native.exchange import BYTES_FOR_THREADS, ROW_TYPES, add_rows
from moe_mk.kernels.native.library import Native
from moe_mk.lab.testing.bits import bits_of
from tests.kernels.native.conftest import IsaHere


def drawn(rows: int, hidden: int, dtype: torch.dtype, shares: tuple[float, ...]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(rows + hidden)
    rows_of = [torch.nonzero(torch.rand(rows, generator=draw) < share).flatten() for share in shares]
    return [(torch.randn((len(row_X), hidden), generator=draw).to(dtype), row_X) for row_X in rows_of]


def one_by_one(parts: list[tuple[Tensor, Tensor]], rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    total_RH = torch.zeros((rows, hidden))
    for rows_XH, row_X in parts:
        total_RH[row_X] += rows_XH  # each row at most once in a part
    return total_RH.to(dtype)


def test_sums_by_hand(native: Native) -> None:
    # Row 0: 1 + 4, row 1: nothing, row 2: 2 + 5, row 3: 3.
    parts = [
        (torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 3])),
        (torch.tensor([[4.0], [5.0]]), torch.tensor([0, 2])),
        (torch.empty(0, 1), torch.empty(0, dtype=torch.int64)),
    ]
    assert add_rows(native, parts, torch.full((4, 1), 9.0)).flatten().tolist() == [5.0, 0.0, 7.0, 3.0]


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("hidden", [1, 40, 256])
@pytest.mark.parametrize("shares", [(1.0,), (0.5, 1.0), (0.9, 0.0, 0.3), (0.5, 0.5, 0.5, 0.5, 0.5, 0.5)])
def test_every_instruction_set_gives_the_bits_of_torch(
    native: Native, shares: tuple[float, ...], hidden: int, dtype: torch.dtype
) -> None:
    for rows in (0, 1, 17):
        parts = drawn(rows, hidden, dtype, shares)
        wanted = bits_of(one_by_one(parts, rows, hidden, dtype))
        for isa in native.isas:
            got = add_rows(native, parts, torch.full((rows, hidden), 7, dtype=dtype), isa=isa)
            assert bits_of(got) == wanted, isa


def test_f16_sums_keep_small_large_and_infinite_numbers(isa_here: IsaHere) -> None:
    native, isa = isa_here
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = every[~every.isnan()].view(1, -1)
    row = torch.zeros(1, dtype=torch.int64)
    for other in (numbers.roll(12345, dims=1).contiguous(), torch.zeros_like(numbers)):
        got = add_rows(native, [(numbers, row), (other, row)], torch.empty_like(numbers), isa=isa)
        expected = (numbers.float() + other.float()).half()
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_threads_change_no_bit(native: Native) -> None:
    rows, hidden, before = 70, BYTES_FOR_THREADS // 2 // 64, torch.get_num_threads()
    parts = drawn(rows, hidden, torch.bfloat16, (0.7, 1.0, 0.6))
    try:
        torch.set_num_threads(3)
        got = add_rows(native, parts, torch.empty((rows, hidden), dtype=torch.bfloat16))
    finally:
        torch.set_num_threads(before)
    assert bits_of(got) == bits_of(one_by_one(parts, rows, hidden, torch.bfloat16))
