"""What both Gluon GEMMs share: how they are launched, the ring, where a tile lies, the pin, the epilogue's arithmetic.

A tile is 128 columns twice: of gate and of up in w13, two neighbouring blocks of 128 columns in w2. One producer warp
runs ahead over tiles and keeps a ring of shared memory full; the others multiply. full[s]: stage s has landed;
empty[s]: every multiplier is done with it. Both flip once a round, phase = (step / stages) & 1.
Gluon does not run in the interpreter: `grouped_w13` and `grouped_w2` are the twins that do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_mk.kernels.triton import grouped_w2 as plain_w2
from moe_mk.kernels.triton import grouped_w13 as plain_w13
from moe_mk.kernels.triton.chain import chained
from moe_mk.kernels.triton.launch import readable_scales, resident_programs
from moe_mk.kernels.triton.tile import Tile
from moe_mk.kernels.triton.tile_map import TileMap

Scaled = tuple[Tensor, Tensor | None]

W13, W2 = gl.constexpr(0), gl.constexpr(1)

CODES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
"""FP8 operands in shared memory: rows of 128 bytes, swizzled as the matrix unit reads them."""


def code_boxes(matrix: Tensor, rows: int) -> Any:
    """A row-major FP8 matrix (m, k) as boxes of rows x 128 columns."""
    return TensorDescriptor.from_tensor(matrix, [rows, 128], CODES)


def serves(x: Tensor, scales: Tensor | None, activation: str, *, gated: bool) -> bool:
    """Whether these kernels compute a case: FP8, whole blocks of 128 columns, SwiGLU."""
    return (
        x.dtype is torch.float8_e4m3fn
        and scales is not None
        and x.shape[1] % 128 == 0
        and gated
        and activation == "silu"
    )


def launch_w13(
    kernel: Any, constants: dict[str, Any], rows: int, x: Scaled, w13: Scaled, h: Scaled, tiles: TileMap, tile: Tile,
    *, order: Tensor | None, top_k: int, activation: str, gated: bool, power_of_two: bool,
) -> None:  # fmt: skip
    """The first GEMM by a kernel of Gluon's, or by its twin where that one does not serve. rows: of a box of tokens."""
    if x[1] is None or w13[1] is None or h[1] is None or not serves(x[0], x[1], activation, gated=gated):
        plain_w13.grouped_w13(
            x, w13, h, tiles, tile, order=order, top_k=top_k, activation=activation, gated=gated,
            power_of_two=power_of_two,
        )  # fmt: skip
        return
    k, inner = x[0].shape[1], h[0].shape[1]
    scales, programs = readable_scales(x[1]), resident_programs(x[0].device)
    kernel[(programs,)](
        x[0] if order is not None else code_boxes(x[0], rows), scales, code_boxes(w13[0].view(-1, k), 128), w13[1],
        h[0], h[1], order if order is not None else tiles.count, h[1], tiles.tiles_3X, tiles.count,
        tiles.tiles_3X.stride(0), inner // 128, k // 128, 2 * inner, inner, inner, x[0].stride(0), scales.stride(0),
        scales.stride(1), h[1].stride(0), h[1].stride(1),
        **constants, TOP_K=top_k, PROGRAMS=programs, STAGES=tile.stages, MODE=W13, GATHER=order is not None,
        SCATTER=False, WEIGHTED=False, POWER_OF_TWO=power_of_two, num_warps=4, **chained(),
    )  # fmt: skip


def launch_w2(
    kernel: Any, constants: dict[str, Any], rows: int, h: Scaled, w2: Scaled, y: Tensor, tiles: TileMap, tile: Tile,
    *, order: Tensor | None, weights: Tensor | None,
) -> None:  # fmt: skip
    """The second GEMM likewise; its columns come in pairs of blocks."""
    k, width = h[0].shape[1], y.shape[1]
    if h[1] is None or w2[1] is None or not serves(h[0], h[1], "silu", gated=True) or width % 256:
        plain_w2.grouped_w2(h, w2, y, tiles, tile, order=order, weights=weights)
        return
    programs = resident_programs(y.device)
    kernel[(programs,)](
        code_boxes(h[0], rows), h[1], code_boxes(w2[0].view(-1, k), 128), w2[1],
        y, h[1], order if order is not None else tiles.count, weights if weights is not None else h[1],
        tiles.tiles_3X, tiles.count, tiles.tiles_3X.stride(0), width // 256, k // 128, width, 128, width, k,
        h[1].stride(0), h[1].stride(1), 0, 0,
        **constants, TOP_K=1, PROGRAMS=programs, STAGES=tile.stages, MODE=W2, GATHER=False,
        SCATTER=order is not None, WEIGHTED=weights is not None, POWER_OF_TWO=False, num_warps=4, **chained(),
    )  # fmt: skip


@gluon.jit
def columns_of(n, MODE: gl.constexpr):
    """First weight row of a unit's first half, within its expert."""
    return n * 128 if MODE == 0 else n * 256


@gluon.jit
def after_the_one_before():
    """Wait for the kernel before, then let the next one start."""
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def ring(boxes, ROWS: gl.constexpr, STAGES: gl.constexpr, COPIERS: gl.constexpr, READERS: gl.constexpr):
    """Shared memory of every stage, for token rows and both blocks of weights, and its barriers.

    boxes: the descriptor of the weights, whose layout the rows share. COPIERS: arrivals that fill a stage, one for all
    boxes and one for each thread that gathers rows. READERS: those that empty it.
    """
    rows_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], boxes.layout)
    one_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], boxes.layout)
    two_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], boxes.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=COPIERS)
        mbarrier.init(empty.index(stage), count=READERS)
    fence_async_shared()
    return rows_s, one_s, two_s, full, empty


@gluon.jit
def locate(t, across, tiles_ptr, tiles_stride):
    """Expert, first row, end of its rows and column block of a unit of work."""
    tile = t // across
    expert = gl.load(tiles_ptr + tile)
    first = gl.load(tiles_ptr + tiles_stride + tile)
    end = gl.load(tiles_ptr + 2 * tiles_stride + tile)
    return expert, first, end, t % across


@gluon.jit
def scale_at(pointer, mask):
    """Scales as f32, from f32 or from UE8M0 bytes."""
    if pointer.dtype.element_ty == gl.uint8:
        return (gl.load(pointer, mask=mask, other=0).to(gl.int32) << 23).to(gl.float32, bitcast=True)
    else:
        return gl.load(pointer, mask=mask, other=0.0)


@gluon.jit
def pinned(total):
    """Finish an accumulator here. NOTE: ptxas 12.8 otherwise sinks the additions below the next product and spills."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def scale_of(amax, POWER_OF_TWO: gl.constexpr):
    """As in numerics.py."""
    scale = gl.div_rn(gl.maximum(amax, 1e-10), 448.0)
    if POWER_OF_TWO:
        bits = scale.to(gl.int32, bitcast=True)
        up = ((bits & 0x7FFFFF) != 0).to(gl.int32)
        scale = (((bits >> 23) + up) << 23).to(gl.float32, bitcast=True)
    return scale
