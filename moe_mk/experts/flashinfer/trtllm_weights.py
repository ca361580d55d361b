"""Weights for FlashInfer's TRT-LLM experts: up before gate, rows shuffled for the tensor cores; invertible.

    type         rows of w13              shuffled by   columns                  scales
    bf16         up and gate alternate    32            128 bytes by 128 bytes   none
    fp8_block    up rows, then gate's     16            128 bytes by 128 bytes   f32, a block each, not shuffled
    mxfp8        up and gate alternate    32            as they are              rows shuffled alike, in tiles
    nvfp4        up and gate alternate    32            as they are              rows shuffled alike, in tiles
    mxfp4        up and gate alternate    32            as they are              rows shuffled alike, in tiles

Shuffled by 32: of every 32 rows, (0 4 8 ... 28) (1 5 ... 29) (2 ...) (3 ...); by 16: (0 2 4 ... 14) (1 3 ... 15).
w2 is shuffled in the same way, without halves. MXFP4 matrices are padded with zeros to whole tiles (gpt-oss: 2,880 to
3,072). Only bytes are moved, so `slot` restores every matrix bit for bit.
Source: flashinfer-ai/flashinfer, flashinfer/fused_moe/prepare.py at 0.7.2, and its tests for blocks of FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.errors import UnsupportedError
from moe_mk.experts.base import ExpertsContext
from moe_mk.experts.flashinfer.cutlass_weights import above
from moe_mk.quant.layouts import LaidOutScales, ScaleLayout, lay_out
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.expert_weights import SlotBiases, SlotWeights, Weights, narrow_columns, narrow_rows, stacked_biases

LAYOUT = "flashinfer_trtllm"
LANES = 8
"""Rows of a stripe that are contiguous after shuffling."""
PANEL = 128
"""Bytes of a row in one column panel."""
FILL = 256
"""Sizes are padded to multiples of this, which every tile of the library divides, as in vLLM 0.33."""
ONE = 127
"""1.0 as an E8M0 byte."""


@dataclass(frozen=True)
class Order:
    """The byte order of a format."""

    alternate: bool
    """Whether rows of up and gate alternate; else up's come first, then gate's."""
    stripe: int
    """Number of rows of one shuffle."""
    panels: bool = False
    """Whether columns are split into contiguous panels."""
    tiled: bool = False
    """Whether scales are shuffled with their rows and stored in tiles."""
    fills: bool = False
    """Whether sizes are padded to whole tiles."""

    def room(self, size: int) -> int:
        """The padded size."""
        return -(-size // FILL) * FILL if self.fills and size % PANEL else size


ORDERS: Mapping[str, Order] = {
    "plain": Order(alternate=True, stripe=32, panels=True),
    "fp8_block": Order(alternate=False, stripe=16, panels=True),
    "mxfp8": Order(alternate=True, stripe=32, tiled=True),
    "nvfp4": Order(alternate=True, stripe=32, tiled=True),
    "mxfp4": Order(alternate=True, stripe=32, tiled=True, fills=True),
}
"""By value of `quant.kind`."""


@dataclass(frozen=True)
class Stack:
    """One projection of all experts, as the library takes it."""

    values: Tensor
    scales: Tensor | None
    whole: Tensor | None
    """(L,) f32, the global scales; None if the format has none."""
    bias: Tensor | None
    """(L, rows) f32, in the order of the rows."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.values, self.scales, self.whole, self.bias) if t is not None)


@dataclass(frozen=True)
class TrtllmWeights:
    """The experts of one rank in the library's order."""

    w13: Stack
    w2: Stack
    scheme: QuantScheme
    kind: str
    shape: tuple[int, int]
    """(I, H)."""
    layout: str = LAYOUT
    gated: bool = True

    @property
    def room(self) -> tuple[int, int]:
        """The padded (I, H)."""
        order, (inner, hidden) = ORDERS[self.kind], self.shape
        return order.room(inner), order.room(hidden)

    @property
    def num_slots(self) -> int:
        """L."""
        return self.w13.values.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of values, scales and biases."""
        return self.w13.num_bytes + self.w2.num_bytes

    def slot(self, index: int) -> SlotWeights:
        """One expert in its stored format, bit for bit; a copy."""
        (inner, hidden), (tall, wide), order = self.shape, self.room, ORDERS[self.kind]
        both = _restored(self.w13, index, (2 * tall, wide), self.scheme, order, halves=True)
        down = _restored(self.w2, index, (wide, tall), self.scheme, order, halves=False)
        up, gate = (narrow_columns(narrow_rows(both, start, inner), 0, hidden) for start in (0, tall))
        down = narrow_columns(narrow_rows(down, 0, hidden), 0, inner)
        if self.w13.bias is None or self.w2.bias is None:
            return SlotWeights(gate, up, down)
        b13 = in_order(self.w13.bias[index, :, None], order, halves=True)[:, 0]
        b2 = in_order(self.w2.bias[index, :, None], order, halves=False)[:hidden, 0]
        return SlotWeights(gate, up, down, SlotBiases(b13[tall : tall + inner], b13[:inner], b2))


def shuffled_weights(weights: Weights, kind: str, context: ExpertsContext) -> TrtllmWeights:
    """Copy every expert in the library's order. Raises UnsupportedError for experts without a gate."""
    if not weights.gated:
        raise UnsupportedError(
            "flashinfer_trtllm cannot compute experts without a gate", ["use experts='flashinfer_cutlass'"]
        )
    slots, device, order = [weights.slot(index) for index in range(weights.num_slots)], context.device, ORDERS[kind]
    shape = (slots[0].up_IH.shape[0], slots[0].up_IH.shape[1])
    tall, wide = order.room(shape[0]), order.room(shape[1])
    first = [
        above([filled(q, tall, wide) for q in (s.up_IH, s.gate_IH) if q is not None], index).to(device)
        for index, s in enumerate(slots)
    ]
    second = [filled(s.down_HI, wide, tall).to(device) for s in slots]
    b13, b2 = stacked_biases(weights)
    if b13 is not None and b2 is not None:
        gate, up = (pad(half, (0, tall - shape[0])) for half in b13.chunk(2, dim=1))
        b13, b2 = torch.cat([up, gate], dim=1), pad(b2, (0, wide - shape[1]))
    return TrtllmWeights(
        _stack(first, b13, order, device, halves=True), _stack(second, b2, order, device, halves=False),
        weights.scheme, kind, shape,
    )  # fmt: skip


