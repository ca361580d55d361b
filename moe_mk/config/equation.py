"""`layer_equation.json`: what a MoE layer computes, for model types that `config.hf` does not list.

The file is stored next to a config.json, of which it needs no key but the quantisation. `moe-mk derive` writes it from
the model's class in transformers; it can be edited, or written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from moe_mk.config.base import Settings, read_mapping
from moe_mk.errors import ConfigError

FILE = "layer_equation.json"
FUSED_SHARED_BIAS = 1e30
"""The bias for selection of experts that every token has."""
KEY = "layer_equation"
"""Under which a parsed config.json holds the contents of the file."""
MODULES = (
    "gate", "experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj",
    "shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj", "shared_expert_gate",
    "shared_experts.{e}.gate_proj", "shared_experts.{e}.up_proj", "shared_experts.{e}.down_proj",
    "fc1_latent_proj", "fc2_latent_proj",
)  # fmt: skip
"""Names of the linear maps of a layer, as DeepSeek-V3's and Qwen2-MoE's checkpoints have them."""
VECTORS = (
    "gate.e_score_correction_bias", "gate.bias", "router.per_expert_scale",
    "experts.{e}.gate_proj.bias", "experts.{e}.up_proj.bias", "experts.{e}.down_proj.bias",
)  # fmt: skip
"""Names of its vectors: the bias for selection, the bias of the logits, the factors of the routing weights (or one of
all), biases of experts outside of linear modules."""


class TensorPart(Settings):
    """A matrix that is a part of a tensor, or stored transposed."""

    tensor: str
    """The tensor below the prefix. {e} is the number of the expert; without it, the first axis is that of experts."""
    rows: Literal["all", "first", "second", "even", "odd"] = "all"
    """Which of its outputs: one half, or every other one where gate and up alternate."""
    transposed: bool = False
    """Whether it is stored as (inputs, outputs), a vector as (1, outputs)."""
    first: int = 0
    """The expert that is the tensor's first: of `shared_experts.{e}`, those that the router scores, all routed ones."""


class TensorNames(Settings):
    """Where a checkpoint holds the tensors of a layer, if it does not have the names of a known family."""

    prefix: str
    """Before all names of a layer's block; {N} is the number of the layer: model.layers.{N}.mlp."""
    parts: dict[str, str | TensorPart]
    """For each of `MODULES` and `VECTORS` that the layer has: the path below the prefix of a linear module, whose
    scales and packed values keep their own last names, or of a tensor."""

    @model_validator(mode="after")
    def _are_known(self) -> Self:
        known = (*MODULES, *VECTORS)
        problems = [f"names.parts has {key!r}, known are {', '.join(known)}" for key in self.parts if key not in known]
        for key, part in self.parts.items():
            path = part if isinstance(part, str) else part.tensor
            if "{e}" in path and "{e}" not in key:
                problems.append(f"names.parts[{key!r}] is {path!r}, but {key} is no matrix of an expert")
            if isinstance(part, str) and "{e}" in key and "{e}" not in path:
                problems.append(
                    f"names.parts[{key!r}] is {path!r} without {{e}}; for a tensor of all experts write "
                    f'{{"tensor": {path!r}}}'
                )
            if path.count("{e}") > 1 or "{N}" in path:
                problems.append(f"names.parts[{key!r}] is {path!r}; it has {{e}} once at most, and no {{N}}")
        if self.prefix.count("{N}") != 1:
            problems.append(f"names.prefix={self.prefix!r} must have {{N}}, the number of the layer, once")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class LayerGroup(Settings):
    """The settings of some layers of a model."""

    layers: tuple[int, ...]
    model: dict[str, Any]
    """Sizes and experts, with the keys of `MoEConfig.model`. The format (`quant`) is read from config.json."""
    router: dict[str, Any]
    """The keys of `MoEConfig.router`."""

    @model_validator(mode="after")
    def _has_no_format(self) -> Self:
        if "quant" in self.model:
            raise ValueError("model.quant is read from config.json; drop it")
        return self


class LayerEquation(Settings):
    """The settings of the layers of one model, and the names of their tensors."""

    version: Literal[1] = 1
    model_type: str
    """As in config.json."""
    derived_from: str = ""
    """The class that was measured and its library, for information."""
    config: dict[str, int | float | bool | str | list[Any] | dict[str, Any] | None] = Field(default_factory=dict)
    """Keys of config.json, or of its text_config, with the values for which the equation holds."""
    layers: tuple[int, ...] | None = None
    """The layers that have this equation; None: all that have experts."""
    model: dict[str, Any]
    """Sizes and experts, with the keys of `MoEConfig.model`. The format (`quant`) is read from config.json."""
    router: dict[str, Any]
    """The keys of `MoEConfig.router`."""
    others: tuple[LayerGroup, ...] = ()
    """Layers with other settings, of the same configuration; `layers` then lists those of `model` and `router`."""
    refused: dict[str, str] = Field(default_factory=dict)
    """Layers that no settings describe, with the reason, for information."""
    names: TensorNames | None = None
    """Of the tensors of all layers. None: the names of a known family."""

    @model_validator(mode="after")
    def _has_one_equation_a_layer(self) -> Self:
        if "quant" in self.model:
            raise ValueError("model.quant is read from config.json; drop it")
        stated = [number for group in self.groups for number in group.layers]
        if self.others and self.layers is None:
            raise ValueError("layers must list the layers of model and router, since others has layers of its own")
        if twice := sorted({number for number in stated if stated.count(number) > 1}):
            raise ValueError(f"layers {twice} are listed more than once")
        return self

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """All groups of layers with equal settings; none where one equation is that of all layers."""
        if self.layers is None:
            return self.others
        return LayerGroup(layers=self.layers, model=self.model, router=self.router), *self.others

    def settings(self, hf: Mapping[str, Any], where: str, layer: int | None) -> dict[str, Any]:
        """Keys of `MoEConfig` but for the format. hf: the config.json, or its text_config.

        Raises ConfigError where the equation is of another model, configuration or layer.
        """
        problems = [
            f"{key} is {hf.get(key)!r}, and the equation is that of {value!r}"
            for key, value in {"model_type": self.model_type, **self.config}.items()
            if hf.get(key) != value
        ]
        groups = self.groups
        mine: LayerGroup | LayerEquation = self
        if layer is None and self.others:
            listed = "; ".join(f"layers {list(group.layers)}" for group in groups)
            problems.append(f"its layers have {len(groups)} equations ({listed}); name one: from_hf(..., layer=N)")
        elif layer is not None and groups:
            mine = next((group for group in groups if layer in group.layers), self)
            if mine is self:
                reasons = [why for numbers, why in self.refused.items() if str(layer) in numbers.split(", ")]
                known = sorted(number for group in groups for number in group.layers)
                which = reasons[0] if reasons else f"another equation, or no experts; those that have one: {known}"
                problems.append(f"layer {layer}: {which}")
        if problems:
            raise ConfigError(
                f"{where}: {FILE} does not describe this model: {'; '.join(problems)}; derive it again: moe-mk derive"
            )
        return {"model": dict(mine.model), "router": dict(mine.router)}


def equation_next_to(file: Path) -> LayerEquation | None:
    """The equation in the folder of a file, if there is one."""
    found = file.with_name(FILE)
    return LayerEquation.parse(read_mapping(found), str(found)) if found.is_file() else None
