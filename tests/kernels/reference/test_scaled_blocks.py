"""Scales of blocks against loops at every ragged edge, and four-bit floats: all codes, ties, packing, ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_mk.kernels.reference.e2m1 import GRID, decode, encode, pack, unpack
from moe_mk.kernels.reference.quantize import block_amax, blocks_of, fitted, spread

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


CODES = torch.arange(16, dtype=torch.uint8)


def test_the_sixteen_codes_by_hand() -> None:
    # s ee m: 0 00 1 is half of 2^0 below the bias of 1; 0 01 0 is 1; 0 11 1 is 1.5 * 2^2.
    assert decode(CODES).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(decode(CODES))[8], "minus zero is a code of its own"
    assert torch.equal(encode(decode(CODES)), CODES)


def test_ties_go_to_the_even_mantissa_and_too_large_becomes_six() -> None:
    asked = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 6.0, 1e9, float("inf")])
    assert decode(encode(asked)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6, 6, 6]
    assert decode(encode(-asked)).tolist() == (-decode(encode(asked))).tolist()


@pytest.mark.row(101)
def test_values_are_those_of_ml_dtypes() -> None:
    edges = np.concatenate([np.asarray(GRID), (np.asarray(GRID)[1:] + np.asarray(GRID)[:-1]) / 2]).astype(np.float32)
    around = np.concatenate([np.nextafter(edges, np.float32(-9)), edges, np.nextafter(edges, np.float32(9))])
    draws = np.random.default_rng(0).normal(0, 3, 20_000).astype(np.float32)
    for x in (around, -around, draws):
        theirs = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        assert np.array_equal(decode(encode(torch.from_numpy(x))).numpy(), theirs)


@pytest.mark.row(101)
def test_packing_is_undone_for_every_pair_of_codes() -> None:
    low, high = torch.meshgrid(CODES, CODES, indexing="ij")
    codes = torch.stack((low, high), dim=-1).reshape(16, 32)
    packed = pack(codes)
    assert packed.shape == (16, 16) and packed[3, 5] == 3 + 16 * 5, "the even column lies in the low half"
    assert torch.equal(unpack(packed), codes)
