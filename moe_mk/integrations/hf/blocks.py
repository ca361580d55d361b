"""MoE blocks of a gate, experts and perhaps shared experts in a `MoELayer`: one call from the gate to the sum.

What a block computes is determined by a test: the layer built from its weights must route and compute a random batch
as the block does; otherwise the block is not patched and is reported. Gates are compared in f32, the precision in which
the layer routes: a gate that computes its logits in bf16 selects other experts for a few percent of tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import UnsupportedError
from moe_mk.experts.residency import ResidencyPool
from moe_mk.integrations.engine_experts import LORA
from moe_mk.integrations.hf.modules import ModuleFacts, facts_of, is_experts, tensors_of, weights_of
from moe_mk.integrations.hf.packed import PackedExperts
from moe_mk.integrations.hf.plan import forget_plan, model_settings
from moe_mk.layer import MoELayer
from moe_mk.oracle.expected_error import ALL_TOKENS, error_of, experts_error
from moe_mk.quant.plain import plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.router.router import Router
from moe_mk.router.topk import SCORING_FUNCS
from moe_mk.shapes import expect_dense
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.stamp import Stamp

BIAS = "e_score_correction_bias"
GATES = ("gate", "router")
"""Names of a block's gate."""
SHARED = ("gate", "up", "down")
"""Projections of shared experts."""
PROBES = 48


