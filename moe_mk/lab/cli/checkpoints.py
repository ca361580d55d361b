"""`moe-mk make-checkpoint` and `moe-mk inspect-checkpoint`, and how the configuration of a checkpoint is read."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from moe_mk.config.equation import FILE, KEY, LayerEquation
from moe_mk.config.hf import FAMILIES, READ, as_family, family_of, read_config, renamed, settings_from_hf, text_of
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints import CheckpointShape, is_complete, write_checkpoint
from moe_mk.lab.checkpoints.checkpoint_plan import recipe_of
from moe_mk.lab.checkpoints.like import first_layer
from moe_mk.lab.checkpoints.synthesize import recipe_in
from moe_mk.lab.cli.exits import MISMATCH, OK, print_json
from moe_mk.lab.cli.screen import Screen
from moe_mk.layer.settings import config_of
from moe_mk.registry import did_you_mean
from moe_mk.text import amount
from moe_mk.trace.clock import now
from moe_mk.weights.gguf_metadata import hf_from_gguf
from moe_mk.weights.gguf_source import GgufSource, is_gguf
from moe_mk.weights.input_scales import scales_contradict
from moe_mk.weights.inspect import CheckpointFacts, LayerFacts

FULL = CheckpointShape()
_READ_BY_ROUTERS = {
    "scoring_func": "scoring_func", "num_expert_group": "n_group", "topk_group": "topk_group",
    "renormalize": "norm_topk_prob", "routed_scaling_factor": "routed_scaling_factor",
}  # fmt: skip


def declared(path: Path, family: str, layer: int | None = None) -> LayerEquation:
    """The equation of layers that are those of a family of the table: its keys are read as those of that family are.

    path: a config.json, or its folder. layer: None, all layers alike. Raises ConfigError for a family that the table
    lacks, and for what the family's configuration refuses.
    """
    if family not in FAMILIES:
        raise ConfigError(f"--as {family!r} is no family that is read{did_you_mean(family, FAMILIES)}")
    file = path / "config.json" if path.is_dir() else path
    hf = read_config(file)
    text = text_of(hf)
    settings = settings_from_hf(as_family({**hf, KEY: None}, family), str(file), layer, file.parent)
    del settings["model"]["quant"]
    plain = {key: value for key, value in text.items() if type(value) in (int, float, bool, str)}
    plain = {key: value for key, value in plain.items() if READ[family].keys() & renamed({key: value}, family)[0]}
    config = {key: value for key, value in plain.items() if key not in ("model_type", "dtype", "torch_dtype")}
    layers = None if layer is None else (layer,)
    stated = {"model_type": text.get("model_type"), "derived_from": f"a declaration: --as {family}", "config": config}
    return LayerEquation.parse({**stated, "layers": layers, **settings}, f"{file} as {family}")


def make(screen: Screen, directory: Path, shape: CheckpointShape, *, seed: int, force: bool) -> int:
    """Write a checkpoint unless it is already there. force: overwrite a complete one.

    Raises ConfigError for one of other sizes or of another seed, without force.
    """
    if not force and is_complete(directory, shape, seed):
        screen.fact("checkpoint", f"{directory} is already complete; --force overwrites it")
        return OK
    if not force and (there := recipe_in(directory)) not in (None, recipe_of(shape, seed)):
        raise ConfigError(f"{directory} holds another checkpoint ({there}); name another folder, or pass --force")
    start = now()
    with screen.progress("write") as advance:
        total = write_checkpoint(directory, shape, seed=seed, on_progress=advance)
    kept = ""
    if shape.num_experts != FULL.num_experts:
        groups = f"{shape.num_groups} groups of {shape.num_experts // shape.num_groups}"
        kept = f" of DeepSeek-V3's {FULL.num_experts}, in {groups}"
    if shape.hash_vocabulary is not None:
        kept = f", routed by a table of {shape.hash_vocabulary} token ids, top-{shape.top_k}"
    layers = ", ".join(map(str, shape.layers))
    size = f"{amount(total)} in {now() - start:.1f} s"
    screen.fact("checkpoint", f"{directory}: layer {layers}, {shape.num_experts} experts{kept}, {size}")
    return OK


def inspect(screen: Screen, facts: CheckpointFacts, *, as_json: bool) -> int:
    """Print the contents of a checkpoint; exit code 1 if it has defects."""
    if as_json:
        print_json(facts.as_dict())
    else:
        show_checkpoint(screen, facts)
        screen.fact("verdict", "sound" if facts.sound else "not usable")
    return OK if facts.sound else MISMATCH


def show_checkpoint(screen: Screen, facts: CheckpointFacts) -> None:
    """Print the contents of a checkpoint."""
    block = f", FP8 blocks {facts.block[0]}x{facts.block[1]}" if facts.block else ""
    files = f"{facts.num_files} {'file' if facts.num_files == 1 else 'files'}"
    size = f"{files}, {facts.num_tensors} tensors, {amount(facts.num_bytes)}"
    screen.fact("checkpoint", f"{facts.where}: {facts.model_type or 'no config.json'}{block}, {size}")
    for layer in facts.layers:
        screen.fact(f"layer {layer.layer}", _described(layer))
    for problem in (*facts.problems, *(p for layer in facts.layers for p in layer.problems)):
        screen.fact("problem", problem)


def _described(layer: LayerFacts) -> str:
    scales = f" with {layer.scale_dtype} scales" if layer.scale_dtype else ""
    choice = "with a gate bias" if layer.has_gate_bias else "no gate bias"
    return ", ".join(
        [
            f"{layer.num_experts} experts",
            *[f"{layer.num_zero_experts} more without weights"] * bool(layer.num_zero_experts),
            f"hidden {layer.hidden_size}",
            f"intermediate {layer.intermediate_size}",
            f"shared {layer.shared_intermediate_size}",
            f"{layer.dtype}{scales}",
            choice if layer.table is None else f"routed by a table of {layer.table[0]} token ids",
            f"{layer.convention} names",
            amount(layer.num_bytes),
        ]
    )


def config_problems(path: str | PathLike[str], facts: CheckpointFacts) -> list[str]:
    """Why the layers of a checkpoint cannot be built from its config.json or metadata, or what the two contradict."""
    if not facts.model_type:
        return []
    found: dict[str, None] = {}
    for each in facts.layers:
        try:
            config = config_of(path, each.layer)
        except ConfigError as problem:
            found[str(problem)] = None
            continue
        model = config.model
        pairs = {
            "experts": (model.num_experts, each.num_experts), "hidden size": (model.hidden_size, each.hidden_size),
            "intermediate size": (model.moe_intermediate_size, each.intermediate_size),
            "shared intermediate size": (model.shared_size, each.shared_intermediate_size),
            "latent size": (model.latent_size, each.latent_size),
            "gated": (model.gated, each.gated), "gate of the shared experts": (model.shared_gate, each.has_shared_gate),
            "format": (model.quant.weights, model.quant.weights if is_gguf(path) else each.kind),
        }  # fmt: skip
        if each.table is None and not is_gguf(path):
            pairs |= {
                "bias for selection": (config.router.has_correction_bias, each.has_gate_bias),
                "bias of the router's logits": (config.router.has_logit_bias, each.has_logit_bias),
                "biases of experts": (model.expert_bias, each.has_expert_bias),
            }
        for what, (by_config, by_tensors) in pairs.items():
            if by_config != by_tensors and each.kind:
                text = f"the configuration states {by_config}, the tensors of layer {each.layer} have {by_tensors}"
                found[f"{what}: {text}"] = None
        if not is_gguf(path) and (text := scales_contradict(model.quant, each.has_input_scales)):
            found[f"layer {each.layer}: {text}"] = None
    return list(found)


def router_keys(hf: Mapping[str, Any], where: str, layer: int | None = None) -> dict[str, tuple[Any, str]]:
    """The router's settings as read, each with its key in a config.json or the family whose default it is.

    layer: the one to describe, of an equation with others for other layers.
    """
    if KEY in hf:
        router = settings_from_hf(hf, where, layer)["router"]
        return {ours: (router[ours], FILE) for ours in _READ_BY_ROUTERS if ours in router}
    hf = text_of(hf)
    family, router = family_of(hf), settings_from_hf(hf, where, first_layer(hf))["router"]
    hf = renamed(hf, family)[0]
    return {
        ours: (router[ours], key if hf.get(key) is not None else f"default of {family}")
        for ours, key in _READ_BY_ROUTERS.items()
    }


def reading_of(config: MoEConfig, path: str | PathLike[str], layer: int | None = None) -> str:
    """One line on how the router of a checkpoint was read: each value, and its key, default or setting."""
    if is_gguf(path):
        source, router = GgufSource(path), type(config.router).model_fields
        keys = router_keys(hf_from_gguf(source.metadata, str(path), source.names(), router), str(path))
        origin = "metadata"
    else:
        root = Path(path)
        keys, origin = router_keys(read_config(root / "config.json" if root.is_dir() else root), str(path), layer), ""
    used = config.router.model_dump()
    named = {"scoring_func": "scores", "num_expert_group": "groups", "topk_group": "kept",
             "renormalize": "renormalised", "routed_scaling_factor": "scale"}  # fmt: skip
    return ", ".join(
        f"{named[ours]} {used[ours]} ({origin or key if used[ours] == value else 'setting'})"
        for ours, (value, key) in keys.items()
    )
