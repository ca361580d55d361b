"""Per-token 1x128 quantisation to e4m3 and the search for NaN codes, on raw tensors."""

from __future__ import annotations

import ctypes

import torch

from moe_mk.errors import ShapeError
from moe_mk.kernels.native.layout import SCALE_BLOCK
from moe_mk.kernels.native.library import Isa, Native


def quantize_1x128(
    native: Native, x_TH: torch.Tensor, *, ue8m0: bool = False, threads: int = 1, isa: Isa | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every 128 values of a row: e4m3 values [T, H] and f32 scales [T, ceil(H / 128)].

    amax = max |x|, at least 1e-10; scale = amax / 448; value = e4m3(x / scale), nearest even, saturating. A group with
    a NaN becomes all NaN. ue8m0: scales are rounded up to powers of two. x_TH: bf16 or f32, any row stride.
    """
    if x_TH.dim() != 2 or x_TH.dtype not in (torch.bfloat16, torch.float32):
        raise ShapeError(f"x is {tuple(x_TH.shape)} {x_TH.dtype}, expected (T, H) in bfloat16 or float32")
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    tokens, hidden = x_TH.shape
    values_TH = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device="cpu")
    scales_TX = torch.empty(tokens, -(-hidden // SCALE_BLOCK), dtype=torch.float32, device="cpu")
    native.call(
        "quantize", x_TH.data_ptr(), tokens, hidden, x_TH.stride(0), int(x_TH.dtype == torch.float32), int(ue8m0),
        values_TH.data_ptr(), scales_TX.data_ptr(), native.threads(threads), int(native.isa_or_best(isa)),
    )  # fmt: skip
    return values_TH, scales_TX


def count_nans(native: Native, codes: torch.Tensor, *, threads: int = 1, isa: Isa | None = None) -> int:
    """Count the e4m3 codes that are NaN (0x7f, 0xff) in a contiguous tensor, at memory speed."""
    if codes.dtype not in (torch.float8_e4m3fn, torch.uint8) or not codes.is_contiguous():
        raise ShapeError(f"codes are {codes.dtype}, strides {codes.stride()}; expected dense float8_e4m3fn or uint8")
    found = ctypes.c_int64(0)
    chosen = int(native.isa_or_best(isa))
    native.call("count_nans", codes.data_ptr(), codes.numel(), native.threads(threads), chosen, ctypes.byref(found))
    return found.value
