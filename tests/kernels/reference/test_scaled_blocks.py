"""Scales of blocks: numbers of blocks, largest magnitudes and their places against loops, at every ragged edge."""

from __future__ import annotations

import math

import pytest
import torch

from moe_mk.kernels.reference.scaled_blocks import block_amax, blocks_of, fitted, spread

BLOCKS = [(1, 1), (1, 4), (2, 3), (3, 1), (4, 4), (1, 2**31 - 1), (2**31 - 1, 2**31 - 1)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 4), (4, 8), (5, 9), (2, 5, 7)])
def test_every_value_has_the_scale_of_its_block(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    *_, n, k = shape
    tall, wide = math.ceil(n / block[0]), math.ceil(k / block[1])
    amax = block_amax(x, block)
    assert blocks_of(n, k, block) == (tall, wide) and amax.shape == (*shape[:-2], tall, wide)
    rows, columns = fitted(n, k, block)
    assert (rows, columns) == (min(block[0], n), min(block[1], k))
    wanted = torch.zeros_like(x)
    for i in range(tall):
        for j in range(wide):
            place = (..., slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            largest = x[place].abs().flatten(-2).amax(-1)
            assert torch.equal(amax[..., i, j], largest)
            wanted[place] = largest[..., None, None]
    assert torch.equal(spread(amax, n, k, block).expand_as(x), wanted)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_a_matrix_without_values_has_no_scales(shape: tuple[int, int]) -> None:
    assert block_amax(torch.zeros(shape), (2, 3)).shape == blocks_of(*shape, (2, 3))
    assert fitted(*shape, (2, 3)) == (max(1, min(2, shape[0])), max(1, min(3, shape[1])))
