"""A layer's settings: completed from a checkpoint, decided upon, and translated into the layer's parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from os import PathLike
from typing import Any

import torch

from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem
from moe_mk.config.router import TRAINING_KINDS
from moe_mk.errors import CheckpointWarning, ConfigError, ShapeError, WeightError, expect_kind
from moe_mk.experts.residency import ResidencyPool
from moe_mk.external.device import profile_here
from moe_mk.external.library import emulated, installed
from moe_mk.oracle import select
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.plain import plain
from moe_mk.router.hashed import HashRouter, ImageRouter
from moe_mk.router.router import ROUTERS, OwnRouter, Router
from moe_mk.weights.checkpoint import find_prefix
from moe_mk.weights.gguf_source import GgufSource, is_gguf, open_source
from moe_mk.weights.input_scales import calibrates, has_input_scales, read_input_scales, scales_contradict
from moe_mk.weights.inspect import inspect_checkpoint
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.names import CONVENTIONS, Convention, Part, Role
from moe_mk.weights.safetensors_header import TensorEntry
from moe_mk.weights.source import TensorSource


def expect_arguments(config: object, name: object, pool: object) -> None:
    """Raise ConfigError for arguments of a layer that are of other types."""
    expect_kind("config", config, MoEConfig)
    expect_kind("name", name, str)
    expect_kind("pool", pool, ResidencyPool, type(None))


def token_counts_of(given: Iterable[int], most: int) -> set[int]:
    """Numbers of tokens. Raises ShapeError for what is no number from 0 to `most`, before anything is allocated."""
    counts = set(given) if isinstance(given, Iterable) else {given}
    if wrong := [each for each in counts if not isinstance(each, Integral) or isinstance(each, bool) or each < 0]:
        raise ShapeError(f"warm_up got token_counts with {wrong}; give integers of at least 0")
    if beyond := [count for count in counts if count > most]:
        raise ShapeError(f"warm_up got T={max(beyond)} tokens, kernel.max_num_tokens={most}; raise the setting")
    return counts


def decide(config: MoEConfig, dtype: torch.dtype, device: torch.device) -> Decision:
    """Choose the backends for a layer on this machine. Raises ConfigError, or UnsupportedError with every reason."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"dtype {dtype} is not supported; use bfloat16, float16 or float32")
    return select(
        Problem(
            config=config,
            device=profile_here(device),
            dtype=plain(dtype),
            num_tokens=config.kernel.max_num_tokens,
            installed=installed(config.kernel.cache_dir),
            emulated=emulated(),
        )
    )


def hashed(config: MoEConfig, path: str | PathLike[str], layer: int, prefix: str | None = None) -> MoEConfig:
    """The config with the vocabulary of one layer's table, where the checkpoint has one; such a layer has no bias.

    Only read for families with such layers, recognised by scoring_func = sqrtsoftplus. Raises WeightError for a layer
    that the checkpoint does not have.
    """
    if config.router.scoring_func != "sqrtsoftplus" or config.router.hash_vocabulary is not None:
        return config
    tables = _entries(path, layer, prefix, lambda convention: convention.table)
    if not tables or len(tables[0].shape) != 2:
        return config
    return config.with_(hash_vocabulary=tables[0].shape[0], has_correction_bias=False)


def _entries(
    path: str | PathLike[str], layer: int, prefix: str | None, spell: Callable[[Convention], str]
) -> list[TensorEntry]:
    """List the entries of the files for one tensor of a layer, under any of its names."""
    source = open_source(path)
    prefix = find_prefix(source, layer) if prefix is None else prefix.replace("{N}", str(layer))
    spelled = {prefix + spell(convention) for convention in CONVENTIONS.values()}
    return [source.entry(name) for name in sorted(spelled.intersection(source.names()))]


def hash_router_of(config: MoEConfig, weights: LayerWeights, device: torch.device) -> HashRouter | ImageRouter | None:
    """Return the router by token ids on the layer's device; None for a layer that chooses by scores alone."""
    expect_kind("weights", weights, LayerWeights)
    router, table, bias_E = config.router, None, weights.image_bias_E
    if weights.table_XK is not None:
        table = HashRouter(
            weights.table_XK.to(device), router.scoring_func, router.renormalize, router.routed_scaling_factor
        )
    if bias_E is None or router.first_image_token is None:
        return table
    scores = router_of(config)
    assert isinstance(scores, Router), "others have no image tokens"
    return ImageRouter(scores, bias_E.to(device), router.first_image_token, table)


