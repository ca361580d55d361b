"""Packed experts of a checkpoint in place of those of a model: INT4 and INT8 in groups, and blocks of GGUF.

transformers expands such experts to the dtype of the model. Here each experts module is replaced by one that holds the
integers of the file, in the layout of the backend, and is called in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from moe_mk.config.hf_quant import quant_from_hf
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.modules import (
    Act,
    activation_of,
    free_weights,
    is_experts,
    refuse_until_loaded,
    save_whole_or_nothing,
)
from moe_mk.integrations.hf.plan import check_settings, pooled, top_k_of
from moe_mk.integrations.hf.stored import stated_quantisation
from moe_mk.layer import MoELayer
from moe_mk.layer.custom_op import Identity, Operator, is_untraced
from moe_mk.layer.experts_of_rank import routing_of
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.kinds import PLAIN_KINDS, WEIGHT_ONLY_KINDS
from moe_mk.text import amount
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.completeness import raise_if
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.inspect import LayerFacts, inspect_checkpoint
from moe_mk.weights.names import layer_of
from moe_mk.weights.packed_layouts import FLOATS
from moe_mk.weights.source import is_mapped

BF16_BYTES = 2


@dataclass(frozen=True)
class PackedModule:
    """One replaced experts module."""

    path: str
    cls: str
    """The class that was replaced."""
    backend: str
    format: str
    """The format of the checkpoint, such as int4_g32."""
    down_format: str
    """That of down projections."""
    num_bytes: int
    """Of the experts in the layout of the backend; there is no other copy in this process."""
    bf16_bytes: int
    """What the same experts would occupy in bf16."""
    mapped: bool
    """Whether the backend reads the memory-mapped file, of which the system may drop pages."""


@dataclass(frozen=True)
class PackedReport:
    """All experts modules that were replaced."""

    model: str
    checkpoint: str
    modules: tuple[PackedModule, ...]

    @property
    def num_bytes(self) -> int:
        return sum(module.num_bytes for module in self.modules)

    @property
    def bf16_bytes(self) -> int:
        """Return the bytes of the same experts in bf16."""
        return sum(module.bf16_bytes for module in self.modules)

    def as_dict(self) -> dict[str, Any]:
        totals = {"num_bytes": self.num_bytes, "bf16_bytes": self.bf16_bytes}
        shown = {"model": self.model, "checkpoint": self.checkpoint}
        return {**shown, **totals, "modules": [dict(vars(module)) for module in self.modules]}

    def __str__(self) -> str:
        """The totals, and one line per module."""
        lines = [
            f"{self.model}: {len(self.modules)} experts modules packed from {self.checkpoint}, "
            f"{amount(self.num_bytes)} instead of {amount(self.bf16_bytes)} in bf16"
        ]
        for module in self.modules:
            down = "" if module.down_format == module.format else f", down {module.down_format}"
            mapped = ", memory-mapped" if module.mapped else ""
            lines.append(
                f"{module.path} ({module.cls}): {module.backend}, {module.format}{down}, "
                f"{amount(module.num_bytes)}{mapped}, {amount(module.bf16_bytes)} in bf16"
            )
        return "\n".join(lines)


class PackedExperts(nn.Module):
    """The experts of one block, called like the module that it replaces. Inference only.

    It has no parameters: a model with it can neither be saved nor moved to another device or dtype.
    """

    def __init__(self, layer: MoELayer) -> None:
        """layer: loaded, without shared experts."""
        super().__init__()
        self.layer = layer
        self._entry = PACKED.enter(self, Identity.read(layer._entry.tolist()))
        self.register_state_dict_pre_hook(cannot_be_saved)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another object, also for compiled graphs."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._entry = PACKED.enter(self, Identity.read(self.layer._entry.tolist()))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H), (T, K) ids and (T, K) weights to (T, H), weighted and summed; ids outside the experts are skipped."""
        if is_untraced(hidden_states) and not (hidden_states.requires_grad or top_k_weights.requires_grad):
            return self.run(hidden_states, top_k_index, top_k_weights)
        return PACKED.traced(hidden_states, top_k_index, top_k_weights, self._entry)

    @torch.no_grad()
    def run(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The implementation of the operator; batches above `kernel.max_num_tokens` are computed in parts."""
        layer, most = self.layer, self.layer.config.kernel.max_num_tokens
        routing, x_TH = routing_of(ids_TK, weights_TK, layer.config.model.num_experts), x_TH.detach()
        if x_TH.shape[0] <= most:
            return layer.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)
        rows = [slice(start, start + most) for start in range(0, x_TH.shape[0], most)]
        parts = [layer.forward_routed(x_TH[r], routing.weights_TK[r], routing.ids_TK[r]) for r in rows]
        return torch.cat(parts)


PACKED: Operator[PackedExperts] = Operator(
    "packed_experts", "(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor entry) -> Tensor",
    lambda experts, *given: experts.run(*given),
    untrained=("packed experts", "train with the experts in bf16"),
)  # fmt: skip
"""(T, H), ids (T, K) and weights (T, K) to (T, H): one node of a graph."""
packed_experts = PACKED.call


def cannot_be_saved(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A hook before `state_dict` of a module without its weights. Raises UnsupportedError."""
    del module, keep_vars
    raise UnsupportedError(
        f"{prefix.removesuffix('.')} is packed and cannot be saved",
        ["its weights are in the checkpoint it was read from"],
    )


def experts_of(model: nn.Module, replaced: str = "") -> dict[str, nn.Module]:
    """The modules of experts by path. Raises UnsupportedError without any. replaced: the reason for packed ones."""
    found = {path: module for path, module in model.named_modules() if is_experts(module)}
    if not found:
        packed = any(isinstance(module, PackedExperts) for module in model.modules())
        raise UnsupportedError(
            f"{type(model).__name__} has no experts module that transformers dispatches", [replaced] if packed else []
        )
    return found


def replace_experts(model: nn.Module, path: str | PathLike[str], **settings: Any) -> PackedReport:
    """Replace the experts of a model by those of a checkpoint as it stores them, and free the model's own.

    model: built with its experts on the meta device (`model_without_experts`), or loaded with experts in any dtype. Its
    other parameters must be loaded; tokens have their dtype and device.
    path: a folder of compressed-tensors `pack-quantized`, GPTQ or AWQ safetensors, or a GGUF file.
    settings: of MoEConfig.kernel by key, for instance experts="cpu_native". No format is converted to another unless
    fallback=True is among them. `bytes` of residency are for all layers together.
    All experts are read before any is replaced: a model is changed completely or not at all. Raises ConfigError for
    settings and quantisation that are not supported, UnsupportedError with every module and all reasons, WeightError
    for a checkpoint that is missing, incomplete or damaged.
    """
    check_settings(settings)
    found = experts_of(model, "its experts were replaced before; load the model again")
    layers = _layers_of(model, found, path, {"prepare_finalize": "no_ep", "fallback": False} | settings)
    source, made = open_source(path), {}
    for name, (layer, facts) in layers.items():
        owned = range(facts.num_experts)
        assert facts.layer is not None
        weights = load_layer(source, facts.layer, facts.layer_spec(), owned=owned, prefix=facts.prefix)
        # The model keeps its own router and shared experts.
        layer.take(replace(weights, shared=None, bias_E=None, logit_bias_E=None, table_XK=None))
        made[name] = PackedExperts(layer), _report(name, found[name], layer, facts)
    for name, (experts, _) in made.items():
        experts.train(found[name].training)
        model.set_submodule(name, experts)
        free_weights(found[name])
        refuse_until_loaded(found[name], name, path)  # whoever else holds it
    save_whole_or_nothing(model)
    reports = (replace(report, num_bytes=each.layer.state.experts.weights.num_bytes) for each, report in made.values())
    return PackedReport(type(model).__name__, str(path), tuple(reports))  # a share of a pool is smaller by now


def _report(path: str, module: nn.Module, layer: MoELayer, facts: LayerFacts) -> PackedModule:
    """Report formats and bytes of a loaded layer, after a second copy in the checkpoint's layout was freed."""
    try:
        layer.release_weights()
        mapped = False
    except UnsupportedError:  # the backend reads the tensors of the checkpoint: there is no second copy
        mapped = all(is_mapped(slot.down_HI.values) for slot in layer.weights.experts.slots)
    laid_out = layer.state.experts.weights
    assert laid_out is not None
    return PackedModule(
        path=path,
        cls=type(module).__name__,
        backend=layer.decision.chosen.experts,
        format=facts.kind,
        down_format=facts.down or facts.kind,
        num_bytes=laid_out.num_bytes,
        bf16_bytes=BF16_BYTES * 3 * facts.num_experts * facts.hidden_size * facts.intermediate_size,
        mapped=mapped,
    )


def _rest_of(model: nn.Module, found: Mapping[str, nn.Module]) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the parameters outside of the experts. Raises UnsupportedError unless all are loaded."""
    inside = tuple(f"{path}." for path in found)
    rest = {name: p for name, p in model.named_parameters() if not name.startswith(inside)}
    meta = [name for name, parameter in rest.items() if parameter.device.type == "meta"]
    wide = [parameter for parameter in rest.values() if parameter.dtype in FLOATS]
    if meta or not wide:
        reasons = [
            f"{len(meta)} of {len(rest)} parameters outside of its experts are on the meta device, e.g. {meta[0]}"
        ]
        raise UnsupportedError(
            f"{type(model).__name__} is not loaded",
            [
                *(reasons if meta else ["it has no parameters outside of its experts"]),
                "use model_without_experts(path)",
            ],
        )
    return wide[0].device, wide[0].dtype


def _layers_of(
    model: nn.Module,
    found: Mapping[str, nn.Module],
    path: str | PathLike[str],
    settings: Mapping[str, Any],
) -> dict[str, tuple[MoELayer, LayerFacts]]:
    """An empty layer for each module, and the block of the checkpoint to load it from. Reads headers only."""
    (device, dtype), (settings, pool) = _rest_of(model, found), pooled(settings)
    checkpoint, quant = inspect_checkpoint(path), stated_quantisation(path)
    stated = str(quant_from_hf(quant, str(path))["weights"]) if quant else ""
    raise_if(f"{path} cannot be read", checkpoint.problems)
    layers, refused = {}, []
    for name, module in found.items():
        facts, reasons = _block_of(name, checkpoint.layers)
        if facts is not None:
            reasons = [*_format_reasons(facts, stated), *_module_reasons(module, facts)]
        if facts is not None and not reasons:
            try:
                config = MoEConfig.parse(_described(model, module, facts), name).with_(**settings)
                layers[name] = MoELayer(config, device=device, dtype=dtype, name=name, pool=pool), facts
            except UnsupportedError as problem:
                reasons = [problem.what, *problem.reasons]
        refused += [f"{name} ({type(module).__name__}): {reason}" for reason in reasons]
    if refused:
        raise UnsupportedError(f"the experts of {type(model).__name__} cannot be replaced from {path}", refused)
    return layers


def _block_of(path: str, layers: tuple[LayerFacts, ...]) -> tuple[LayerFacts | None, list[str]]:
    """The block of the checkpoint for a module, or the reasons why there is none."""
    number = layer_of(f"{path}.")
    same = [facts for facts in layers if facts.layer == number and number is not None]
    if len(same) > 1:
        same = [facts for facts in same if path.startswith(facts.prefix)]
    if len(same) != 1:
        return None, [f"the checkpoint has {len(same) or 'no'} blocks of experts for layer {number}"]
    return (None, list(same[0].problems)) if same[0].problems else (same[0], [])


def _format_reasons(facts: LayerFacts, stated: str) -> list[str]:
    kinds = dict.fromkeys((facts.kind, facts.down or facts.kind))
    if facts.kind in PLAIN_KINDS:
        return [
            f"its experts are {facts.kind} in the checkpoint; use experts_implementation='moe_mk', which reads them"
        ]
    reasons = [
        f"its experts are {kind} in the checkpoint; packed are int4 and int8 in groups and {', '.join(GGUF)}"
        for kind in kinds
        if kind not in WEIGHT_ONLY_KINDS
    ]
    if "fp8_block" in kinds:
        reasons.append("FP8 models run as FP8 with experts_implementation='moe_mk' and, on a CPU, inside cpu_fp8()")
    if stated and not _are_alike(stated, facts):
        reasons.append(f"its tensors are {facts.kind}, and quantization_config states {stated}")
    if facts.has_expert_bias:
        reasons.append("its experts have biases, which are computed for experts_implementation='moe_mk' only")
    return reasons


def _are_alike(stated: str, facts: LayerFacts) -> bool:
    """Whether a stated format has the tensors of a block: a group that is as long as a row is the whole row."""
    one, other = GROUPED.get(stated), GROUPED.get(facts.kind)
    if one is None or other is None:
        return stated == facts.kind
    sides = facts.hidden_size, facts.intermediate_size
    grids = [[scheme.scale_shape(*size) for size in (sides, sides[::-1])] for scheme in (one, other)]
    held = [(scheme.bits, scheme.has_zeros, scheme.has_biases) for scheme in (one, other)]
    return grids[0] == grids[1] and held[0] == held[1]


def _module_reasons(module: nn.Module, facts: LayerFacts) -> list[str]:
    """Differences between a module and a block of the checkpoint, and features of the module that are not computed."""
    down, reasons = getattr(module, "down_proj", None), []
    if not isinstance(down, Tensor) or down.dim() != 3:
        return ["it has no down_proj of all experts"]
    inner, hidden = (down.shape[1], down.shape[2]) if module.is_transposed else (down.shape[2], down.shape[1])
    sizes = {"num_experts": down.shape[0], "hidden_size": hidden, "intermediate_size": inner}
    stored = {key: getattr(facts, key) for key in sizes}
    if sizes != stored:
        shown = [", ".join(f"{key}={size}" for key, size in each.items()) for each in (sizes, stored)]
        reasons.append(f"the module has {shown[0]}, the checkpoint {shown[1]}")
    features = {
        "ungated experts": not module.has_gate,
        "biases": bool(getattr(module, "has_bias", False)),
        "a norm after each expert": bool(getattr(module, "has_post_expert_norm", False)),
        "a custom gate": bool(module.has_gate) and _activation_of(module) is None,
    }
    return [*reasons, *(f"it has {what}, which packed experts do not compute" for what, has in features.items() if has)]


def _activation_of(module: nn.Module) -> Act | None:
    compute = module._apply_gate if module.has_gate else module.act_fn
    return activation_of(compute, gated=bool(module.has_gate), device=torch.device("cpu"))  # type: ignore[arg-type]


def _described(model: nn.Module, module: nn.Module, facts: LayerFacts) -> dict[str, Any]:
    owner = module if hasattr(module, "config") else model
    return {
        "model": {
            "name": type(module).__name__,
            "hidden_size": facts.hidden_size,
            "moe_intermediate_size": facts.intermediate_size,
            "num_experts": facts.num_experts,
            "num_shared_experts": 0,
            **(_activation_of(module) or Act("silu")).settings(),
            "quant": {"weights": facts.kind, "down": facts.down or None},
        },
        "router": {"top_k": min(top_k_of(owner), facts.num_experts), "has_correction_bias": False},
    }
