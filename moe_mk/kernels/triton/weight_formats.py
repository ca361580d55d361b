"""Conversion of a tile of weights to an operand of the matrix unit, one branch per format; used by both grouped GEMMs.

Weight-only formats are decoded in registers, from which Hopper's matrix unit reads its left operand. Every product of
code and group scale is exact in bf16: 2 or 4 significant bits times at most 4. Block scales are arbitrary f32 values:
they are applied to the sum of a step, or to the weights, which are then rounded to bf16 once. `kernel_format.py` lists
the formats.

MXFP4 multiplied as FP8 (`mxfp4`) is decoded to e4m3 exactly. A permutation of bytes looks up four magnitudes in a table
of eight bytes, after the shift of the group was added to their exponents: 4.5 instructions for four weights, one of
them for the table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import constexpr_function

from moe_mk.kernels.triton.numerics import IN_INTERPRETER, to_bf16

# The magnitudes 0, 0.5, 1, 1.5 (low) and 2, 3, 4, 6 (high) times 2^-5 in e4m3. Adding 8 doubles a number; 0 stays 0.
LOW_MAGNITUDES, LOW_BINADE = tl.constexpr(0x14100800), tl.constexpr(0x08080800)
HIGH_MAGNITUDES, HIGH_BINADE = tl.constexpr(0x24201C18), tl.constexpr(0x08080808)
DECODE_FP8 = tl.constexpr("""{
    .reg .b32 first, second, sign;
    and.b32 first, $2, 0x77777777;
    shr.u32 second, first, 16;
    prmt.b32 first, $3, $7, first;
    prmt.b32 second, $11, $15, second;
    and.b32 sign, $2, 0x80808080;
    or.b32 $0, first, sign;
    shl.b32 sign, $2, 4;
    and.b32 sign, sign, 0x80808080;
    or.b32 $1, second, sign;
}""")
"""Operands: e4m3 of the first and of the second half of the columns; a word; then low and high table of the first, and
of the second half. Tables are repeated for the four weights of a register."""
POWER_126 = tl.constexpr(2.0**126)
POWER_23 = tl.constexpr(2.0**23)


@constexpr_function
def packs(format):
    """Whether a byte of weights holds two codes."""
    return format in ("mxfp4", "w_mxfp4", "w_nvfp4", "w_int4", "w_int4_zero")


@constexpr_function
def halved(format, rows, gathered):
    """Whether the first GEMM multiplies the column halves of a step one after the other.

    NOTE: with 128 gathered rows a thread then needs half as many pointers to them, and no register is spilled.
    """
    return format == "mxfp4" and rows == 128 and gathered


@triton.jit
def scale_codes(ptr, expert, step, steps, row, rows_an_expert, GROUPS: tl.constexpr, FORMAT: tl.constexpr):
    """Codes of the group scales of 128 weight rows in one step, twice (128, groups).

    For two codes per byte those of the first and of the second half of the step's columns, else all of them twice.
    Stored as (expert, step, row, group). For formats with blocks: the f32 block scale, twice; unused for formats
    without either.
    """
    if FORMAT == "w_fp8" or FORMAT == "w_int8_block" or FORMAT == "int8_block":
        HALVED: tl.constexpr = 1 if FORMAT == "int8_block" else 2  # steps in a block
        block = (expert * tl.cdiv(rows_an_expert, 128) + row // 128).to(tl.int64)
        scale = tl.load(ptr + block * tl.cdiv(steps, HALVED) + step // HALVED)
        return scale, scale
    elif GROUPS == 0:
        return 0, 0
    else:
        HALF: tl.constexpr = packs(FORMAT) and GROUPS > 1
        LOADED: tl.constexpr = GROUPS // 2 if HALF else GROUPS
        lane = tl.arange(0, 128)
        first = ((expert * steps).to(tl.int64) * rows_an_expert + row) * GROUPS
        inner = step * (rows_an_expert * GROUPS) + (lane * GROUPS)[:, None] + tl.arange(0, LOADED)[None, :]
        pointer = ptr + first + inner
        inside = (row + lane < rows_an_expert)[:, None]
        low = tl.load(pointer, mask=inside, other=0)
        return low, tl.load(pointer + LOADED, mask=inside, other=0) if HALF else low


@triton.jit
def over_columns(code, COLUMNS: tl.constexpr, NVFP4: tl.constexpr):
    """(128, groups) codes to (128, COLUMNS) f32 scales."""
    if NVFP4:
        scale = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        scale = (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return wide(scale, COLUMNS)


@triton.jit
def e2m1(code):
    """Four-bit codes (0 to 15, int32) to f32: sign, exponent and mantissa in their places, the bias by a product."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * POWER_126