def calibrated(config: MoEConfig, path: str | PathLike[str], layer: int, prefix: str | None = None) -> MoEConfig:
    """The config with the input scales of one layer of a checkpoint, where it has any and a run uses them.

    A scale that the config states is kept, and with activations in the layer's dtype none is needed. FP8 gets one
    scale for tokens and one for the rows between the products. Formats with a global scale get the larger one for both,
    because their block scales cover the smaller one; without input scales they are weight-only. Every rank reads the
    scales of all experts, so that all ranks have the same settings. Raises WeightError for invalid scales, and where
    they are missing and such activations are stated. Warns where the configuration states others than the tensors.
    """
    quant, kernel = config.model.quant, config.kernel
    is_plain = kernel.activations == "plain" and kernel.wire in ("auto", "plain")
    if quant.input_scale is not None or quant.kind == "plain" or is_plain or is_gguf(path):
        return config
    source = open_source(path)
    if text := scales_contradict(quant, has_input_scales(source, layer, prefix)):
        warnings.warn(f"layer {layer} of {path}: {text}", CheckpointWarning, stacklevel=2)
    if not calibrates(quant):
        return config
    if (scales := read_input_scales(source, layer, prefix=prefix, shared=quant.shared == "same")) is None:
        if not quant.weight_scheme.has_global_scale:
            return config  # found token by token
        if quant.activations == quant.weights or kernel.activations == "checkpoint":
            raise WeightError(
                f"layer {layer} of {path} has no input scales (input_scale), and its activations are to be "
                f"{quant.weights.upper()}; state quant.input_scale, or use kernel.activations='plain'"
            )
        return config.with_(quant={**quant.model_dump(), "activations": "none"})
    if quant.weight_scheme.has_global_scale:
        found = {"input_scale": max(scales.tokens, scales.hidden)}
    else:
        found = {"input_scale": scales.tokens, "hidden_scale": scales.hidden}
    return config.with_(quant={**quant.model_dump(), **found})


def expect_calibrated(decision: Decision, source: TensorSource, layer: int, prefix: str | None) -> None:
    """Raise ConfigError where activations would have a global scale of 1 although the checkpoint stores input scales.

    And for arguments of `load` that are of other types.
    """
    if not hasattr(source, "names"):
        expect_kind("source", source, str, PathLike, Mapping, TensorSource)
    expect_kind("layer", layer, int)
    expect_kind("prefix", prefix, str, type(None))
    quant, compute = decision.problem.config.model.quant, decision.compute
    if quant.input_scale is not None or compute.family != quant.weights or not quant.weight_scheme.has_global_scale:
        return
    if read_input_scales(source, layer, prefix=prefix) is not None:
        raise ConfigError(
            f"layer {layer} of {source.where} has calibrated input scales, which the settings do not hold: build the "
            "layer by DeepseekV3MoE.from_checkpoint, or state quant.input_scale or kernel.activations='plain'"
        )


def with_sizes(config: MoEConfig, sizes: Mapping[str, int]) -> MoEConfig:
    """The config with the sizes of the groups. Raises ConfigError where it states other sizes."""
    stated = config.parallel.model_dump()
    wrong = [
        f"parallel.{key}={stated[key]} but the group has {size} {'rank' if size == 1 else 'ranks'}"
        for key, size in sizes.items()
        if stated[key] not in (1, size)
    ]
    if wrong:
        raise ConfigError("; ".join(wrong) + "; pass groups=ParallelGroups(...) of these sizes, or drop the setting")
    return config.with_(**sizes)


def for_ranks(config: MoEConfig, expert_map: ExpertMap) -> MoEConfig:
    """The config over the ranks of a map; placement is "linear" where no setting can express the map."""
    rows, num_experts, ranks = expert_map.experts_of_rank, expert_map.num_experts, expert_map.num_ranks
    placement: str | tuple[int, ...] = "linear"
    even = len({len(row) for row in rows}) == 1 and not expert_map.lost
    if even and rows != ExpertMap.linear(num_experts, ranks).experts_of_rank:
        placement = tuple(expert_map.physical_to_global())
    return config.with_(ep=ranks, placement=placement)


def expert_map_of(config: MoEConfig) -> ExpertMap:
    """The placement that the config names."""
    placement, num_experts, ranks = config.parallel.placement, config.model.num_experts, config.parallel.ep
    if placement == "linear":
        return ExpertMap.linear(num_experts, ranks)
    if placement == "round_robin":
        return ExpertMap.round_robin(num_experts, ranks)
    return ExpertMap.from_physical(placement, ranks, num_experts)


def router_of(config: MoEConfig) -> Router | OwnRouter:
    """The router that the config describes. Raises ConfigError for a `router.kind` that no distribution registers."""
    settings, num_experts = config.router, config.model.scored_experts
    if settings.kind != "topk" and settings.kind not in TRAINING_KINDS:
        return OwnRouter(ROUTERS[settings.kind](settings, num_experts), settings.top_k, num_experts)
    return Router(
        top_k=settings.top_k, num_expert_group=settings.num_expert_group, topk_group=settings.topk_group,
        scoring_func=settings.scoring_func, renormalize=settings.renormalize,
        routed_scaling_factor=settings.routed_scaling_factor, router_dtype=settings.router_dtype,
    )  # fmt: skip


