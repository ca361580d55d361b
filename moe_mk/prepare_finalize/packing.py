"""Token rows as one buffer of bytes: values and scales in the wire scheme, then ids, then routing weights.

One collective carries everything, because ids and weights of a row are needed where the row is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.quant.wire import as_bytes, decode_rows, encode_rows, from_bytes, row_bytes

ID_BYTES = 4
WEIGHT_BYTES = 4


def packed_row_bytes(wire: QuantScheme, hidden_size: int, top_k: int) -> int:
    """Bytes of one row with its K ids and weights."""
    return row_bytes(wire, hidden_size) + top_k * (ID_BYTES + WEIGHT_BYTES)


def pack(x_RH: QuantTensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """(R, B) uint8."""
    return torch.cat((encode_rows(x_RH), as_bytes(ids_RK), as_bytes(weights_RK)), dim=1)


def unpack(bytes_RB: Tensor, wire: QuantScheme, hidden_size: int, top_k: int) -> tuple[QuantTensor, Tensor, Tensor]:
    """Rows, ids (int32) and weights (f32) of packed bytes."""
    ids_at = row_bytes(wire, hidden_size)
    weights_at = ids_at + top_k * ID_BYTES
    x_RH = decode_rows(bytes_RB[:, :ids_at], wire, hidden_size)
    ids_RK = from_bytes(bytes_RB[:, ids_at:weights_at], torch.int32)
    return x_RH, ids_RK, from_bytes(bytes_RB[:, weights_at:], torch.float32)
