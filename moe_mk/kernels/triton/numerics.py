"""Device functions shared by all kernels: conversions with the same result on a GPU and in the interpreter.

NOTE: the interpreter of Triton 3.6 converts f32 to e4m3 without carry, subnormals or saturation, and f32 to bf16 by
truncation. Only in the interpreter, values are rounded to the target's grid first, so that the conversion is exact.

NOTE: the interpreter of Triton 3.6 converts a scalar to a Python integer with int(array of one element), which NumPy
2.4 rejects; it is patched to use `.item()`. Without this, loops with a bound that is an argument do not run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter


def let_scalars_be_loop_bounds() -> None:
    """Patch the interpreter to convert one-element arrays to integers. Idempotent."""
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "reads_items", False):
        return

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patch_lang_tensor.reads_items = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_lang_tensor


INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Whether kernels of this process run in the interpreter. Triton reads it when a kernel is defined."""

IN_INTERPRETER = tl.constexpr(INTERPRETED)
if INTERPRETED:
    let_scalars_be_loop_bounds()
FP8_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-10)


@triton.jit
def to_e4m3(x):
    """f32 to e4m3: to nearest even, saturating at 448. NaN stays NaN on a GPU."""
    x = tl.maximum(x, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if IN_INTERPRETER:
        bits = x.to(tl.int32, bitcast=True)
        exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, -6)
        # Adding 1.5 * 2^(e + 20) leaves three mantissa bits, rounded to nearest even by the addition itself.
        shift = ((exponent + 147) << 23).to(tl.float32, bitcast=True) * 1.5
        rounded = ((x + shift) - shift).to(tl.int32, bitcast=True)
        x = (rounded | ((bits >> 31) << 31)).to(tl.float32, bitcast=True)  # restores the sign of zero
    return x.to(tl.float8e4nv)


@triton.jit
def to_bf16(x):
    """f32 to bf16, to nearest even."""
    if IN_INTERPRETER:
        bits = x.to(tl.int32, bitcast=True)
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (even & -65536).to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """f32 to the dtype of an output."""
    if dtype == tl.bfloat16:
        return to_bf16(x)
    else:
        return x.to(dtype)


@triton.jit
def scale_of(amax, POWER_OF_TWO: tl.constexpr):
    """The scale that brings an amax to 448: exact f32 division, then up to a power of two by its bits for UE8M0."""
    scale = tl.div_rn(tl.maximum(amax, AMAX_FLOOR), 448.0)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        up = ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (((bits >> 23) + up) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def as_scale(code):
    """A scale as f32, from f32 or from the byte of a UE8M0 code."""
    if code.dtype == tl.uint8:
        return (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return code


@triton.jit
def activate(x, NAME: tl.constexpr):
    """The activation of the gate, by its name in kernels/reference/activation.py, in f32."""
    if NAME == "silu":
        return x / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    else:
        tl.static_assert(NAME == "relu2")
        positive = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
        return positive * positive


@triton.jit
def soft_limit(x, LIMIT: tl.constexpr):
    """LIMIT * tanh(x / LIMIT), by tanh(z) = 2 sigmoid(2 z) - 1: exact to an ulp of LIMIT."""
    return LIMIT * (2.0 / (1.0 + tl.exp(x * (-2.0 / LIMIT))) - 1.0)


@triton.jit
def hidden_of(gate, up, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GATED: tl.constexpr):
    """Compute a hidden value from the sums of gate and up, in f32: `activation` of kernels/reference/activation.py.

    LIMIT: the gate is clamped from above and up from both sides; 0: no clamp. NaN stays NaN.
    """
    if NAME == "silu_limit":
        gate = activate(gate, "silu")
    if NAME == "situ":
        gate = soft_limit(gate, ALPHA) / (1.0 + tl.exp(-gate))
        if LIMIT > 0.0:
            up = soft_limit(up, LIMIT)
    elif LIMIT > 0.0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
    if not GATED:
        return activate(up, NAME)
    elif NAME == "swiglu_oai":
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    elif NAME == "silu_limit" or NAME == "situ":
        return gate * up
    elif NAME == "swiglu_limit":
        return activate(gate, "silu") * up
    else:
        return activate(gate, NAME) * up