def layer_spec_of(config: MoEConfig) -> LayerSpec:
    """Return the specification of the tensors that a checkpoint must hold for the layer."""
    model = config.model
    return LayerSpec(
        num_experts=model.num_experts, num_zero_experts=model.num_zero_experts,
        num_fused_shared_experts=model.num_fused_shared_experts, hidden_size=model.hidden_size,
        intermediate_size=model.moe_intermediate_size, scheme=model.quant.weight_scheme,
        down_scheme=None if model.quant.down is None else model.quant.down_scheme,
        shared_scheme=model.quant.shared_scheme, gptq_v2=model.quant.gptq_v2, gated=model.gated,
        has_shared_gate=model.shared_gate, latent_size=model.latent_size, has_latent_norm=model.latent_norm is not None,
        has_input_norm=model.input_norm is not None, has_expert_scale=config.router.has_expert_scale,
        has_image_bias=config.router.first_image_token is not None, stacks_transposed=model.stacks_transposed,
        num_shared_experts=model.num_shared_experts, shared_intermediate_size=model.shared_size,
        has_gate_bias=config.router.has_correction_bias, has_expert_bias=model.expert_bias,
        has_logit_bias=config.router.has_logit_bias,
        table=None if config.router.hash_vocabulary is None else (config.router.hash_vocabulary, config.router.top_k),
    )  # fmt: skip


def config_of(path: str | PathLike[str], layer: int | None = None, **overrides: Any) -> MoEConfig:
    """The config of a checkpoint: its config.json, or the metadata of a GGUF model.

    The types of experts in GGUF files differ between layers; `stated` reads them. Raises ConfigError or WeightError.
    """
    expect_kind("path", path, str, PathLike)
    expect_kind("layer", layer, int, type(None))
    if not is_gguf(path):
        return MoEConfig.from_hf(str(path), layer=layer, **overrides)
    from moe_mk.config.hf import settings_from_hf
    from moe_mk.weights.gguf_metadata import hf_from_gguf

    source = GgufSource(path)
    hf = hf_from_gguf(source.metadata, str(path), source.names(), overrides.keys())
    return MoEConfig.parse(settings_from_hf(hf, str(path)), str(path)).with_(**overrides)


def _types_of_gguf(config: MoEConfig, path: str | PathLike[str], layer: int) -> MoEConfig:
    if not is_gguf(path):
        return config
    facts = next((each for each in inspect_checkpoint(path).layers if each.layer == layer), None)
    if facts is None:
        find_prefix(open_source(path), layer)  # raises with the existing layers
    assert facts is not None
    if not facts.kind:
        raise WeightError(f"layer {layer} of {path}: {'; '.join(facts.problems)}")
    quant = {"weights": facts.kind, "down": facts.down or None}
    try:
        return config.with_(quant=quant, has_correction_bias=facts.has_gate_bias)
    except ConfigError as problem:
        raise ConfigError(f"layer {layer} of {path}: {problem}") from problem


def _shared_type(config: MoEConfig, path: str | PathLike[str], layer: int, prefix: str | None) -> MoEConfig:
    """The config with the type of shared experts that their tensors have, whatever lists of modules state."""
    quant = config.model.quant
    if not config.model.num_shared_experts or quant.kind == "plain" or is_gguf(path):
        return config
    held = _entries(path, layer, prefix, lambda convention: convention.spell(Part(Role.SHARED, "down")))
    found = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if "fp8" not in quant.weights:
        found[torch.float8_e4m3fn] = (
            quant.shared if quant.shared in ("mxfp8", "fp8_channel", "fp8_tensor") else "fp8_block"
        )
    packed = quant.shared if quant.shared in GROUPED else "same"
    shared = next((found[each.dtype] for each in held if each.dtype in found), packed)
    if shared == quant.shared:
        return config
    return config.with_(quant={**quant.model_dump(), "shared": shared})


def stated(config: MoEConfig, path: str | PathLike[str], layer: int, prefix: str | None = None) -> MoEConfig:
    """The config with what one layer of a checkpoint states: a table of experts by token id, scales, types.

    Values that the config states are kept. prefix: as of `load_layer`. Raises WeightError for a layer that the
    checkpoint does not have.
    """
    config = _shared_type(hashed(_types_of_gguf(config, path, layer), path, layer, prefix), path, layer, prefix)
    return calibrated(config, path, layer, prefix)
