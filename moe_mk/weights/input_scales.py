"""Calibrated activation scales, which checkpoints store with the weights of every expert.

Each projection has one: compressed-tensors and modelopt call it `input_scale`. Gate and up read the same tokens, and a
token may be quantised before dispatch to several experts, so one scale is used for all gates and ups: the largest, with
which no calibrated value saturates. Down projections have a separate scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_mk.config.quant import QuantConfig
from moe_mk.errors import WeightError
from moe_mk.quant.kinds import FORMATS
from moe_mk.weights.checkpoint import find_prefix
from moe_mk.weights.completeness import some
from moe_mk.weights.names import Part, Role, local_names, recognise
from moe_mk.weights.source import TensorSource

PROJECTIONS = ("gate", "up", "gate_up", "down")
ENDS = ("input_scale", "input_global_scale", "input_scale_2")


@dataclass(frozen=True)
class InputScales:
    """Activation scales of the routed experts of one layer."""

    tokens: float
    """The largest scale of all gates and ups."""
    hidden: float
    """The largest scale of all downs."""


def read_input_scales(
    source: TensorSource, layer: int, *, prefix: str | None = None, shared: bool = False
) -> InputScales | None:
    """The scales of all experts of one layer, not only those of a rank; None if the checkpoint has none.

    prefix: the part of names before "experts.0..."; None: the layer's block is searched. shared: whether those of the
    shared experts count, which then round with the same ones. Raises WeightError if only some experts have a scale, for
    scales that are not finite or negative, and where all are 0.
    """
    prefix = find_prefix(source, layer) if prefix is None else prefix.replace("{N}", str(layer))
    if not has_input_scales(source, layer, prefix):
        return None
    local = set(local_names(source.names(), prefix))
    convention = recognise(local)
    found = [part for name in local if (part := convention.parse(name)) and part.role is Role.EXPERT]
    parts = [(part.projection, part.expert) for part in found]
    experts = sorted({expert for _, expert in parts}, key=lambda expert: expert or 0)  # None alone: stacks
    projections = sorted({projection for projection, _ in parts}, key=PROJECTIONS.index)  # without gates in some models
    wanted = [convention.spell(Part(Role.EXPERT, p, e, extra="input")) for e in experts for p in projections]
    if shared and convention.holds(Role.SHARED, "input"):
        words = [p for p in convention.shared_words if p != "gate" or projections[0] != "up"]
        own = [convention.spell(Part(Role.SHARED, p, extra="input")) for p in words]
        wanted += own if local & set(own) else []
    title = f"layer {layer} of {source.where}"
    if missing := [name for name in wanted if name not in local]:
        raise WeightError(f"{title}: {len(missing)} of {len(wanted)} input scales are missing: {some(missing)}")
    scales = {name: source.read(prefix + name).reshape(-1).to(torch.float32) for name in wanted}
    scales = {name: 1.0 / scale if convention.divides else scale for name, scale in scales.items()}
    # Calibration leaves 0 for an expert that it sent no token to; the largest scale is that of others then.
    if broken := [
        name for name, s in scales.items() if not s.numel() or not bool((torch.isfinite(s) & (s >= 0)).all())
    ]:
        raise WeightError(f"{title}: input scales are not finite and positive: {some(broken)}")
    down = {name for name in wanted if (part := convention.parse(name)) and part.projection == "down"}
    tokens = [float(scale.max()) for name, scale in scales.items() if name not in down]
    hidden = [float(scale.max()) for name, scale in scales.items() if name in down]
    if not max(tokens) or not max(hidden):
        raise WeightError(f"{title}: all input scales of {'down' if max(tokens) else 'gate and up'} projections are 0")
    return InputScales(max(tokens), max(hidden))


def has_input_scales(source: TensorSource, layer: int, prefix: str | None = None) -> bool:
    """Whether routed experts of a layer have any, by the names of tensors."""
    prefix = find_prefix(source, layer) if prefix is None else prefix.replace("{N}", str(layer))
    return any(name.startswith(f"{prefix}experts.") and name.endswith(ENDS) for name in source.names())


def calibrates(quant: QuantConfig) -> bool:
    """Whether activations of a format may have static scales."""
    return FORMATS[quant.weights].static and quant.activations != "none"


def scales_contradict(quant: QuantConfig, has_scales: bool) -> str:
    """Describe how tensors contradict a configuration's scales of activations; "" where they do not."""
    static = calibrates(quant)
    if (static and quant.activation_scales != "dynamic") if has_scales else quant.activation_scales != "static":
        return ""
    states = "no" if quant.activations == "none" else quant.activation_scales or "dynamic"
    have = f"static ones (input_scale), which are {'' if static else 'not '}used"
    text = f"the configuration states {states} scales of activations for {quant.weights} weights, the tensors have "
    return text + (have if has_scales else "none (input_scale): every token gets one of its own")
