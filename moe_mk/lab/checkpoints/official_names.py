"""The weights of a layer as a state dict under the names of DeepSeek-V3's checkpoints."""

from __future__ import annotations

from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.names import OFFICIAL, Part, Role


def official_state_dict(weights: LayerWeights, prefix: str = "") -> dict[str, Tensor]:
    """All tensors under their official names, as views. Loading them again gives equal weights.

    prefix: the part of names before "experts.0...", for instance "model.layers.3.mlp.".
    Raises ConfigError for a tensor-parallel shard, because official names denote whole tensors.
    """
    if weights.facts.tp_size != 1:
        raise ConfigError(
            f"these weights are shard {weights.facts.tp_rank} of {weights.facts.tp_size}, and an official name stands "
            "for a whole tensor; load with tp_size=1"
        )
    if any(q.scheme.family in ("wna16", "gguf") for slot in weights.experts.slots for q in slot.matrices.values()):
        raise ConfigError(
            f"official names hold no packed {weights.experts.scheme.name} experts; `moe-mk convert` writes them"
        )
    out = {OFFICIAL.spell(Part(Role.ROUTER)): weights.gate_EH}
    if weights.bias_E is not None:
        out[OFFICIAL.spell(Part(Role.BIAS))] = weights.bias_E
    if weights.shared_gate_H is not None:
        out[OFFICIAL.spell(Part(Role.SHARED_GATE))] = weights.shared_gate_H[None]
    for which, projection in zip(("down", "up", "norm"), weights.latent or (), strict=False):
        out[OFFICIAL.spell(Part(Role.LATENT, which))] = projection
    for which, weight_H in zip(("experts", "router"), weights.input_norm or (), strict=False):
        out[OFFICIAL.spell(Part(Role.INPUT_NORM, which))] = weight_H
    if weights.expert_scale_E is not None:
        out[OFFICIAL.spell(Part(Role.EXPERT_SCALE))] = weights.expert_scale_E
    if weights.image_bias_E is not None:
        out[OFFICIAL.spell(Part(Role.IMAGE_BIAS))] = weights.image_bias_E
    if weights.table_XK is not None:
        out[OFFICIAL.spell(Part(Role.TABLE))] = weights.table_XK
    for index, expert in enumerate(weights.facts.owned):
        out |= _named(weights.experts.slot(index), Role.EXPERT, expert)
    if (shared := weights.shared_read) is not None:
        out |= _named(shared, Role.SHARED, None)
    return {prefix + name: tensor for name, tensor in out.items()}


def _named(slot: SlotWeights, role: Role, expert: int | None) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for projection, q in slot.matrices.items():
        out[OFFICIAL.spell(Part(role, projection, expert))] = q.values
        if q.scales is not None:
            out[OFFICIAL.spell(Part(role, projection, expert, "scale"))] = q.scales
    return out
