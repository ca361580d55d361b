"""The metadata of GGUF files in the keys of a transformers `config.json`, and back.

Architectures and keys as of llama.cpp and the `gguf` package 0.19: deepseek2 (DeepSeek V2 and V3, Kimi-K2), qwen3moe,
llama (Mixtral), gpt-oss. The types of experts differ between layers and are read with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_mk.errors import ConfigError
from moe_mk.registry import did_you_mean

Metadata = Mapping[str, str | int | float | bool]
SIGMOID = 2
"""Of `expert_gating_func`; softmax is 1 or absent."""
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
}
_FAMILIES = {
    # architecture: (model_type, experts, width of an expert in config.json, in the file)
    "deepseek2": ("deepseek_v3", "n_routed_experts", "moe_intermediate_size", "expert_feed_forward_length"),
    "qwen3moe": ("qwen3_moe", "num_experts", "moe_intermediate_size", "expert_feed_forward_length"),
    "llama": ("mixtral", "num_local_experts", "intermediate_size", "feed_forward_length"),
    "gpt-oss": ("gpt_oss", "num_local_experts", "intermediate_size", "expert_feed_forward_length"),
}
ARCHITECTURES = {
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "deepseek_v32": "deepseek2", "kimi_k2": "deepseek2",
    "qwen3_moe": "qwen3moe", "mixtral": "llama", "gpt_oss": "gpt-oss",
}  # fmt: skip
"""The architecture of each model_type."""


def hf_from_gguf(metadata: Metadata, where: str) -> dict[str, Any]:
    """The keys of a config.json. Raises ConfigError for another architecture and for missing keys."""
    architecture = str(metadata.get("general.architecture", ""))
    if architecture not in _FAMILIES:
        raise ConfigError(
            f"{where}: no MoE layer is known for architecture {architecture!r}"
            f"{did_you_mean(architecture, tuple(_FAMILIES))}"
        )
    model_type, experts, width, stored_width = _FAMILIES[architecture]
    stored = {**_KEYS, experts: "expert_count", width: stored_width}
    found = {key: metadata.get(f"{architecture}.{name}") for key, name in stored.items()}
    hf = {key: value for key, value in found.items() if value is not None}
    if missing := [f"{architecture}.{stored[key]}" for key in (experts, width, "hidden_size") if key not in hf]:
        raise ConfigError(f"{where}: the metadata lacks {', '.join(missing)}; is this a MoE model?")
    if architecture == "deepseek2":
        sigmoid = metadata.get("deepseek2.expert_gating_func") == SIGMOID
        model_type = "deepseek_v3" if sigmoid else "deepseek_v2"
        hf.setdefault("norm_topk_prob", sigmoid)
    elif architecture == "qwen3moe":
        hf.setdefault("norm_topk_prob", True)  # llama.cpp renormalises all qwen3moe models
    return {"model_type": model_type, "torch_dtype": "bfloat16", **hf}


def gguf_from_hf(hf: Mapping[str, Any], where: str) -> tuple[str, dict[str, str | int | float | bool]]:
    """The architecture and the metadata of a config.json. Raises ConfigError for a model_type without architecture."""
    model_type = str(hf.get("model_type", ""))
    if model_type not in ARCHITECTURES:
        raise ConfigError(f"{where}: GGUF has no architecture for model_type {model_type!r}")
    architecture = ARCHITECTURES[model_type]
    _, experts, width, stored_width = _FAMILIES[architecture]
    out: dict[str, str | int | float | bool] = {}
    for key, name in {**_KEYS, experts: "expert_count", width: stored_width}.items():
        value = hf.get(key)
        if value is not None:
            out[f"{architecture}.{name}"] = float(value) if key == "routed_scaling_factor" else value
    if architecture == "deepseek2":
        out["deepseek2.expert_gating_func"] = 1 if model_type == "deepseek_v2" else SIGMOID
    return architecture, out
