"""Token rows as one buffer of bytes: values and scales in the wire scheme, then ids, then routing weights.

One collective carries everything, because ids and weights of a row are needed where the row is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.quant.wire import WireTypes, as_bytes, decode_rows, encode_rows, from_bytes, row_bytes

SMALL_BYTES = 1 << 20
"""What is less is copied in less time than an operation takes to begin."""
ID_BYTES = 4
WEIGHT_BYTES = 4


@dataclass(frozen=True)
class Rows:
    """Packed rows in two parts, uint8: what is long, and all that is short. Views of packed bytes will do."""

    values: Tensor
    """(R, V)"""
    tails: Tensor
    """(R, X): [scales | ids | weights]."""
    packed: Tensor | None = None
    """(R, V + X): both, where they lie side by side."""

    def __len__(self) -> int:
        return self.values.shape[0]

    def __getitem__(self, span: slice) -> Rows:
        return Rows(self.values[span], self.tails[span], None if self.packed is None else self.packed[span])

    @property
    def widths(self) -> tuple[int, int]:
        """Bytes of the parts of one row."""
        return self.values.shape[1], self.tails.shape[1]

    def put(self, rows: Rows, row_X: Tensor | None = None) -> None:
        """Write all rows of another, or those of these numbers."""
        if self.packed is not None and rows.packed is not None:
            put(self.packed, rows.packed, row_X)
        else:
            put(self.values, rows.values, row_X)
            put(self.tails, rows.tails, row_X)


def put(to_XB: Tensor, rows_RB: Tensor, row_X: Tensor | None = None) -> None:
    """Write all rows, or those of these numbers, in one pass on the host."""
    if row_X is None:
        to_XB.copy_(rows_RB)
    elif to_XB.device.type == "cpu" and rows_RB.shape[0]:
        torch.index_select(rows_RB, 0, row_X, out=to_XB)
    else:
        to_XB.copy_(rows_RB[row_X])


def packed_row_bytes(wire: QuantScheme, hidden_size: int, top_k: int) -> int:
    """Bytes of one row with its K ids and weights."""
    return row_bytes(wire, hidden_size) + top_k * (ID_BYTES + WEIGHT_BYTES)


def pack(x_RH: QuantTensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """Pack rows with their ids and weights into (R, B) uint8."""
    return torch.cat((encode_rows(x_RH), as_bytes(ids_RK), as_bytes(weights_RK)), dim=1)


def unpack(bytes_RB: Tensor, wire: QuantScheme, hidden_size: int, top_k: int) -> tuple[QuantTensor, Tensor, Tensor]:
    """Rows, ids (int32) and weights (f32) of packed bytes."""
    ids_at = row_bytes(wire, hidden_size)
    weights_at = ids_at + top_k * ID_BYTES
    x_RH = decode_rows(bytes_RB[:, :ids_at], wire, hidden_size)
    ids_RK = from_bytes(bytes_RB[:, ids_at:weights_at], torch.int32)
    return x_RH, ids_RK, from_bytes(bytes_RB[:, weights_at:], torch.float32)


def apart(x_RH: QuantTensor, ids_RK: Tensor, weights_RK: Tensor) -> Rows:
    """The bytes that `pack` would put side by side; many values are those of x itself, few are packed."""
    values_RB, tails_RX = as_bytes(x_RH.values), tails(x_RH.scales, ids_RK, weights_RK)
    if values_RB.numel() < SMALL_BYTES:
        return side_by_side(torch.cat((values_RB, tails_RX), dim=1), values_RB.shape[1])
    return Rows(values_RB, tails_RX)


def tails(scales_RX: Tensor | None, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """(R, X) uint8: scales where there are any, ids (int32) and weights (f32)."""
    return torch.cat([as_bytes(part) for part in (scales_RX, ids_RK, weights_RK) if part is not None], dim=1)


def side_by_side(bytes_RB: Tensor, value_bytes: int) -> Rows:
    """The two parts of packed rows: views."""
    return Rows(bytes_RB[:, :value_bytes], bytes_RB[:, value_bytes:], bytes_RB)


def joined(parts: Sequence[Rows]) -> Rows:
    """One behind the other; a single one as it is."""
    if len(parts) == 1:
        return parts[0]
    packed = [part.packed for part in parts if part.packed is not None]
    if len(packed) == len(parts):
        return side_by_side(torch.cat(packed), parts[0].widths[0])
    return Rows(torch.cat([part.values for part in parts]), torch.cat([part.tails for part in parts]))


def opened(rows: Rows, wire: QuantScheme, top_k: int) -> tuple[QuantTensor, Tensor, Tensor]:
    """Rows, ids (int32) and weights (f32); values are copied unless they lie by themselves."""
    ids_at, weights_at = rows.tails.shape[1] - top_k * (ID_BYTES + WEIGHT_BYTES), -top_k * WEIGHT_BYTES
    ids_RK = from_bytes(rows.tails[:, ids_at:weights_at], torch.int32)
    weights_RK = from_bytes(rows.tails[:, weights_at:], torch.float32)
    types = WireTypes.of(wire)
    scales = None if types.scales is None else from_bytes(rows.tails[:, :ids_at], types.scales)
    return QuantTensor(rows.values.contiguous().view(types.values), scales, wire), ids_RK, weights_RK
