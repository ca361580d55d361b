"""Sums of rows in rank order in native code: bit for bit against torch, on every instruction set."""

import pytest
import torch

from moe_mk.kernels.native.exchange import ROW_TYPES
from moe_mk.kernels.native.library import Isa, Native
from tests.kernels.native.exchange_windows import int32, summed

IsaHere = tuple[Native, Isa]


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("hidden,ranks", [(200, 1), (96, 2), (1000, 3), (7168, 5)])
def test_sums_have_the_bits_of_adding_rank_after_rank(
    isa_here: IsaHere, dtype: torch.dtype, hidden: int, ranks: int, generator: torch.Generator
) -> None:
    native, isa = isa_here
    scores = torch.rand((40, ranks), generator=generator)
    ids_TK = torch.where(scores < 0.7, torch.arange(ranks), -1).to(torch.int32)
    tokens_of_W = [(ids_TK == rank).any(dim=1).nonzero().flatten() for rank in range(ranks)]
    parts = [torch.randn((len(tokens), hidden), generator=generator).to(dtype) for tokens in tokens_of_W]
    total = torch.zeros((40, hidden))
    for tokens, part in zip(tokens_of_W, parts, strict=True):
        total[tokens] += part.float()
    got = summed(native, ids_TK, parts, torch.arange(ranks, dtype=torch.int32), isa)
    assert torch.equal(got, total.to(dtype))


def test_f16_sums_keep_small_large_and_infinite_numbers(isa_here: IsaHere) -> None:
    native, isa = isa_here
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = every[~every.isnan()].view(1, -1)
    other = numbers.roll(12345, dims=1).contiguous()
    got = summed(native, int32([[0, 1]]), [numbers, other], torch.arange(2, dtype=torch.int32), isa)
    expected = (numbers.float() + other.float()).half()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0.0), expected.nan_to_num(0.0))