@dataclass(frozen=True)
class Parts:
    """The parts of a block. Not the block itself, which would create a reference cycle."""

    gate: Any
    experts: Any
    shared_experts: nn.Module | None
    buffers: dict[str, Tensor | None]
    """The block's own, in which MiniMax-M2 holds the bias and passes it to its gate."""

    @property
    def packed(self) -> MoELayer | None:
        """The layer of packed experts; None for experts that are tensors of the module."""
        return self.experts.layer if isinstance(self.experts, PackedExperts) else None

    @property
    def bias_E(self) -> Tensor | None:
        """The bias of the selection, if any."""
        held = getattr(self.gate, BIAS, None)
        return held if isinstance(held, Tensor) else self.buffers.get(BIAS)

    def gate_arguments(self) -> tuple[Tensor, ...]:
        """Return the arguments that the block passes to its gate in addition to the tokens."""
        held = self.buffers.get(BIAS)
        return () if held is None else (held,)

    def tensors(self) -> list[Tensor]:
        """All tensors that the layer was loaded from."""
        held = [part for part in (self.gate, self.shared_experts) if part is not None]
        return [
            *tensors_of(self.experts),
            *(tensor for part in held for tensor in (*part.parameters(), *part.buffers())),
            *self.gate_arguments(),
        ]


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The MoE blocks by path that have the parts of a layer, and no others."""
    return {path: block for path, block in model.named_modules() if parts_of(block) is not None}


def parts_of(block: nn.Module) -> Parts | None:
    """The parts of a MoE block; None for other modules, and for blocks with further weights of their own."""
    gate = next((getattr(block, name) for name in GATES if hasattr(block, name)), None)
    experts, shared = getattr(block, "experts", None), getattr(block, "shared_experts", None)
    if not isinstance(gate, nn.Module) or not (isinstance(experts, PackedExperts) or is_experts(experts)):
        return None
    weight, known = getattr(gate, "weight", None), (gate, experts, shared)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not hasattr(gate, "top_k"):
        return None
    others = [child for child in block.children() if child not in known and next(child.parameters(), None) is not None]
    if others or block._parameters or set(block._buffers) - {BIAS}:
        return None
    if shared is not None and not all(hasattr(shared, f"{name}_proj") for name in SHARED):
        return None
    return Parts(gate, experts, shared, block._buffers)


@torch.no_grad()
def layer_of(path: str, block: nn.Module, settings: Mapping[str, Any], pool: ResidencyPool | None) -> MoELayer:
    """A layer equivalent to a block, from views of its weights, or with the packed experts that it has.

    Raises UnsupportedError if the two differ on a random batch, and for other settings than those of packed experts.
    """
    parts, what = parts_of(block), f"{path} ({type(block).__name__})"
    assert parts is not None
    if (packed := parts.packed) is not None:
        config = packed.config.with_(**_router_settings(parts), experts=packed.decision.chosen.experts)
        if config.with_(**settings).kernel != config.kernel:
            held = {key: getattr(config.kernel, key) for key in settings}
            raise UnsupportedError(f"{what} with {settings}", [f"replace_experts packed its experts with {held}"])
        config = config.with_(**_shared_settings(parts))
        layer = MoELayer(config, device=packed.device, dtype=packed.dtype, name=path, pool=packed.state.backends.pool)
    else:
        facts = facts_of(parts.experts)
        if not facts.canonical:
            odd = facts.unsupported or ("biases, or gate and up in another layout",)
            raise UnsupportedError(what, [f"its experts have {', '.join(odd)}"])
        model = model_settings(facts) | {"name": type(block).__name__} | _shared_settings(parts)
        config = MoEConfig.parse({"model": model, "router": _router_settings(parts)}, path).with_(**settings)
        layer = MoELayer(config, device=facts.device, dtype=dtype_of(parts.gate, facts), name=path, pool=pool)
    _load(layer, parts)
    _must_agree(path, block, parts, layer)
    return layer


def dtype_of(gate: nn.Module, facts: ModuleFacts) -> torch.dtype:
    """The dtype of tokens: that of the weights, or with FP8 experts that of the gate."""
    if facts.scheme.block is not None:
        return next(p.dtype for p in gate.parameters())
    return facts.scheme.dtype  # type: ignore[attr-defined, no-any-return]


def _shared_settings(parts: Parts) -> dict[str, Any]:
    if (up := shared_linears(parts).get("up")) is None:
        return {}
    found = {"num_shared_experts": 1, "shared_intermediate_size": up.weight.shape[0]}
    if (packed := parts.packed) is None:
        return found
    return found | {"quant": packed.config.model.quant.model_dump() | {"shared": plain(up.weight.dtype).name}}


def _router_settings(parts: Parts) -> dict[str, Any]:
    """The first settings that route random logits as the gate does; those of DeepSeek-V3 if none does."""
    gate = parts.gate

    def stated(default: float, *names: str) -> Any:
        return next((value for name in names if (value := getattr(gate, name, None)) is not None), default)

    common: dict[str, Any] = {
        "top_k": gate.top_k,
        "num_expert_group": stated(1, "num_group", "n_group"),
        "topk_group": stated(1, "topk_group"),
        "routed_scaling_factor": float(stated(1.0, "routed_scaling_factor")),
    }
    x_TH, bias_E = _probe(gate.weight.shape[1], gate.weight.device), parts.bias_E
    theirs, logits_TE = _route_in_f32(parts, x_TH), x_TH @ gate.weight.float().T
    pairs = product(SCORING_FUNCS, (True, False))
    found = [common | {"scoring_func": scoring, "renormalize": renormalize} for scoring, renormalize in pairs]
    agrees = (each for each in found if not _routing_reasons(Router(**each)(logits_TE, bias_E), theirs))
    return next(agrees, found[0]) | {"has_correction_bias": bias_E is not None}


def named_weights(parts: Parts, facts: ModuleFacts) -> dict[str, Tensor]:
    """The tensors of a block's parts under the official names of a checkpoint, as views."""
    named: dict[str, Tensor] = {"gate.weight": parts.gate.weight.detach()}
    if parts.bias_E is not None:
        named[f"gate.{BIAS}"] = parts.bias_E.detach()
    weights = weights_of(parts.experts, facts)
    for expert in range(facts.num_experts):
        for projection, q in weights.slot(expert).matrices.items():
            name = f"experts.{expert}.{projection}_proj.weight"
            named |= {name: q.values} | ({} if q.scales is None else {f"{name}_scale_inv": q.scales})
    for projection, linear in shared_linears(parts).items():
        named[f"shared_experts.{projection}_proj.weight"] = linear.weight.detach()
        if facts.scheme.block is not None:
            named[f"shared_experts.{projection}_proj.weight_scale_inv"] = linear.weight_scale_inv.detach()
    return named


