"""Matrices of packed integers as checkpoints lay them out: the inverse of `weights.packed_layouts`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.kernels.reference import e2m1
from moe_mk.quant.grouped import Grouped
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.packed_layouts import INTERLEAVED, WORD, viewed


def pack(packing: str, q: QuantTensor) -> dict[str, Tensor]:
    """The tensors of a matrix, by the keys of `packed_shapes`. The inverse of `unpack` without an order of columns."""
    if packing == "gguf":
        raise ConfigError("rows of GGUF files are written by `lab.checkpoints`")
    assert q.scales is not None
    if packing == "mlx":
        scales = q.scales if isinstance(q.scheme, Grouped) else q.scales.view(torch.uint8)
        return {"": viewed(q.values, torch.uint32), "scale": scales} | ({} if q.zeros is None else {"zeros": q.zeros})
    assert isinstance(q.scheme, Grouped)
    scheme, codes = q.scheme, q.scheme.codes(q)
    n, k = q.shape
    if packing == "int_quantized":
        return {"": (codes - scheme.middle).view(torch.int8), "scale": q.scales}
    zeros = q.zeros if q.zeros is not None else torch.full_like(q.scales, scheme.middle, dtype=torch.uint8)
    if packing == "compressed_tensors":
        out = {"": viewed(q.values, torch.int32), "scale": q.scales}
        if q.zeros is not None:
            each = WORD // scheme.bits
            filled = torch.nn.functional.pad(zeros, (0, 0, 0, -n % each))
            out["zeros"] = _words(filled.T, scheme.bits).T.contiguous()
        return out | {"shape": torch.tensor([n, k], dtype=torch.int64, device=codes.device)}
    scales = q.scales.T.to(torch.float16).contiguous()
    if packing == "awq":
        rows = _to_interleaved(codes.T), _to_interleaved(zeros.T)
        return {"": _words(rows[0], scheme.bits), "scale": scales, "zeros": _words(rows[1], scheme.bits)}
    less = 0 if packing == "gptq_v2" else 1
    if less and bool((zeros == 0).any()):
        raise ConfigError(
            "GPTQ stores a zero point minus one, and one of the matrix is 0; use AWQ or compressed-tensors"
        )
    order = torch.arange(k, dtype=torch.int32, device=codes.device) // scheme.columns
    words = _words(codes, scheme.bits).T.contiguous()
    return {"": words, "scale": scales, "zeros": _words(zeros.T - less, scheme.bits), "order": order}


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes in 32-bit words, lowest bits first."""
    return viewed(e2m1.pack(codes) if bits == 4 else codes, torch.int32)


def _to_interleaved(codes: Tensor) -> Tensor:
    return codes.reshape(codes.shape[0], -1, len(INTERLEAVED))[..., list(INTERLEAVED)].flatten(1)
