"""MoE blocks with DeepSeek-V3's structure in a `MoELayer`: gate, routing, routed and shared experts in one call.

The structure of a block is determined by a test: the layer built from its weights must route and compute a random
batch as the block does; otherwise the block is not patched and is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import UnsupportedError
from moe_mk.integrations.engine_experts import LORA
from moe_mk.integrations.hf.modules import ModuleFacts, facts_of, is_experts, tensors_of, weights_of
from moe_mk.layer import MoELayer
from moe_mk.oracle.expected_error import ALL_TOKENS, error_of, experts_error
from moe_mk.shapes import expect_dense
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.stamp import Stamp

GATE = ("weight", "e_score_correction_bias", "top_k", "routed_scaling_factor", "topk_group", "norm_topk_prob")
PROBES = 48


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The MoE blocks by path that have the parts of DeepSeek-V3's."""
    return {path: block for path, block in model.named_modules() if _has_parts(block)}


def _has_parts(block: nn.Module) -> bool:
    gate, experts, shared = (getattr(block, name, None) for name in ("gate", "experts", "shared_experts"))
    return (
        isinstance(experts, nn.Module)
        and is_experts(experts)
        and all(hasattr(gate, name) for name in GATE)
        and (shared is None or all(hasattr(shared, f"{name}_proj") for name in ("gate", "up", "down")))
    )


@torch.no_grad()
def layer_of(path: str, block: nn.Module, settings: Mapping[str, Any]) -> MoELayer:
    """A layer equivalent to a block, from views of its weights.

    Raises UnsupportedError if the two differ on a random batch.
    """
    experts, gate = block.experts, block.gate
    assert isinstance(experts, nn.Module) and isinstance(gate, nn.Module)
    facts = facts_of(experts)
    if not facts.canonical:
        raise UnsupportedError(f"{path} ({type(block).__name__})", [f"its experts have {', '.join(facts.oddities)}"])
    config = MoEConfig.parse(_settings(block, facts), path).with_(**settings)
    layer = MoELayer(config, device=facts.device, dtype=dtype_of(gate, facts), name=path)
    layer.load_weights(named_weights(block, facts))
    _must_agree(path, block, layer)
    return layer


def dtype_of(gate: nn.Module, facts: ModuleFacts) -> torch.dtype:
    """The dtype of tokens: that of the weights, or with FP8 experts that of the gate."""
    if facts.scheme.block is not None:
        return next(p.dtype for p in gate.parameters())
    return facts.scheme.dtype  # type: ignore[attr-defined, no-any-return]


def _settings(block: nn.Module, facts: ModuleFacts) -> dict[str, Any]:
    gate: Any = block.gate
    shared: Any = getattr(block, "shared_experts", None)
    quant: dict[str, Any] = {"weights": facts.scheme.name}
    if facts.scheme.block is not None:
        scale = "ue8m0" if "ue8m0" in facts.scheme.name else "float32"
        quant = {"weights": "fp8_block", "block": facts.scheme.block, "scale": scale}
    model = {
        "name": type(block).__name__,
        "hidden_size": facts.hidden_size,
        "moe_intermediate_size": facts.intermediate_size,
        "num_experts": facts.num_experts,
        "num_shared_experts": 0 if shared is None else 1,
        "shared_intermediate_size": None if shared is None else shared.up_proj.weight.shape[0],
        "activation": facts.activation,
        "quant": quant,
    }
    router = {
        "top_k": gate.top_k,
        "scoring_func": "sigmoid",
        "num_expert_group": getattr(gate, "num_group", None) or getattr(gate, "n_group", None) or 1,
        "topk_group": gate.topk_group or 1,
        "has_correction_bias": True,
        "renormalize": bool(gate.norm_topk_prob),
        "routed_scaling_factor": float(gate.routed_scaling_factor),
    }
    return {"model": model, "router": router}


def named_weights(block: Any, facts: ModuleFacts) -> dict[str, Tensor]:
    """The tensors of a block, or of its parts, under the official names of a checkpoint, as views."""
    gate: Any = block.gate
    shared: Any = getattr(block, "shared_experts", None)
    named = {"gate.weight": gate.weight.detach(), "gate.e_score_correction_bias": gate.e_score_correction_bias.detach()}
    weights = weights_of(block.experts, facts)
    for expert in range(facts.num_experts):
        named |= _mlp(f"experts.{expert}", weights.slot(expert))
    for projection in ("gate", "up", "down") if shared is not None else ():
        linear = getattr(shared, f"{projection}_proj")
        if hasattr(linear, "base_layer"):
            raise UnsupportedError(f"{projection}_proj of the shared experts is a {type(linear).__name__}", [LORA])
        named[f"shared_experts.{projection}_proj.weight"] = linear.weight.detach()
        if facts.scheme.block is not None:
            named[f"shared_experts.{projection}_proj.weight_scale_inv"] = linear.weight_scale_inv.detach()
    return named


