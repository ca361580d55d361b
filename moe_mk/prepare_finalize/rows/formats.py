"""Formats of rows on the wire: bytes, dtypes, and the arguments with which native kernels write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.kernels.native.exchange import ROW_TYPES, RowFormat
from moe_mk.kernels.native.experts_mode import Rounding
from moe_mk.kernels.native.layer import NativeParts, Places, RowsOfExperts
from moe_mk.prepare_finalize.base import LayerParts, TransportContext
from moe_mk.prepare_finalize.packing import ID_BYTES, WEIGHT_BYTES, tails
from moe_mk.quant.blocked import BlockedScheme
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.quant.wire import WireTypes, row_bytes
from moe_mk.tokens import Routing

GROUP = 128
FUSED_TOKENS = 256
"""Most tokens of a native call for a whole layer: longer ones spend their time in the experts anyway, and would keep
memory for the logits of all tokens."""
Encode = Callable[[Tensor], QuantTensor]
"""Brings tokens into the wire scheme."""


@dataclass(frozen=True)
class RowBytes:
    """The parts of a row in bytes."""

    values: int
    scales: int
    top_k: int

    @classmethod
    def of(cls, context: TransportContext) -> RowBytes:
        """Of the wire scheme of a transport."""
        hidden, wire = context.hidden_size, context.wire
        whole = row_bytes(wire, hidden)
        if not isinstance(wire, BlockedScheme):
            return cls(whole, 0, context.top_k)
        values = wire.value_shape(1, hidden)[1] * wire.element.dtype.itemsize
        return cls(values, whole - values, context.top_k)

    @property
    def tail(self) -> int:
        """Scales, ids and weights."""
        return self.scales + self.top_k * (ID_BYTES + WEIGHT_BYTES)


def by_rank(context: TransportContext, scales_TX: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, list[int]]:
    """Rows to send, by rank, then by token: the token of each, what follows its values, and how many each rank gets.

    Assignments that go elsewhere become -1 and weigh nothing there.
    """
    tables, ranks = context.tables, context.comm.size
    rank_TK = tables.ranks(routing.ids_TK)
    there_WTK = rank_TK == torch.arange(ranks, dtype=rank_TK.dtype, device=rank_TK.device)[:, None, None]
    peer_X, token_X = torch.nonzero(there_WTK.any(dim=2), as_tuple=True)
    there_XK = there_WTK[peer_X, token_X]
    slots_XK = torch.where(there_XK, tables.slot_of_P[routing.ids_TK[token_X].clamp_min(0).long()], -1)
    weights_XK = torch.where(there_XK, routing.weights_TK[token_X], 0.0)
    scales_XX = None if scales_TX is None else scales_TX[token_X]
    tails_XB = tails(scales_XX, slots_XK.to(torch.int32), weights_XK.to(torch.float32))
    return token_X, tails_XB, torch.bincount(peer_X, minlength=ranks).tolist()


Values = tuple[Tensor, Tensor | None]
"""Rows and scales."""


class KernelRowFormat:
    """How native kernels write the rows of a transport; FP8 rows are rounded on the way."""

    def __init__(self, context: TransportContext, size: RowBytes) -> None:
        wire, tables = context.wire, context.tables
        self.size, self.types, self.wire = size, WireTypes.of(wire), wire
        scale_dtype = self.types.scales or torch.uint8
        self.form = RowFormat(size.values, size.scales, size.top_k, rounding_of(context), scale_dtype)
        self.tables = tables.rank_of_P.to(torch.int32).contiguous(), tables.slot_of_P.to(torch.int32).contiguous()
        self._plain = wire.dtype if isinstance(wire, Plain) else None

    def arguments(self, x_TH: Tensor, routing: Routing, encode: Encode) -> tuple[Values, tuple[Tensor, Tensor], bool]:
        """Rows, ids (int32) and weights (f32) as `ExchangeCalls.dispatch` reads them, and whether it rounds rows."""
        rounding = self.form.rounding is not Rounding.NONE and x_TH.dtype in ROW_TYPES and x_TH.stride(1) == 1
        x: Values
        if rounding or x_TH.dtype is self._plain:
            x = (x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()), None
        else:
            encoded = encode(x_TH)
            values_TX = encoded.values if encoded.values.stride(1) == 1 else encoded.values.contiguous()
            x = values_TX, encoded.scales.contiguous() if encoded.scales is not None and self.size.scales else None
        ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
        if ids_TK.dtype is not torch.int32 or not ids_TK.is_contiguous():
            ids_TK = ids_TK.to(torch.int32).contiguous()
        if weights_TK.dtype is not torch.float32 or not weights_TK.is_contiguous():
            weights_TK = weights_TK.to(torch.float32).contiguous()
        return x, (ids_TK, weights_TK), rounding


def rounding_of(context: TransportContext) -> Rounding:
    """Return the rounding of rows that the kernels support in transit: FP8 by groups of 128 of a token."""
    wire = context.wire
    if not isinstance(wire, Fp8Block) or wire.block != (1, GROUP):
        return Rounding.NONE
    return Rounding.FP8_UE8M0 if wire.ue8m0 else Rounding.FP8


def exchanged_parts(context: TransportContext, form: KernelRowFormat, parts: LayerParts) -> NativeParts | None:
    """The arguments of `PreparedExchangeCall`; None where native experts do not read rows of this format in place.

    They read bf16, or e4m3 with f32 scales of 128 values.
    """
    experts, shared = parts.experts, parts.shared
    if not isinstance(experts, RowsOfExperts) or not isinstance(shared, RowsOfExperts | None):
        return None
    fp8 = form.form.rounding is Rounding.FP8 and form.form.scale_dtype is torch.float32 and experts.takes_fp8
    if context.dtype.dtype is not torch.bfloat16 or not (context.wire == context.dtype or fp8):
        return None
    places = Places(parts.tables.choice_X, *form.tables, context.comm.rank)
    return experts, shared, parts.gating, places, parts.ran
