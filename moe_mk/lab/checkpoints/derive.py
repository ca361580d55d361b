"""The equation of a MoE layer from its class: a small block is built, and what its tensors do is measured.

Layers may differ in any value that their block reads by the number of the layer, so layers have one equation only if
small blocks of all of them return the same for the same weights and tokens. Built with transformers 5.24.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from moe_mk.config.base import read_mapping
from moe_mk.config.equation import LayerEquation, LayerGroup, TensorPart
from moe_mk.config.hf import text_of
from moe_mk.errors import MoEMKError, UnsupportedError, unless_signalled
from moe_mk.integrations.hf.without_experts import FAILURES, config_of, first_line, model_of
from moe_mk.lab.checkpoints.block_tensors import is_block, names_of, numbered
from moe_mk.lab.checkpoints.measured_block import Measured
from moe_mk.lab.checkpoints.small_block import behaviour_of, described, readings_of
from moe_mk.weights.names import layer_of


def derive(path: str | os.PathLike[str], layer: int | None = None) -> LayerEquation:
    """The equations of the layers of a model. path: its config.json or folder. layer: only of this one.

    Raises UnsupportedError for a class that transformers lacks or that cannot be built, and if no settings describe the
    block of any layer, with what differs. Layers that no settings describe are in `refused`, with the reason.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    stated = read_mapping(file)
    return derive_from(config_of(file), stated, layer)


def derive_from(config: PretrainedConfig, stated: Mapping[str, Any], layer: int | None = None) -> LayerEquation:
    """The equations of the layers of a configuration. stated: its config.json."""
    with torch.device("meta"):
        model = model_of(config)
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, block in model.named_modules():
        if (number := layer_of(f"{name}.")) is not None and is_block(block):
            found.setdefault(number, (name, block))  # a second decoder begins at 0 again
    title = f"{type(model).__name__} ({config.model_type})"
    if not found:
        raise UnsupportedError(
            f"no layer of {title} can be derived", ["none of its modules has experts and their router"]
        )
    if layer is not None and layer not in found:
        raise UnsupportedError(f"layer {layer} of {title} cannot be derived", [f"layers with experts: {sorted(found)}"])
    configs = {n: list(_configs(model, name, n)) for n, (name, _) in found.items()}
    alike = _alike({n: (block, configs[n]) for n, (_, block) in sorted(found.items())}) if layer is None else [[layer]]
    groups, refused, problems = list[LayerGroup](), dict[str, str](), list[MoEMKError]()
    names: dict[str, str | TensorPart] = {}
    read: set[str] = set()
    for layers in alike:
        path, block = found[layers[0]]
        try:
            measured, settings = _measured(block, configs[layers[0]], layers[0], read)
            parts = numbered(measured.names(model, path), layers[0])
            if other := [key for key, part in parts.items() if names.get(key, part) != part]:
                raise UnsupportedError(
                    f"its {other[0]} is elsewhere than that of other layers",
                    [f"{parts[other[0]]!r}, in others {names[other[0]]!r}"],
                )
        except unless_signalled(*FAILURES) as problem:
            one = UnsupportedError(f"{title} cannot be measured", [first_line(problem)])
            problems.append(problem if isinstance(problem, MoEMKError) else one)
            refused[", ".join(map(str, layers))] = str(problems[-1]).replace("\n  - ", ": ")
            continue
        names |= parts
        settings["model"] = {"name": config.model_type, **settings["model"]}
        same = next((n for n, each in enumerate(groups) if (each.model, each.router) == tuple(settings.values())), None)
        before = () if same is None else groups.pop(same).layers
        groups.append(LayerGroup(layers=tuple(sorted((*before, *layers))), **settings))
    if not groups:
        raise problems[0]
    first, *others = sorted(groups, key=lambda each: each.layers)
    keys = text_of(stated)
    text = config.get_text_config()
    read = {text.attribute_map.get(key, key) for key in read} | read | {"per_layer_config"}
    read -= {"model_type", "dtype", "torch_dtype"}
    return LayerEquation(
        model_type=str(keys.get("model_type", text.model_type)),
        derived_from=f"{type(found[first.layers[0]][1]).__name__} of transformers {transformers.__version__}",
        config={k: v for k, v in keys.items() if k in read and type(v) in (int, float, bool, str, list, dict)},
        layers=first.layers,
        model=first.model,
        router=first.router,
        others=tuple(others),
        refused=refused,
        names=names_of(names),
    )


def _alike(blocks: Mapping[int, tuple[nn.Module, Sequence[PretrainedConfig]]]) -> list[list[int]]:
    """The layers in groups with blocks that compute the same."""
    found: dict[object, list[int]] = {}
    by_state: dict[str, object] = {}
    for number, (block, configs) in blocks.items():
        # Values of buffers that no checkpoint stores are unknown on the meta device.
        is_known = block.state_dict().keys() >= {name for name, _ in block.named_buffers()}
        state = f"{number if not is_known else ''} {described(block)}"
        if state not in by_state:
            by_state[state] = behaviour_of(block, configs, number)
        found.setdefault(by_state[state], []).append(number)
    return list(found.values())


def _configs(model: nn.Module, path: str, layer: int) -> Iterator[PretrainedConfig]:
    """Yield the configurations from which the block of a layer may have been built: those of the modules around it."""
    words = path.split(".")
    for end in range(len(words), -1, -1):
        config = getattr(model.get_submodule(".".join(words[:end])), "config", None)
        if isinstance(config, PretrainedConfig):
            text = config.get_text_config()
            if getattr(text, "is_heterogeneous", False):  # values by layer, for which no class has a list
                yield text.per_layer_config[layer]
            yield from (text, config)


def _measured(
    block: nn.Module, configs: Sequence[PretrainedConfig], number: int, read: set[str]
) -> tuple[Measured, dict[str, Any]]:
    """A small block and its settings. Raises UnsupportedError with the reason of the first way to read the block."""
    refused = None
    for blocks in readings_of(block, configs, number, read):
        try:
            measured = Measured(blocks)
            return measured, measured.settings()
        except UnsupportedError as problem:
            refused = refused or problem
    assert refused is not None
    raise refused
