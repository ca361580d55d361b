"""Both grouped GEMMs for Hopper in Gluon: FP8, and SwiGLU with or without clamps.

One kernel computes both products and every tile: `gluon_decode.py` divides its warps for few rows per expert,
`gluon_middle.py` for 64, `gluon_prefill.py` for many. Gluon does not run in the interpreter: `grouped_w13` and
`grouped_w2` are equivalent kernels that do; `experts.py` takes them for other cases. Clamps and activations share one
function.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_mk.kernels.triton.grouped_w13 import CLAMPED
from moe_mk.kernels.triton.launch import chained, readable_scales, resident_programs
from moe_mk.kernels.triton.tile import Tile
from moe_mk.kernels.triton.tile_map import TileMap
from moe_mk_contrib.gluon import gluon_decode, gluon_middle, gluon_prefill
from moe_mk_contrib.gluon.gluon_parts import W2, W13, How, Out, Scales, Units, after_the_one_before, from_l2, ring_of

Scaled = tuple[Tensor, Tensor | None]

CODES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
"""FP8 operands in shared memory: rows of 128 bytes, swizzled as the matrix unit reads them."""


def code_boxes(matrix: Tensor, rows: int) -> Any:
    """A row-major FP8 matrix (m, k) as boxes of rows x 128 columns."""
    return TensorDescriptor.from_tensor(matrix, [rows, 128], CODES)


def weight_box(tile_rows: int) -> int:
    """Weight rows of a box: in tiles of 64 rows half of a block, since each warpgroup multiplies halves of both."""
    return 64 if tile_rows == 64 else 128


def grouped_w13(
    x: Scaled,
    w13: Scaled,
    h: Scaled,
    tiles: TileMap,
    tile: Tile,
    *,
    order: Tensor | None = None,
    top_k: int = 1,
    activation: str = "silu",
    power_of_two: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
) -> None:
    """As `grouped_w13.grouped_w13` for FP8, whole blocks of 128 columns, SwiGLU."""
    assert x[1] is not None and h[1] is not None
    k, inner = x[0].shape[1], h[0].shape[1]
    scales, programs = readable_scales(x[1]), resident_programs(x[0].device)
    _by_hand[(programs,)](
        x[0] if order is not None else code_boxes(x[0], tile.rows), scales,
        code_boxes(w13[0].view(-1, k), weight_box(tile.rows)), w13[1], h[0], h[1],
        order if order is not None else tiles.count, h[1], tiles.tiles_3X, tiles.count,
        tiles.tiles_3X.stride(0), 0, inner // 128, k // 128, 2 * inner, inner, inner, x[0].stride(0), scales.stride(0),
        scales.stride(1), h[1].stride(0), h[1].stride(1),
        ROWS=tile.rows, STAGES=tile.stages, MODE=W13, GATHER=order is not None, SCATTER=False, WEIGHTED=False,
        REDUCED=False, TOP_K=top_k, PROGRAMS=programs, POWER_OF_TWO=power_of_two, ACTIVATION=activation, ALPHA=alpha,
        LIMIT=(limit or 0.0) if activation in CLAMPED else 0.0, num_warps=4, **chained(),
    )  # fmt: skip


def grouped_w2(
    h: Scaled,
    w2: Scaled,
    y: Tensor,
    tiles: TileMap,
    tile: Tile,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
    reduced: bool = False,
) -> None:
    """As `grouped_w2.grouped_w2` for FP8 and multiples of 256 columns, which are processed in pairs of blocks."""
    assert h[1] is not None
    k, width, programs = h[0].shape[1], y.shape[1], resident_programs(y.device)
    _by_hand[(programs,)](
        code_boxes(h[0], tile.rows), h[1], code_boxes(w2[0].view(-1, k), weight_box(tile.rows)), w2[1],
        y, h[1], order if order is not None else tiles.count, weights if weights is not None else h[1],
        tiles.tiles_3X, tiles.count, tiles.tiles_3X.stride(0), y.shape[0], width // 256, k // 128, width, 128, width, k,
        h[1].stride(0), h[1].stride(1), 0, 0,
        ROWS=tile.rows, STAGES=tile.stages, MODE=W2, GATHER=False, SCATTER=order is not None,
        WEIGHTED=weights is not None, REDUCED=reduced, TOP_K=1, PROGRAMS=programs, POWER_OF_TWO=False,
        ACTIVATION="silu", ALPHA=1.0, LIMIT=0.0, num_warps=4, **chained(),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles_stride", "num"])
def _by_hand(
    x, x_scales_ptr, w, w_scales_ptr, out_ptr, out_scales_ptr, order_ptr, weights_ptr, tiles_ptr, count_ptr,
    tiles_stride, num, across, steps, rows_an_expert, second, width, x_stride, x_scales_m, x_scales_k, out_scales_m,
    out_scales_k,
    ROWS: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    WEIGHTED: gl.constexpr, REDUCED: gl.constexpr, TOP_K: gl.constexpr, PROGRAMS: gl.constexpr,
    POWER_OF_TWO: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    how: gl.constexpr = How(
        ROWS, STAGES, MODE, GATHER, SCATTER, WEIGHTED, REDUCED, TOP_K, PROGRAMS, POWER_OF_TWO, ACTIVATION, ALPHA, LIMIT
    )
    # One arrival for the boxes of a stage, and one for each thread that gathers rows of it.
    THREADS: gl.constexpr = 128 if ROWS == 128 else 32
    ring = ring_of(w, ROWS, STAGES, 1 + THREADS if GATHER else 1, 2 if ROWS >= 64 else 1)
    if MODE == 0 or ROWS == 128:  # with fewer rows the second product waits where it needs the first one
        after_the_one_before()
    units = Units(tiles_ptr, tiles_stride, from_l2(count_ptr) * across, num, across, steps, rows_an_expert, second)
    scales = Scales(x_scales_ptr, x_scales_m, x_scales_k, w_scales_ptr)
    out = Out(out_ptr, width, out_scales_ptr, out_scales_m, out_scales_k, weights_ptr)
    if ROWS == 128:
        gluon_prefill.run(x, w, x_stride, order_ptr, units, ring, scales, out, how)
    elif ROWS == 64:
        gluon_middle.run(x, w, x_stride, order_ptr, units, ring, scales, out, how)
    else:
        gluon_decode.run(x, w, x_stride, order_ptr, units, ring, scales, out, how)