def _mlp(prefix: str, slot: SlotWeights) -> dict[str, Tensor]:
    named = {}
    for projection, q in (("gate", slot.gate_IH), ("up", slot.up_IH), ("down", slot.down_HI)):
        assert q is not None
        named[f"{prefix}.{projection}_proj.weight"] = q.values
        if q.scales is not None:
            named[f"{prefix}.{projection}_proj.weight_scale_inv"] = q.scales
    return named


def _must_agree(path: str, block: nn.Module, layer: MoELayer) -> None:
    """Raise UnsupportedError unless block and layer route a batch alike, and compute it within the formats' limits."""
    draw = torch.Generator("cpu").manual_seed(5)
    shape = (PROBES, layer.config.model.hidden_size)
    x_TH = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(layer.device, layer.dtype)
    gate: Any = block.gate
    _, weights_TK, ids_TK = gate.forward(x_TH)  # not gate(): hooks must only see the tokens of the model
    ours = layer.route(x_TH)
    reasons = []
    same_T = (ours.ids_TK.sort(dim=1).values == ids_TK.sort(dim=1).values).all(dim=1)
    if not bool(same_T.all()):
        reasons.append(f"its gate selects other experts for {int((~same_T).sum())} of {PROBES} tokens")
    elif not torch.allclose(ours.weights_TK.sum(dim=1), weights_TK.float().sum(dim=1), rtol=1e-5):
        reasons.append("its gate gives other weights")
    else:
        reasons += _differences(block, layer, x_TH)
    layer.reset_expert_load()
    if reasons:
        raise UnsupportedError(f"{path} ({type(block).__name__}) is not DeepSeek-V3's block", reasons)


def _differences(block: nn.Module, layer: MoELayer, x_TH: Tensor) -> list[str]:
    shared: Any = getattr(block, "shared_experts", None)
    gate: Any = block.gate
    experts: Any = block.experts
    _, weights_TK, ids_TK = gate.forward(x_TH)
    expected = experts(x_TH, ids_TK, weights_TK).float() + (0 if shared is None else shared(x_TH).float())
    error = float((layer(x_TH).float() - expected).norm() / expected.norm())
    problem = layer.decision.problem
    # Both round: the block as defined by the checkpoint, the layer as decided.
    theirs = experts_error(problem.dtype, problem.activations or problem.dtype, problem.weights, x_TH.shape[1])
    limit = ALL_TOKENS * math.hypot(error_of(layer.decision), theirs)
    return [] if error <= limit else [f"its output differs by {error:.1e} of its size, formats allow {limit:.1e}"]


LAYER = "_moe_mk_layer"
AGAIN = "call unpatch_blocks(model), then patch_blocks(model)"


@dataclass(frozen=True)
class Parts:
    """The parts of a block. Not the block itself, which would create a reference cycle."""

    gate: nn.Module
    experts: nn.Module
    shared_experts: nn.Module | None

    def tensors(self) -> list[Tensor]:
        """All tensors that the layer was loaded from."""
        held = [part for part in (self.gate, self.shared_experts) if part is not None]
        return [
            *tensors_of(self.experts),
            *(tensor for part in held for tensor in (*part.parameters(), *part.buffers())),
        ]


class PatchedForward:
    """The forward of a patched block.

    A layer reads views of the weights, or a copy in the layout of its backend. If a weight was modified or
    replaced, as in a copy of the model, the layer is reloaded before it runs. A graph of `torch.compile` does not
    check.
    """

    def __init__(self, block: nn.Module, layer: MoELayer) -> None:
        gate, experts, shared = block.gate, block.experts, getattr(block, "shared_experts", None)
        assert isinstance(gate, nn.Module) and isinstance(experts, nn.Module)
        self.parts, self.layer = Parts(gate, experts, shared), layer
        self.facts, self.stamp = facts_of(experts), Stamp(self.parts.tensors())

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
        """Reload the layer if a weight of the block was replaced or modified."""
        tensors = self.parts.tensors()
        if self.stamp.is_of(tensors):
            return
        facts = facts_of(self.parts.experts)
        if facts != self.facts or dtype_of(self.parts.gate, facts) is not self.layer.dtype:
            was, now = (f"{one.scheme.name} on {one.device}" for one in (self.facts, facts))
            raise UnsupportedError(
                f"block {self.layer.name} was patched with weights of {was} and has {now} since", [AGAIN]
            )
        self.layer.load_weights(named_weights(self.parts, facts))
        self.stamp = Stamp(tensors)

    def _must_read(self, hidden_states: Tensor) -> None:
        expect_dense("hidden_states", hidden_states)
        if hidden_states.dtype is not self.layer.dtype:
            raise UnsupportedError(
                f"block {self.layer.name} is patched for {self.layer.dtype} and gets {hidden_states.dtype}",
                [f"leave torch.autocast, or cast the model with model.to({hidden_states.dtype}): {AGAIN}"],
            )
