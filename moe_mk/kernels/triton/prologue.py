"""Sort few assignments and quantise their rows in one launch: the two need nothing of each other.

Program 0 does what `align` does, the others what `quantize_rows` does, eight groups each; both read and write the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.align import Alignment, choices, pointers, room_of, sizes, sort_pairs
from moe_mk.kernels.triton.chain import after_the_one_before, chained
from moe_mk.kernels.triton.quantize_rows import GROUPS_A_PROGRAM, quantize_part
from moe_mk.kernels.triton.tile import BLOCK
from moe_mk.kernels.triton.tile_map import Empty


def align_and_quantize(
    ids_RK: Tensor,
    x: Tensor,
    num_slots: int,
    tile_rows: int,
    *,
    power_of_two: bool,
    empty: Empty,
    beside: Tensor | None,
) -> tuple[Alignment, tuple[Tensor, Tensor]]:
    """The alignment of at most SMALL assignments, and rows (R, H) in FP8 with f32 scales of 128 columns."""
    aligned = room_of(ids_RK, num_slots, tile_rows, empty, beside)
    (rows, hidden), num = x.shape, aligned.ids_RK.numel()
    codes = empty((rows, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    scales = empty((rows, triton.cdiv(hidden, BLOCK)), dtype=torch.float32, device=x.device)
    parts = triton.cdiv(triton.cdiv(hidden, BLOCK), GROUPS_A_PROGRAM)
    _prologue[(1 + rows * parts,)](
        *pointers(aligned, (ids_RK, beside)), num, num_slots, aligned.tiles.tiles_3X.stride(0),
        x, codes, scales, parts, hidden, x.stride(0), codes.stride(0), scales.stride(0), scales.stride(1),
        **sizes(num, num_slots), **choices(ids_RK, beside), TILE=tile_rows, GROUP=BLOCK, GROUPS=GROUPS_A_PROGRAM,
        POWER_OF_TWO=power_of_two, num_warps=8, **chained(),
    )  # fmt: skip
    return aligned, (codes, scales)


@triton.jit
def _prologue(
    ids_ptr, weights_ptr, all_ids_ptr, all_weights_ptr, order_ptr, tiles_ptr, count_ptr, num, num_slots, stride,
    x_ptr, codes_ptr, scales_ptr, parts, hidden, x_stride, codes_stride, scales_m, scales_k,
    PAIRS: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, BESIDE: tl.constexpr,
    TILE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    if tl.program_id(0) == 0:
        sort_pairs(
            ids_ptr, weights_ptr, all_ids_ptr, all_weights_ptr, order_ptr, tiles_ptr, count_ptr, num, num_slots,
            stride, PAIRS, STEP, TILE, SLOTS, TOP_K, BESIDE,
        )  # fmt: skip
    else:
        part = tl.program_id(0) - 1
        quantize_part(
            (part // parts).to(tl.int64), part % parts, x_ptr, codes_ptr, scales_ptr, hidden, x_stride, codes_stride,
            scales_m, scales_k, GROUP, GROUPS, POWER_OF_TWO,
        )  # fmt: skip