@triton.jit
def integers(code, scale, MIDDLE: tl.constexpr, ZERO: tl.constexpr):
    """Codes (int32) of 128 rows and their scales (128, groups) to bf16 weights, rounded once.

    MIDDLE: the code of zero. ZERO: scales are words that contain a zero point. A code in the mantissa of 2^23 is an
    exact f32 without a conversion.
    """
    COLUMNS: tl.constexpr = code.shape[1]
    if ZERO:
        middle = (wide(scale & 0xFF, COLUMNS) | 0x4B000000).to(tl.float32, bitcast=True)
        factor = wide(scale & -256, COLUMNS).to(tl.float32, bitcast=True)
    else:
        middle = POWER_23 + MIDDLE
        factor = wide(scale, COLUMNS).to(tl.float32)
    return to_bf16(((code | 0x4B000000).to(tl.float32, bitcast=True) - middle) * factor)


@triton.jit
def wide(each, COLUMNS: tl.constexpr):
    """(128, groups) repeated to (128, COLUMNS)."""
    GROUPS: tl.constexpr = each.shape[1]
    return tl.reshape(tl.broadcast_to(each[:, :, None], [128, GROUPS, COLUMNS // GROUPS]), [128, COLUMNS])


@triton.jit
def halves(packed, low, high, NVFP4: tl.constexpr):
    """(128, C) bytes of two codes and the scales of both halves to two (128, C) operands."""
    C: tl.constexpr = packed.shape[1]
    code = packed.to(tl.int32)
    first = e2m1(code & 15) * over_columns(low, C, NVFP4)
    return to_bf16(first), to_bf16(e2m1(code >> 4) * over_columns(high, C, NVFP4))


@triton.jit
def fp8_product(a, b, w, low, high, SWAP: tl.constexpr, FORMAT: tl.constexpr, HALVED: tl.constexpr):
    """One step of FP8 times FP8, f32. a, b: as in `add_product` with HALVED, else a has all columns.

    low, high: the result of `scale_codes`.
    """
    if FORMAT == "fp8":
        return multiply(a, w, SWAP)
    else:
        first, second = fp8_halves(w, low.to(tl.int32), high.to(tl.int32))
        if HALVED:
            part = multiply(a, first.to(tl.float8e4nv, bitcast=True), SWAP)
            return multiply(b, second.to(tl.float8e4nv, bitcast=True), SWAP, part)
        else:
            # Only the order of registers changes: a thread has the same places of both halves.
            both = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [128, 128])
            return multiply(a, both.to(tl.float8e4nv, bitcast=True), SWAP)


@triton.jit
def fp8_halves(w, low, high):
    """(128, 64) bytes of mxfp4 to the bits of both column halves in e4m3, (128, 64) each. low, high: shifts, int32."""
    if IN_INTERPRETER:
        byte = tl.reshape(w.to(tl.uint32), [128, 16, 4])
        place = tl.arange(0, 4)[None, None, :]
        word = tl.sum(byte << (8 * place), axis=2)[:, :, None]
        first = e4m3_bits(word >> (4 * place), word >> (8 * place + 7), low)
        return first, e4m3_bits(word >> (16 + 4 * place), word >> (8 * place + 3), high)
    else:
        return tl.inline_asm_elementwise(
            DECODE_FP8, "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w, wide(low * LOW_BINADE + LOW_MAGNITUDES, 64), wide(low * HIGH_BINADE + HIGH_MAGNITUDES, 64),
             wide(high * LOW_BINADE + LOW_MAGNITUDES, 64), wide(high * HIGH_BINADE + HIGH_MAGNITUDES, 64)],
            dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def e4m3_bits(magnitude, sign, shift):
    """The table of `DECODE_FP8` as arithmetic: magnitudes in the lowest three bits, signs in the lowest one."""
    code = tl.reshape(magnitude & 7, [128, 64]).to(tl.int32)
    bits = 8 * wide(shift, 64) + tl.where(code == 1, 8, 8 + 4 * code)
    return (tl.where(code == 0, 0, bits) & 0x7F | tl.reshape(sign & 1, [128, 64]).to(tl.int32) << 7).to(tl.uint8)


@triton.jit
def add_product(total, a, b, w, low, high, SWAP: tl.constexpr, FORMAT: tl.constexpr):
    """Add the product of one step. a, b: token rows of both halves of its columns, b only where codes share a byte.

    low, high: the result of `scale_codes`.
    """
    if FORMAT == "w_mxfp4" or FORMAT == "w_nvfp4":
        first, second = halves(w, low, high, FORMAT == "w_nvfp4")
        total += multiply(a, first, SWAP)
        return total + multiply(b, second, SWAP)
    elif FORMAT == "w_int4" or FORMAT == "w_int4_zero":
        code = w.to(tl.int32)
        total += multiply(a, integers(code & 15, low, 8, FORMAT == "w_int4_zero"), SWAP)
        return total + multiply(b, integers(code >> 4, high, 8, FORMAT == "w_int4_zero"), SWAP)
    elif FORMAT == "w_int8_group" or FORMAT == "w_int8_zero":
        return total + multiply(a, integers(w.to(tl.int32), low, 128, FORMAT == "w_int8_zero"), SWAP)
    elif FORMAT == "w_mxfp8":
        return total + multiply(a, to_bf16(w.to(tl.float32) * over_columns(low, w.shape[1], False)), SWAP)
    elif FORMAT == "w_fp8" or FORMAT == "w_int8_block":
        # NOTE: with a wide tile of sums there are no registers for separate products; with a narrow one Triton would
        # move scaled weights to shared memory.
        if SWAP:
            return total + multiply(a, to_bf16(w.to(tl.float32)), SWAP) * low
        else:
            return total + multiply(a, to_bf16(w.to(tl.float32) * low), SWAP)
    elif FORMAT == "w_int8" or FORMAT == "w_fp8_row":
        return total + multiply(a, to_bf16(w.to(tl.float32)), SWAP)
    elif FORMAT == "int8_block":
        total = total + multiply(a, w, SWAP).to(tl.float32) * low
        return total if SWAP else pinned(total)
    elif FORMAT == "fp8_row":
        # 128 terms at a time: the matrix unit adds FP8 products with about 14 bits.
        total = total + multiply(a, w, SWAP)
        return total if SWAP else pinned(total)
    else:
        return total + multiply(a, w, SWAP)


@triton.jit
def with_row_scales(total, x_rows, there, ptr, row, count, SWAP: tl.constexpr, FORMAT: tl.constexpr):
    """A finished sum times the row scales of the format, if any; f32.

    x_rows: pointers to the scales of the tokens, if they are codes too. row: the first weight row; `count` rows remain.
    """
    if FORMAT == "int8" or FORMAT == "int8_block" or FORMAT == "fp8_row":
        total = total.to(tl.float32) * spread(tl.load(x_rows, mask=there, other=0.0), SWAP)
    if FORMAT == "int8" or FORMAT == "fp8_row" or FORMAT == "w_int8" or FORMAT == "w_fp8_row" or FORMAT == "w_nvfp4":
        lane = tl.arange(0, 128)
        total = total * spread(tl.load(ptr + row + lane, mask=lane < count, other=0.0), not SWAP)
    return total


@triton.jit
def with_bias(total, ptr, row, count, SWAP: tl.constexpr):
    """A finished sum plus the f32 biases of its weight rows. row: the first of them; `count` rows remain.

    NOTE: without the barrier ptxas hoists the biases to the loads of row scales, and spills.
    """
    if not SWAP:
        tl.debug_barrier()
    lane = tl.arange(0, 128)
    total = total + spread(tl.load(ptr + row + lane, mask=lane < count, other=0.0), not SWAP)
    return total if SWAP else pinned(total)


@triton.jit
def spread(scale, SWAP: tl.constexpr):
    """Scales of token rows, broadcast to an accumulator."""
    return scale[None, :] if SWAP else scale[:, None]


@triton.jit
def multiply(x, w, SWAP: tl.constexpr, total=None):
    """x (rows, step) times w (128, step) transposed, plus total if given: (rows, 128), or (128, rows) with SWAP."""
    if IN_INTERPRETER and x.dtype != tl.int8:  # NOTE: the interpreter of 3.6 multiplies the bits of bf16
        x, w = x.to(tl.float32), w.to(tl.float32)
    ACC: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
    return tl.dot(w, tl.trans(x), total, out_dtype=ACC) if SWAP else tl.dot(x, tl.trans(w), total, out_dtype=ACC)


@triton.jit
def pinned(total):
    """Put a barrier behind an accumulator, which is finished before the next product starts.

    NOTE: otherwise ptxas 12.8 sinks the additions below the next product, and spills the pending products. The move is
    eliminated from the code.
    """
    if not IN_INTERPRETER:
        total = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=False, pack=1
        )  # fmt: skip
    return total
