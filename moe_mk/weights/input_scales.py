"""Calibrated activation scales, which checkpoints store with the weights of every expert.

Each projection has one: compressed-tensors and modelopt call it `input_scale`. Gate and up read the same tokens, and a
token may be quantised before dispatch to several experts, so one scale is used for all gates and ups: the largest, with
which no calibrated value saturates. Down projections have a separate scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_mk.errors import WeightError
from moe_mk.weights.checkpoint import find_prefix
from moe_mk.weights.completeness import some
from moe_mk.weights.names import CONVENTIONS, Convention, Part, Role, local_names, recognise
from moe_mk.weights.source import TensorSource

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class InputScales:
    """Activation scales of the routed experts of one layer."""

    tokens: float
    """The largest scale of all gates and ups."""
    hidden: float
    """The largest scale of all downs."""
    num_experts: int
    spread: float
    """Ratio of the largest to the smallest scale of gates and ups: the range lost by sharing one."""


def read_input_scales(source: TensorSource, layer: int, *, prefix: str | None = None) -> InputScales | None:
    """The scales of all experts of one layer, not only those of a rank; None if the checkpoint has none.

    prefix: the part of names before "experts.0..."; None: the layer's block is searched. Raises WeightError if only
    some experts have a scale, and for scales that are not finite and positive.
    """
    prefix = find_prefix(source, layer) if prefix is None else prefix.replace("{N}", str(layer))
    local = set(local_names(source.names(), prefix))
    names = input_scale_names(local)
    if not names:
        return None
    convention = recognise(local)
    parts = [part for name in local if (part := _routed(convention, name))]
    experts = sorted({part.expert for part in parts})  # type: ignore[type-var]
    projections = sorted({part.projection for part in parts}, key=PROJECTIONS.index)  # without gates in some models
    wanted = [convention.spell(Part(Role.EXPERT, p, e, extra="input")) for e in experts for p in projections]
    title = f"layer {layer} of {source.where}"
    if missing := [name for name in wanted if name not in local]:
        raise WeightError(f"{title}: {len(missing)} of {len(wanted)} input scales are missing: {some(missing)}")
    scales = {name: source.open(prefix + name).reshape(-1).to(torch.float32) for name in wanted}
    scales = {name: 1.0 / scale if convention.divides else scale for name, scale in scales.items()}
    broken = [name for name, s in scales.items() if len(s) != 1 or not bool(torch.isfinite(s).all() and (s > 0).all())]
    if broken:
        raise WeightError(f"{title}: input scales are no single positive number: {some(broken)}")
    down = {convention.spell(Part(Role.EXPERT, "down", e, extra="input")) for e in experts}
    tokens = [float(scale) for name, scale in scales.items() if name not in down]
    hidden = [float(scale) for name, scale in scales.items() if name in down]
    return InputScales(max(tokens), max(hidden), len(experts), max(tokens) / min(tokens))


def input_scale_names(local_names: set[str]) -> list[str]:
    """The local names of a block that are input scales of routed or shared experts, sorted."""
    convention = recognise(local_names)
    return sorted(name for name in local_names if (part := convention.parse(name)) and part.extra == "input")


def _routed(convention: Convention, name: str) -> Part | None:
    part = CONVENTIONS[convention.name].parse(name)
    return part if part is not None and part.role is Role.EXPERT and part.expert is not None else None