def shared_linears(parts: Parts) -> dict[str, Any]:
    """The layers of the shared experts by projection. Raises UnsupportedError for layers without a plain weight."""
    found = {name: getattr(parts.shared_experts, f"{name}_proj") for name in SHARED if parts.shared_experts is not None}
    for name, linear in found.items():
        if hasattr(linear, "base_layer") or not hasattr(linear, "weight"):
            remedy = LORA if hasattr(linear, "base_layer") else "call patch_blocks before pack_linears"
            raise UnsupportedError(f"{name}_proj of the shared experts is a {type(linear).__name__}", [remedy])
    return found


def _load(layer: MoELayer, parts: Parts) -> None:
    """Give a layer the weights of a block as they are now. Packed experts are shared with the layer that holds them."""
    if (packed := parts.packed) is None:
        layer.load_weights(named_weights(parts, facts_of(parts.experts)))
        return
    shared = [QuantTensor(p.weight.detach(), None, plain(p.weight.dtype)) for p in shared_linears(parts).values()]
    weights = replace(
        packed.weights,
        gate_EH=parts.gate.weight.detach(),
        bias_E=None if parts.bias_E is None else parts.bias_E.detach(),
        shared=SlotWeights(*shared) if shared else None,  # type: ignore[arg-type]
    )
    experts = layer.state.experts
    kernel = replace(experts.kernel, experts=packed.kernel.experts)  # type: ignore[arg-type]
    layer.use(replace(layer.state, experts=replace(experts, kernel=kernel)))
    layer.take(replace(weights, experts=packed.state.experts.weights))
    layer.use(replace(layer.state, weights=weights))


def _probe(hidden: int, device: torch.device) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(5)
    return torch.randn((PROBES, hidden), generator=draw, dtype=torch.float32, device="cpu").to(device)


def _route_in_f32(parts: Parts, x_TH: Tensor) -> Routing | None:
    """Routing of a copy of the gate in f32; None if it returns something else than logits, weights and ids.

    Its hooks do not run: they must only see the tokens of the model.
    """
    gate = copy.copy(parts.gate)
    for kind in ("_parameters", "_buffers"):
        held = vars(parts.gate)[kind]
        vars(gate)[kind] = {name: None if each is None else each.detach().float() for name, each in held.items()}
    found = gate.forward(x_TH.float(), *parts.gate_arguments())
    if not isinstance(found, tuple) or len(found) != 3 or not all(isinstance(each, Tensor) for each in found):
        return None
    _, weights_TK, ids_TK = found
    is_routing = ids_TK.shape == weights_TK.shape == (x_TH.shape[0], gate.top_k) and not ids_TK.is_floating_point()
    return Routing(ids_TK, weights_TK) if is_routing else None


def _routing_reasons(ours: Routing, theirs: Routing | None) -> list[str]:
    """List the differences in the routing of the probes."""
    if theirs is None:
        return ["its gate does not return logits, and weights and ids of the chosen experts"]
    (our_ids, our_order), (ids, order) = ours.ids_TK.long().sort(dim=1), theirs.ids_TK.long().sort(dim=1)
    same_T = (our_ids == ids).all(dim=1)
    if not bool(same_T.all()):
        return [f"its gate selects other experts for {int((~same_T).sum())} of {len(same_T)} tokens"]
    weights = ours.weights_TK.gather(1, our_order), theirs.weights_TK.float().gather(1, order)
    return [] if torch.allclose(*weights, rtol=1e-4, atol=1e-6) else ["its gate gives other weights"]


def _must_agree(path: str, block: nn.Module, parts: Parts, layer: MoELayer) -> None:
    """Raise UnsupportedError unless block and layer route a batch alike, and compute it within the formats' limits."""
    most = layer.config.kernel.max_num_tokens
    x_TH = _probe(layer.config.model.hidden_size, layer.device)[:most].to(layer.dtype)
    ours = layer.route(x_TH)
    reasons = _routing_reasons(ours, _route_in_f32(parts, x_TH)) or _differences(block, parts, layer, x_TH, ours)
    layer.reset_expert_load()
    if reasons:
        raise UnsupportedError(f"{path} ({type(block).__name__}) cannot be computed by a MoELayer", reasons)


