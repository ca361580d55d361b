"""What a layer's parts are built from, translated out of its settings."""

from __future__ import annotations

from collections.abc import Mapping

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.router.router import Router
from moe_mk.weights.layer_spec import LayerSpec


def with_sizes(config: MoEConfig, sizes: Mapping[str, int]) -> MoEConfig:
    """The config with the sizes of the groups; what it states must be what they are."""
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
    """The config of the same layer over the ranks of a map; one that no setting can state is stated as linear."""
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


def router_of(config: MoEConfig) -> Router:
    """The router that the config describes."""
    settings = config.router
    return Router(
        top_k=settings.top_k,
        num_expert_group=settings.num_expert_group,
        topk_group=settings.topk_group,
        scoring_func=settings.scoring_func,
        renormalize=settings.renormalize,
        routed_scaling_factor=settings.routed_scaling_factor,
        router_dtype=settings.router_dtype,
    )


def layer_spec_of(config: MoEConfig) -> LayerSpec:
    """What a checkpoint must hold for the layer."""
    model = config.model
    return LayerSpec(
        num_experts=model.num_experts,
        hidden_size=model.hidden_size,
        intermediate_size=model.moe_intermediate_size,
        scheme=model.quant.weight_scheme,
        num_shared_experts=model.num_shared_experts,
        shared_intermediate_size=model.shared_size,
        has_gate_bias=config.router.has_correction_bias,
        has_expert_bias=model.expert_bias,
        has_logit_bias=config.router.has_logit_bias,
        table=None if config.router.hash_vocabulary is None else (config.router.hash_vocabulary, config.router.top_k),
    )
