"""Weights for FlashInfer's CUTLASS experts: up rows before gate rows, and a list of scales per format.

    bf16         no scales
    fp8_block    w13 (L, 2I / 128, H / 128) and w2 (L, H / 128, I / 128), f32
    fp8_tensor   w13's times the input's (L), 1 / that of hidden rows, w2's times the hidden rows' (L), the input's
    nvfp4        1 / the input's, w13's in tiles, both global ones multiplied (L); the same for hidden rows and w2
    mxfp4        w13's in tiles, ones (L), w2's in tiles, ones (L)

Four-bit values are passed as int64, tiles of scales (128 x 4 bytes) as int32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.experts.base import ExpertsContext
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.fp8_whole import Fp8Static
from moe_mk.quant.layouts import TILE_COLUMNS, TILE_ROWS, ScaleLayout, lay_out
from moe_mk.quant.nvfp4 import Nvfp4
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.expert_weights import SlotWeights, Weights

LOGGER = logging.getLogger(__name__)
LAYOUT = "flashinfer_cutlass"


@dataclass(frozen=True)
class CutlassWeights:
    """The experts of one rank in the library's order."""

    w13: Tensor
    """(L, 2I, H) of values: up rows, then gate rows; (L, I, H) without a gate."""
    w2: Tensor
    quant_scales: tuple[Tensor, ...]
    scheme: QuantScheme
    kind: str
    """Key of SERVED."""
    activation: str
    """The name of the activation in the library."""
    gated: bool
    layout: str = LAYOUT

    @property
    def num_slots(self) -> int:
        """L."""
        return self.w13.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w13, self.w2, *self.quant_scales))

    def slot(self, index: int) -> SlotWeights:
        """Not supported: rows are reordered and scales multiplied."""
        raise UnsupportedError(
            f"expert {index} cannot be read back", [f"layout {self.layout!r} belongs to its backend"]
        )


def reordered(weights: Weights, context: ExpertsContext, activations: Mapping[tuple[str, bool], str]) -> CutlassWeights:
    """Copy every expert in the library's order. Raises UnsupportedError for an unsupported activation."""
    name = activations.get((context.activation, weights.gated))
    if name is None:
        served = ", ".join(f"{act} {'with' if gated else 'without'} a gate" for act, gated in activations)
        form = f"{context.activation} experts {'with' if weights.gated else 'without'} a gate"
        raise UnsupportedError(f"flashinfer_cutlass cannot compute {form}", [f"it has {served}"])
    slots = [weights.slot(index) for index in range(weights.num_slots)]
    first = [
        above([q for q in (s.up_IH, s.gate_IH) if q is not None], i).to(context.device) for i, s in enumerate(slots)
    ]
    second = [above([slot.down_HI], index).to(context.device) for index, slot in enumerate(slots)]
    kind, scales = _scales(first, second, context)
    return CutlassWeights(
        _values(first), _values(second), scales, weights.scheme, kind, name, weights.gated
    )  # fmt: skip


def above(parts: list[QuantTensor], index: int) -> QuantTensor:
    """Concatenated matrices with one scale, for formats with one scale per matrix.

    If the scales differ, the matrices are requantised with a common one, because the library takes one per expert.
    """
    scheme, whole = parts[0].scheme, [q.scales if q.scheme.block == (WHOLE, WHOLE) else q.global_scale for q in parts]
    if any(one is not None and not torch.equal(one.reshape(-1)[:1], whole[0].reshape(-1)[:1]) for one in whole[1:]):  # type: ignore[union-attr]
        LOGGER.warning("gate and up of expert %d have different scales; requantised to one scale", index)
        return scheme.quantize(torch.cat([q.dequantize(torch.float32) for q in parts]))
    values = torch.cat([q.values.view(torch.uint8) for q in parts]).view(parts[0].values.dtype)
    scales = parts[0].scales
    if scales is not None and scheme.block != (WHOLE, WHOLE):
        octets = [q.scales.contiguous().view(torch.uint8) for q in parts if q.scales is not None]
        scales = torch.cat(octets).view(scales.dtype)
    return QuantTensor(values, scales, scheme, parts[0].global_scale)


def _values(stack: list[QuantTensor]) -> Tensor:
    values = torch.stack([q.values.view(torch.uint8) for q in stack])
    return values.view(torch.int64 if stack[0].scheme.per_byte == 2 else stack[0].values.dtype)


def _scales(
    first: list[QuantTensor], second: list[QuantTensor], context: ExpertsContext
) -> tuple[str, tuple[Tensor, ...]]:
    """The format and its list of scales."""
    scheme, compute = first[0].scheme, context.compute
    if isinstance(scheme, Plain):
        return "plain", ()
    if scheme.family == "mxfp4":
        ones = torch.ones((len(first),), dtype=torch.float32, device=context.device)
        return "mxfp4", (_tiles(first), ones, _tiles(second), ones)
    if isinstance(scheme, Nvfp4):
        above = compute.fixed_scale if isinstance(compute, Nvfp4) and compute.fixed_scale is not None else 1.0
        inverse = _scalar(1.0 / above, context)
        return "nvfp4", (
            inverse, _tiles(first), _wholes(first, above), inverse, _tiles(second), _wholes(second, above)
        )  # fmt: skip
    if scheme.block == (WHOLE, WHOLE):
        assert isinstance(compute, Fp8Static)
        inner = compute.hidden.scale
        scale, inverse = _scalar(compute.scale, context), _scalar(1.0 / inner, context)
        return "fp8_tensor", (_wholes(first, compute.scale), inverse, _wholes(second, inner), scale)
    return "fp8_block", (_blocks(first), _blocks(second))


def _blocks(stack: list[QuantTensor]) -> Tensor:
    return torch.stack([q.scales.to(torch.float32) for q in stack if q.scales is not None]).contiguous()


def _wholes(stack: list[QuantTensor], factor: float) -> Tensor:
    """The scale of a whole matrix times that of its activations, one per expert."""
    found = [q.scales if q.scheme.block == (WHOLE, WHOLE) else q.global_scale for q in stack]
    return torch.stack([one.reshape(-1)[0] for one in found if one is not None]).to(torch.float32) * factor


def _tiles(stack: list[QuantTensor]) -> Tensor:
    """(L, rows, groups / 4) int32, both padded to whole tiles."""
    laid = [lay_out(q.scales, ScaleLayout.SWIZZLED) for q in stack if q.scales is not None]
    rows, groups = laid[0].shape
    tall, wide = -(-rows // TILE_ROWS) * TILE_ROWS, -(-groups // TILE_COLUMNS) * TILE_COLUMNS
    return torch.stack([each.data.view(tall, wide) for each in laid]).view(torch.int32)


def _scalar(value: float, context: ExpertsContext) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=context.device)