def filled(q: QuantTensor, rows: int, columns: int) -> QuantTensor:
    """Rows and columns of MXFP4 or MXFP8 padded with zeros; other formats need no padding."""
    down, across = rows - q.shape[0], columns - q.shape[1]
    if not down and not across:
        return q
    assert q.scales is not None and q.scheme.block is not None and q.global_scale is None
    groups = -(-columns // q.scheme.block[1]) - q.scales.shape[1]
    values = pad(q.values.view(torch.uint8), (0, across // q.scheme.per_byte, 0, down)).view(q.values.dtype)
    scales = pad(q.scales.view(torch.uint8), (0, groups, 0, down), value=ONE).view(q.scales.dtype)
    return replace(q, values=values, scales=scales)


def out_of_order(rows: Tensor, order: Order, *, halves: bool) -> Tensor:
    """Rows of (M, B) in the library's order. halves: whether they are up rows, then gate rows."""
    if halves and order.alternate:
        rows = torch.stack(rows.chunk(2), dim=1).flatten(0, 1)
    stripes = rows.reshape(-1, LANES, order.stripe // LANES, rows.shape[1])
    return stripes.transpose(1, 2).reshape(rows.shape)


def in_order(rows: Tensor, order: Order, *, halves: bool) -> Tensor:
    """The inverse of `out_of_order`."""
    stripes = rows.reshape(-1, order.stripe // LANES, LANES, rows.shape[1])
    rows = stripes.transpose(1, 2).reshape(rows.shape)
    return torch.cat([rows[0::2], rows[1::2]]) if halves and order.alternate else rows


def _stack(
    matrices: list[QuantTensor], bias: Tensor | None, order: Order, device: torch.device, *, halves: bool
) -> Stack:
    values = torch.stack([_values(q, order, halves=halves) for q in matrices])
    scales = [_scales(q, order, halves=halves) for q in matrices if q.scales is not None]
    whole = [q.global_scale.reshape(-1)[0] for q in matrices if q.global_scale is not None]
    if bias is not None:
        bias = torch.stack([out_of_order(row[:, None], order, halves=halves)[:, 0] for row in bias.to(device)])
    return Stack(
        values.view(matrices[0].values.dtype), torch.stack(scales) if scales else None,
        torch.stack(whole).to(torch.float32) if whole else None, bias,
    )  # fmt: skip


def _values(q: QuantTensor, order: Order, *, halves: bool) -> Tensor:
    """The values of one matrix as bytes."""
    octets = out_of_order(q.values.contiguous().view(torch.uint8), order, halves=halves)
    return octets.reshape(len(octets), -1, PANEL).transpose(0, 1).contiguous() if order.panels else octets


def _scales(q: QuantTensor, order: Order, *, halves: bool) -> Tensor:
    """f32 for blocks; bytes in tiles for groups, in a tensor of the shape they had."""
    assert q.scales is not None
    if not order.tiled:
        return q.scales.to(torch.float32).contiguous()
    mixed = out_of_order(q.scales.contiguous().view(torch.uint8), order, halves=halves)
    return lay_out(mixed, ScaleLayout.SWIZZLED).data.view(mixed.shape)


def _restored(
    stack: Stack, index: int, shape: tuple[int, int], scheme: QuantScheme, order: Order, *, halves: bool
) -> QuantTensor:
    rows, dtype = shape[0], stack.values.dtype
    octets = stack.values[index].view(torch.uint8)
    if order.panels:
        octets = octets.transpose(0, 1).reshape(rows, -1)
    values = in_order(octets, order, halves=halves).contiguous().view(dtype)
    whole = None if stack.whole is None else stack.whole[index].reshape(1, 1).clone()
    restored = QuantTensor(values, None, scheme, whole)
    if stack.scales is None:
        return restored
    held = stack.scales[index]
    scale_dtype = scheme.scale_dtype  # type: ignore[attr-defined]
    if not order.tiled:
        return replace(restored, scales=held.to(scale_dtype))
    laid = LaidOutScales(held.flatten(), ScaleLayout.SWIZZLED, (rows, held.shape[1]), torch.uint8)
    return replace(restored, scales=in_order(laid.row_major(), order, halves=halves).contiguous().view(scale_dtype))
