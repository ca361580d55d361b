"""The forward of a patched block: a layer of ours on all its tokens, loaded again where the block's weights changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.blocks import dtype_of, named_weights
from moe_mk.integrations.hf.modules import facts_of, tensors_of
from moe_mk.integrations.hf.plan import stamp_of_tensors
from moe_mk.layer import MoELayer

LAYER = "_moe_mk_layer"
AGAIN = "call unpatch_blocks(model), then patch_blocks(model)"


@dataclass(frozen=True)
class Parts:
    """What a block is made of. Not the block itself: it holds this, and would never be freed by its last owner."""

    gate: nn.Module
    experts: nn.Module
    shared_experts: nn.Module | None

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer was loaded from."""
        held = [part for part in (self.gate, self.shared_experts) if part is not None]
        return [
            *tensors_of(self.experts),
            *(tensor for part in held for tensor in (*part.parameters(), *part.buffers())),
        ]


class PatchedForward:
    """What a patched block does instead of its own forward.

    A layer reads views of the weights, or a copy in the layout of its backend. Where a weight was written to or
    replaced, as in a copy of the model, the layer is loaded again before it runs. A graph of `torch.compile` does not
    look.
    """

    def __init__(self, block: nn.Module, layer: MoELayer) -> None:
        gate, experts, shared = block.gate, block.experts, getattr(block, "shared_experts", None)
        assert isinstance(gate, nn.Module) and isinstance(experts, nn.Module)
        self.parts, self.layer = Parts(gate, experts, shared), layer
        self.facts, self.stamp = facts_of(experts), stamp_of_tensors(self.parts.tensors())

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """(..., H) to (..., H), shared experts included."""
        if not torch.compiler.is_compiling():
            self._follow()
            self._must_read(hidden_states)
        if self.parts.gate._forward_hooks:  # transformers records router logits by hooks on the gate
            self.parts.gate(hidden_states)
        y_TH: Tensor = self.layer(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return y_TH.view(hidden_states.shape)

    def _follow(self) -> None:
        """Load the layer again where a weight of the block is another one, or has another value."""
        stamp = stamp_of_tensors(self.parts.tensors())
        if stamp == self.stamp:
            return
        facts = facts_of(self.parts.experts)
        if facts != self.facts or dtype_of(self.parts.gate, facts) is not self.layer.dtype:
            was, now = (f"{one.scheme.name} on {one.device}" for one in (self.facts, facts))
            raise UnsupportedError(
                f"block {self.layer.name} was patched with weights of {was} and has {now} since", [AGAIN]
            )
        self.layer.load_weights(named_weights(self.parts, facts))
        self.stamp = stamp

    def _must_read(self, hidden_states: Tensor) -> None:
        if hidden_states.dtype is not self.layer.dtype:
            raise UnsupportedError(
                f"block {self.layer.name} is patched for {self.layer.dtype} and gets {hidden_states.dtype}",
                [f"leave torch.autocast, or cast the model with model.to({hidden_states.dtype}): {AGAIN}"],
            )
