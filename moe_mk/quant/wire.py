"""Rows as bytes for transports, and whether activations are quantised before or after dispatch.

A row is its values followed by its scales: 14,336 B for 7,168 bf16 values, 7,392 B in FP8 with f32 scales per 128,
7,224 B with UE8M0 scales. Collectives send FP8 as bytes, which gloo supports. The conversion is exact both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from moe_mk.quant.blocked import WHOLE, BlockedScheme
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor


def row_bytes(scheme: QuantScheme, hidden_size: int) -> int:
    """Bytes of one row of `hidden_size` values with its scales."""
    return scheme.num_bytes(1, hidden_size)


def as_bytes(x: Tensor) -> Tensor:
    """(rows, X) as (rows, bytes) uint8: a view, or a copy if the rows are not contiguous."""
    rows, columns = x.shape
    # Dense and flat first: dimensions of one may have any stride, and a view as bytes wants the last one to be 1.
    flat = x.contiguous().view(-1).as_strided((x.numel(),), (1,))
    return flat.view(torch.uint8).view(rows, columns * x.element_size())


def encode_rows(q: QuantTensor) -> Tensor:
    """Rows (R, H) to bytes (R, B)."""
    parts = [as_bytes(part) for part in (q.values, q.scales) if part is not None]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class WireTypes:
    """Dtypes of the tensors of a wire scheme."""

    values: torch.dtype
    scales: torch.dtype | None

    @classmethod
    def of(cls, wire: QuantScheme) -> WireTypes:
        """None for scales that do not travel."""
        if isinstance(wire, Plain):
            return cls(wire.dtype, None)
        assert isinstance(wire, BlockedScheme)
        return cls(wire.element.dtype, None if wire.is_static else wire.scale_dtype)


def decode_rows(bytes_RB: Tensor, scheme: QuantScheme, hidden_size: int) -> QuantTensor:
    """Bytes (R, B) to rows (R, H)."""
    types = WireTypes.of(scheme)
    wide = bytes_RB.shape[1] if types.scales is None else hidden_size // scheme.per_byte
    scales = None if types.scales is None else from_bytes(bytes_RB[:, wide:], types.scales)
    return QuantTensor(from_bytes(bytes_RB[:, :wide], types.values), scales, scheme)


def from_bytes(bytes_RB: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, bytes) uint8 to (rows, X) of a dtype; copies, because a slice of wider rows may be unaligned."""
    return bytes_RB.clone(memory_format=torch.contiguous_format).view(dtype)


class Timing(Enum):
    """When activations are quantised."""

    NEVER = "never"
    BEFORE = "before"
    """Before dispatch, so that fewer bytes are sent."""
    AFTER = "after"
    """At the experts; the transport sends the layer's dtype."""
    EITHER = "either"
    """Both give the same result, because every rank sees every row."""


def when_to_round(
    activations: QuantScheme | None, families: frozenset[str], *, gathers: bool, experts_read: bool
) -> Timing:
    """Decide whether activations of a scheme are quantised before or after dispatch; None and plain ones never are.

    A row with its own scales can be quantised before dispatch: fewer bytes, same result. A scale over all rows of a
    call is known only at the experts, unless every rank receives every row. families: those of schemes
    that the transport sends. gathers: whether every rank receives every row. experts_read: whether the experts multiply
    activations of this scheme.
    """
    if not isinstance(activations, BlockedScheme):
        return Timing.NEVER
    travels = activations.is_static or activations.rows != WHOLE or gathers
    if not (experts_read and travels and activations.family in families):
        return Timing.AFTER
    return Timing.EITHER if gathers else Timing.BEFORE
