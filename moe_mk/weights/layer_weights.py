"""The weights of one MoE layer on one rank, and their conversion to a stack and to a state dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.quant import WHOLE, BlockedScheme, QuantTensor
from moe_mk.weights.expert_weights import (
    CANONICAL,
    ExpertWeights,
    MappedExpertWeights,
    SlotWeights,
    Weights,
    expect_one_width,
)


@dataclass(frozen=True)
class LoadFacts:
    """The source and extent of loaded weights."""

    where: str
    layer: int
    prefix: str
    convention: str
    owned: tuple[int, ...]
    """Logical experts in slot order."""
    tp_rank: int
    tp_size: int
    bytes_read: int
    """Bytes of all weights, scales, gate and bias of this rank, each counted once."""
    names: tuple[str, ...]
    """Opened tensors, in order."""


@dataclass(frozen=True)
class LayerWeights:
    """Gate, shared experts and owned experts of one layer on one rank."""

    gate_EH: Tensor
    """The gate in the dtype of the checkpoint."""
    bias_E: Tensor | None
    """f32, used only to choose experts; None if the layer has none."""
    shared: SlotWeights | None
    """All shared experts as one MLP; None where the layer has none."""
    experts: MappedExpertWeights
    facts: LoadFacts
    logit_bias_E: Tensor | None = None
    """f32, added to the router's logits; None if the layer has none."""
    shared_gate_H: Tensor | None = None
    """The gate of the shared experts in the dtype of the checkpoint; None where their output is added as it is."""
    latent: tuple[Tensor, ...] | None = None
    """The projections of tokens to the width of the experts and back, (outputs, inputs), and the weight of the norm
    before the second where there is one, in the checkpoint's dtype."""
    input_norm: tuple[Tensor, ...] | None = None
    """The weights [H] of the normalised input for the experts and for the router, in the checkpoint's dtype."""
    expert_scale_E: Tensor | None = None
    """f32, multiplied with the routing weights of each expert; None if the layer has none."""
    table_XK: Tensor | None = None
    """The experts of every token of the vocabulary; None if the layer chooses by scores."""
    image_bias_E: Tensor | None = None
    """f32, the bias of tokens of images; None if the layer treats all tokens alike."""

    @property
    def router_EH(self) -> Tensor:
        """The gate as it multiplies what the router reads: with the scale of a normalised input, then in f32."""
        if self.input_norm is None:
            return self.gate_EH
        scale: float = self.gate_EH.shape[1] ** -0.5
        return self.gate_EH.to(torch.float32) * self.input_norm[1].to(torch.float32) * scale

    @property
    def num_bytes(self) -> int:
        router: tuple[Tensor | None, ...] = (
            self.gate_EH, self.bias_E, self.logit_bias_E, self.table_XK, self.shared_gate_H, self.expert_scale_E,
            *(self.latent or ()), *(self.input_norm or ()), self.image_bias_E,
        )  # fmt: skip
        plain = sum(t.numel() * t.element_size() for t in router if t is not None)
        shared = 0 if self.shared is None else sum(q.num_bytes for _, q in matrices_of(self.shared))
        return plain + shared + self.experts.num_bytes


def to_stacked(weights: Weights, device: torch.device) -> ExpertWeights:
    """Copy mapped experts into one canonical stack on a device: gate rows, then up rows. Stacks are only moved.

    Needs at least one expert. Raises ConfigError if a scale block would straddle gate and up.
    """
    if isinstance(weights, ExpertWeights):
        return ExpertWeights(weights.w13.to(device), weights.w2.to(device), weights.layout, weights.gated)
    if not weights.num_slots:
        raise ConfigError("a rank without experts has nothing to stack; keep its weights mapped")
    expect_one_width(weights, "a stack")
    slots = [weights.slot(index) for index in range(weights.num_slots)]
    width = slots[0].up_IH.shape[0]
    rows = weights.scheme.rows if isinstance(weights.scheme, BlockedScheme) else WHOLE
    if weights.gated and rows != WHOLE and width % rows:
        raise ConfigError(
            f"an intermediate size of {width} is no multiple of the {rows} rows of a scale block, "
            "so gate and up cannot lie in one stack; keep the weights mapped"
        )
    w13 = [[q for q in (slot.gate_IH, slot.up_IH) if q is not None] for slot in slots]
    w2 = [[slot.down_HI] for slot in slots]
    return ExpertWeights(_stack(w13, device), _stack(w2, device), CANONICAL, weights.gated)


def as_mapped(stacked: ExpertWeights) -> MappedExpertWeights:
    """The experts of a canonical stack one by one, as views of it."""
    return MappedExpertWeights(tuple(stacked.slot(index) for index in range(stacked.num_slots)), stacked.scheme)


def matrices_of(slot: SlotWeights) -> list[tuple[str, QuantTensor]]:
    """The matrices that an expert has, by projection."""
    named = (("gate", slot.gate_IH), ("up", slot.up_IH), ("down", slot.down_HI))
    return [(projection, q) for projection, q in named if q is not None]


def _stack(slots: list[list[QuantTensor]], device: torch.device) -> QuantTensor:
    def together(pick: Callable[[QuantTensor], Tensor | None]) -> Tensor | None:
        parts = [[part for q in matrices if (part := pick(q)) is not None] for matrices in slots]
        return _copy(parts, device) if parts[0] else None

    values = together(lambda q: q.values)
    assert values is not None
    scales, above = together(lambda q: q.scales), together(lambda q: q.global_scale)
    return QuantTensor(values, scales, slots[0][0].scheme, above, together(lambda q: q.zeros))


def _copy(slots: list[list[Tensor]], device: torch.device) -> Tensor:
    rows = sum(part.shape[0] for part in slots[0])
    dtype = reduce(torch.promote_types, {part.dtype for parts in slots for part in parts}, slots[0][0].dtype)
    out = torch.empty((len(slots), rows, slots[0][0].shape[1]), dtype=dtype, device=device)
    for index, parts in enumerate(slots):
        start = 0
        for part in parts:
            out[index, start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
    return out
