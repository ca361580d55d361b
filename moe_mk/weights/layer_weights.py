"""The weights of one MoE layer on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, SlotWeights
from moe_mk.weights.source import in_memory


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
    def shared_read(self) -> SlotWeights | None:
        """The shared experts in memory, read from their file where they are views of it."""
        return None if self.shared is None else self.shared.changed(in_memory)

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
        shared = 0 if self.shared is None else self.shared.num_bytes
        return plain + shared + self.experts.num_bytes


def as_mapped(stacked: ExpertWeights) -> MappedExpertWeights:
    """The experts of a canonical stack one by one, as views of it."""
    return MappedExpertWeights(tuple(stacked.slot(index) for index in range(stacked.num_slots)), stacked.scheme)