def _differences(block: nn.Module, parts: Parts, layer: MoELayer, x_TH: Tensor, routing: Routing) -> list[str]:
    routed, twin = (None, routing.weights_TK, routing.ids_TK.long()), copy.copy(block)
    gates = {name: (lambda *_: routed) if child is parts.gate else child for name, child in block._modules.items()}
    vars(twin)["_modules"] = gates  # the block on this routing: its gate may round in another way
    expected = twin.forward(x_TH[None])
    forget_plan(parts.experts)  # where moe_mk computes them: the layer has the weights in that layout already
    if not isinstance(expected, Tensor) or expected.numel() != x_TH.numel():
        return ["it does not return one tensor of the tokens' shape"]
    expected = expected.view(x_TH.shape).float()
    error = float((layer(x_TH).float() - expected).norm() / expected.norm())
    problem = layer.decision.problem
    # Both round: the block as defined by the checkpoint, the layer as decided.
    theirs = experts_error(problem.dtype, problem.activations or problem.dtype, problem.weights, x_TH.shape[1])
    limit = ALL_TOKENS * math.hypot(error_of(layer.decision), theirs)
    return [] if error <= limit else [f"its output differs by {error:.1e} of its size, formats allow {limit:.1e}"]


LAYER = "_moe_mk_layer"
AGAIN = "call unpatch_blocks(model), then patch_blocks(model)"


class PatchedForward:
    """The forward of a patched block. The layer holds views of the weights, or a copy in the layout of its backend.

    It is reloaded first if a weight was modified or replaced, as in a copy of the model; compiled graphs do not check.
    """

    def __init__(self, block: nn.Module, layer: MoELayer) -> None:
        parts = parts_of(block)
        assert parts is not None
        self.parts, self.layer, self.most = parts, layer, layer.config.kernel.max_num_tokens
        self.facts = facts_of(parts.experts) if parts.packed is None else None
        self.stamp = Stamp(parts.tensors())

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """(..., H) to (..., H), shared experts included; longer batches than the layer takes are computed in parts."""
        if not torch.compiler.is_compiling():
            self._follow()
            self._must_read(hidden_states)
            if torch.is_grad_enabled() and any(each.requires_grad for each in self.parts.tensors()):
                hidden_states = hidden_states.detach().requires_grad_()  # the layer raises UnsupportedError
        if self.parts.gate._forward_hooks:  # transformers records router logits by hooks on the gate
            self.parts.gate(hidden_states, *self.parts.gate_arguments())
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        if x_TH.shape[0] <= self.most:
            return self.layer(x_TH).view(hidden_states.shape)  # type: ignore[no-any-return]
        return torch.cat([self.layer(part) for part in torch.split(x_TH, self.most)]).view(hidden_states.shape)

    def _follow(self) -> None:
        """Reload the layer if a weight of the block was replaced or modified."""
        tensors = self.parts.tensors()
        if self.stamp.is_of(tensors):
            return
        facts = self.facts and facts_of(self.parts.experts)
        if facts and self.facts and (facts != self.facts or dtype_of(self.parts.gate, facts) is not self.layer.dtype):
            was, now = (f"{one.scheme.name} on {one.device}" for one in (self.facts, facts))
            raise UnsupportedError(
                f"block {self.layer.name} was patched with weights of {was} and has {now} since", [AGAIN]
            )
        _load(self.layer, self.parts)
        self.stamp = Stamp(tensors)

    def _must_read(self, hidden_states: Tensor) -> None:
        expect_dense("hidden_states", hidden_states)
        if hidden_states.dtype is not self.layer.dtype:
            raise UnsupportedError(
                f"block {self.layer.name} is patched for {self.layer.dtype} and gets {hidden_states.dtype}",
                [f"leave torch.autocast, or cast the model with model.to({hidden_states.dtype}): {AGAIN}"],
            )
