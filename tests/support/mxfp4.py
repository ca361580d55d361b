"""MXFP4 matrices that meet every case of the conversion to FP8, and their packed form."""

import torch
from torch import Tensor

from moe_mk.experts.triton.weights import PackedWeights, pack_weights
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS
from moe_mk.kernels.triton.tile import Tile
from moe_mk.quant.microscaling import MXFP4
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights

SPREAD = 11
"""Binades between the scales of a block that FP8 can represent."""


def wide_matrix(rows: int, columns: int, *, spread: int = SPREAD, base: int = 100, seed: int = 0) -> QuantTensor:
    """All 16 codes, and scales from 2^(base - 127) on over `spread` binades, both ends in every block of 128 x 128.
    Every third group of every fifth row is zeros, of both signs, under a scale that no block has."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=draw, dtype=torch.uint8)
    scales = base + torch.randint(0, spread + 1, (rows, -(-columns // 32)), generator=draw, dtype=torch.uint8)
    scales[::64, ::4], scales[1::64, ::4] = base, base + spread
    codes[:2, ::32] = 1  # the first group of a step is not zeros
    codes[::64, ::32] = codes[1::64, ::32] = 7
    zeros = torch.zeros((rows, scales.shape[1]), dtype=torch.bool)
    zeros[2::5, 1::3] = True
    codes[zeros.repeat_interleave(32, dim=1)[:, :columns]] &= 8
    scales[zeros] = torch.tensor([0x00, 0xFE], dtype=torch.uint8).repeat(int(zeros.sum()))[: int(zeros.sum())]
    return QuantTensor(e2m1.pack(codes), scales.view(torch.float8_e8m0fnu), MXFP4)


def packed(above: QuantTensor, down: QuantTensor, device: torch.device, *, spare: int = 0) -> PackedWeights:
    """One expert without a gate, to be multiplied as FP8 if that is exact."""
    stack = MappedExpertWeights((SlotWeights(None, above, down),), MXFP4)
    return pack_weights(stack, KERNEL_FORMATS["mxfp4"], device, spare=spare)


def products_with_ones(q: QuantTensor, tile: Tile, device: torch.device) -> Tensor:
    """The second GEMM on the rows of an identity matrix: row t of the result is column t of the weights, in f32."""
    from moe_mk.kernels.triton.grouped_w2 import grouped_w2
    from moe_mk.kernels.triton.tile_map import tile_map

    columns, weights = q.shape[1], packed(q, q, device)
    assert weights.format.name == "mxfp4"
    ones = torch.ones((columns, -(-columns // 128)), device=device)
    h = torch.eye(columns, device=device).to(torch.float8_e4m3fn), ones
    y = torch.full((columns, len(q.values)), torch.nan, device=device)
    tiles = tile_map(torch.tensor([columns], device=device), columns, tile.rows)
    w2 = weights.w2
    grouped_w2(h, (w2.values, w2.scales), y, tiles, tile, format=weights.format, row_scales=w2.blocks)
    return y
