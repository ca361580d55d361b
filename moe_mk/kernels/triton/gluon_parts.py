"""What both Gluon GEMMs share: where a tile lies, barriers, the pin, the epilogue's arithmetic.

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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
