"""Rows as bytes: what a transport puts on the wire, and back, bit for bit.

A row is its values followed by its scales, nothing else: 14,336 B for 7,168 bf16 values, 7,392 B in FP8 with f32
scales per 128, 7,224 B with UE8M0 scales, 7,392 B in MXFP8, 4,032 B in NVFP4. Collectives carry FP8 only as bytes:
gloo refuses the dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.quant.blocked import BlockedScheme
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor


def row_bytes(scheme: QuantScheme, hidden_size: int) -> int:
    """Bytes of one row of `hidden_size` values with its scales."""
    return scheme.num_bytes(1, hidden_size)


def as_bytes(x: Tensor) -> Tensor:
    """(rows, X) as (rows, bytes) uint8: a view, or a copy where the rows do not lie one behind the other."""
    rows, columns = x.shape
    # Flat first: a last dimension of one may have any stride, and a view as bytes wants it to be 1.
    return x.reshape(-1).view(torch.uint8).view(rows, columns * x.element_size())


def encode_rows(q: QuantTensor) -> Tensor:
    """Rows (R, H) to bytes (R, B)."""
    parts = [as_bytes(part) for part in (q.values, q.scales) if part is not None]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def decode_rows(bytes_RB: Tensor, scheme: QuantScheme, hidden_size: int) -> QuantTensor:
    """Bytes (R, B) to rows (R, H)."""
    if isinstance(scheme, Plain):
        return QuantTensor(from_bytes(bytes_RB, scheme.dtype), None, scheme)
    assert isinstance(scheme, BlockedScheme)
    wide = hidden_size // scheme.per_byte
    values = from_bytes(bytes_RB[:, :wide], scheme.element.dtype)
    scales = None if scheme.is_static else from_bytes(bytes_RB[:, wide:], scheme.scale_dtype)
    return QuantTensor(values, scales, scheme)


def from_bytes(bytes_RB: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, bytes) uint8 to (rows, X) of a dtype; a slice of wider rows is copied, so that it is aligned."""
    return bytes_RB.clone(memory_format=torch.contiguous_format).view(dtype)
