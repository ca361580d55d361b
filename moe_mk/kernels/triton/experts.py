"""w13 -> activation -> w2 over all experts of a rank, one function for each layout of tokens; no host synchronisation.

    rows      quantise, align, w13 gathering its rows, w2 scattering weighted rows, combine     5 launches in decode
    grouped   quantise, tile list, w13, w2
    batched   the same over blocks with padding: rows past the count of a block are computed or not, never stored

Everything between input and output lies in memory that `empty` hands out. Rows of padding, and positions of dropped
assignments, are never read into a row that is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.kernels.triton.align import align
from moe_mk.kernels.triton.combine import combine
from moe_mk.kernels.triton.grouped_w2 import grouped_w2
from moe_mk.kernels.triton.grouped_w13 import grouped_w13
from moe_mk.kernels.triton.quantize_rows import quantize_rows_into
from moe_mk.kernels.triton.tile import BLOCK, Tile
from moe_mk.kernels.triton.tile_map import Empty, TileMap, tile_map

Scaled = tuple[Tensor, Tensor | None]
"""Values and their scales; None: plain values."""


@dataclass(frozen=True)
class Experts:
    """The experts of one rank and how they compute."""

    w13: Scaled
    """(L, 2I, H) and, in FP8, f32 (L, 2I / 128, ceil(H / 128)); (L, I, H) without a gate."""
    w2: Scaled
    """(L, H, I) and f32 (L, ceil(H / 128), I / 128)."""
    activation: str = "silu"
    gated: bool = True
    power_of_two: bool = False
    """Whether activation scales are powers of two (UE8M0)."""

    @property
    def inner(self) -> int:
        """I."""
        return self.w2[0].shape[2]

    @property
    def num_slots(self) -> int:
        """L."""
        return self.w2[0].shape[0]


def experts_rows(
    x: Scaled, ids_RK: Tensor, weights_RK: Tensor, experts: Experts, tile: Tile, empty: Empty,
    *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Every row through its experts, weighed and summed: (R, H) in bf16.

    x: (R, H) bf16, or FP8 with scales of 128 columns. ids_RK: int32, -1 drops out. out: where to put the sums instead.
    """
    rows, hidden = x[0].shape
    if rows == 0:
        return torch.empty((0, hidden), dtype=torch.bfloat16, device=x[0].device) if out is None else out
    aligned = align(ids_RK, experts.num_slots, tile.rows, empty=empty)
    y = empty((ids_RK.numel(), hidden), dtype=torch.bfloat16, device=x[0].device)
    x = _rounded(x, experts, empty)
    _both(x, experts, y, aligned.tiles, tile, empty, order=aligned.order_N, top_k=ids_RK.shape[1], weights=weights_RK)
    return combine(y, ids_RK, out=out)


def experts_grouped(x: Scaled, counts_L: Tensor, experts: Experts, tile: Tile, empty: Empty) -> Tensor:
    """Rows sorted by expert, one output row each, unweighed: (N, H) in bf16."""
    y = torch.empty(x[0].shape, dtype=torch.bfloat16, device=x[0].device)
    if y.shape[0]:
        tiles = tile_map(counts_L, y.shape[0], tile.rows, empty=empty)
        _both(_rounded(x, experts, empty), experts, y, tiles, tile, empty)
    return y


def experts_batched(x: Scaled, counts_L: Tensor, experts: Experts, tile: Tile, empty: Empty) -> Tensor:
    """One padded block an expert, outputs in the same places, unweighed: (L, S, H) in bf16; padding holds anything."""
    slots, block, hidden = x[0].shape
    y = torch.empty((slots, block, hidden), dtype=torch.bfloat16, device=x[0].device)
    if y.numel():
        tiles = tile_map(counts_L, slots * block, tile.rows, block=block, empty=empty)
        flat = (x[0].reshape(-1, hidden), None if x[1] is None else x[1].reshape(slots * block, -1))
        _both(_rounded(flat, experts, empty), experts, y.view(-1, hidden), tiles, tile, empty)
    return y


def _both(
    x: Scaled, experts: Experts, y: Tensor, tiles: TileMap, tile: Tile, empty: Empty,
    *, order: Tensor | None = None, top_k: int = 1, weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Both GEMMs over a list of tiles; the rows between them are as many as positions."""
    positions = y.shape[0]
    h: Scaled = (empty((positions, experts.inner), dtype=x[0].dtype, device=y.device), None)
    if x[1] is not None:
        h = (h[0], empty((positions, experts.inner // BLOCK), dtype=torch.float32, device=y.device))
    w13, w2 = _kernels(tile)
    w13(
        x, experts.w13, h, tiles, tile, order=order, top_k=top_k, activation=experts.activation, gated=experts.gated,
        power_of_two=experts.power_of_two,
    )  # fmt: skip
    w2(h, experts.w2, y, tiles, tile, order=order, weights=weights)


def _kernels(tile: Tile) -> tuple[Callable[..., None], Callable[..., None]]:
    """Both GEMMs by the engine of a tile."""
    if tile.engine == "triton":
        return grouped_w13, grouped_w2
    from moe_mk.kernels.triton import gluon_decode, gluon_prefill  # Gluon is experimental: loaded where a tile asks

    module = gluon_decode if tile.swap else gluon_prefill
    return module.grouped_w13, module.grouped_w2


def _rounded(x: Scaled, experts: Experts, empty: Empty) -> Scaled:
    """Rows as the first GEMM reads them: quantised here where they came plain and the experts compute in FP8."""
    values, scales = x
    if values.stride(-1) != 1:
        values = values.contiguous()
    if experts.w13[1] is None or scales is not None:
        return values, scales
    rows, hidden = values.shape
    codes = empty((rows, hidden), dtype=torch.float8_e4m3fn, device=values.device)
    made = empty((rows, -(-hidden // BLOCK)), dtype=torch.float32, device=values.device)
    quantize_rows_into(values, codes, made, BLOCK, power_of_two=experts.power_of_two)
    return codes, made
