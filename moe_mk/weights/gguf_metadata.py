"""The metadata of GGUF files in the keys of a transformers `config.json`.

Architectures and keys as of llama.cpp and the `gguf` package 0.19: deepseek2 (DeepSeek V2 and V3, Kimi-K2), qwen3moe,
llama (Mixtral), gpt-oss. The types of experts differ between layers and are read with them. What a file leaves out is
what llama.cpp assumes or what the tensors imply; keys that older files lack although the model has the value are an
error, unless the caller states the setting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from moe_mk.config.keys import GGUF, unread_keys
from moe_mk.errors import ConfigError
from moe_mk.registry import did_you_mean
from moe_mk.weights.gguf_source import Value

Metadata = Mapping[str, Value]
SOFTMAX, SIGMOID = 1, 2
"""Of `expert_gating_func`."""
KEYS = {
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
FAMILIES = {
    # architecture: (model_type, experts, width of an expert in config.json, in the file, gating functions)
    "deepseek2": ("deepseek_v3", "n_routed_experts", "moe_intermediate_size", "expert_feed_forward_length", (1, 2)),
    "qwen3moe": ("qwen3_moe", "num_experts", "moe_intermediate_size", "expert_feed_forward_length", (1,)),
    "llama": ("mixtral", "num_local_experts", "intermediate_size", "feed_forward_length", (1,)),
    "gpt-oss": ("gpt_oss", "num_local_experts", "intermediate_size", "expert_feed_forward_length", (3,)),
}
_GROUPS = {(256, 7168): (8, 4), (384, 7168): (1, 1), (160, 5120): (8, 3), (64, 2048): (1, 1)}
"""(groups, groups kept) by (experts, hidden size) of DeepSeek-V3 and R1, Kimi-K2, DeepSeek-V2, and -V2-Lite and
Moonlight, as n_group and topk_group of their config.json.

The loader of llama.cpp reads both keys as optional and routes over all experts without them, which differs from the
models of the first and the third entry.
Source: `load_hparams` in src/llama-model.cpp (github.com/ggml-org/llama.cpp), config.json of the models.
"""


def hf_from_gguf(
    metadata: Metadata, where: str, names: Iterable[str] = (), overrides: Collection[str] = ()
) -> dict[str, Any]:
    """The keys of a config.json. names: of the tensors. overrides: settings that the caller states.

    Raises ConfigError for another architecture, for keys that are missing and for keys that are not read.
    """
    architecture = str(metadata.get("general.architecture", ""))
    if architecture not in FAMILIES:
        raise ConfigError(
            f"{where}: no MoE layer is known for architecture {architecture!r}"
            f"{did_you_mean(architecture, tuple(FAMILIES))}"
        )
    model_type, experts, width, stored_width, functions = FAMILIES[architecture]
    stored = {**KEYS, experts: "expert_count", width: stored_width}
    own = {key.removeprefix(f"{architecture}."): v for key, v in metadata.items() if key.startswith(f"{architecture}.")}
    hf = {key: own[name] for key, name in stored.items() if name in own}
    if missing := [f"{architecture}.{stored[key]}" for key in (experts, width, "hidden_size") if key not in hf]:
        raise ConfigError(f"{where}: the metadata lacks {', '.join(missing)}; is this a MoE model?")
    function = own.get("expert_gating_func")
    function = None if type(function) is int and function == 0 else function  # 0: none is stated
    problems = unread_keys(own, {*stored.values(), "expert_gating_func"}, GGUF)
    if function is not None and (type(function) is not int or function not in functions):
        problems.append(f"expert_gating_func is {function!r}, {architecture} has {' or '.join(map(str, functions))}")
    if architecture == "deepseek2":
        model_type, more = _of_deepseek(hf, function, any(".exp_probs_b" in name for name in names), overrides)
        problems += more
    elif architecture == "qwen3moe":
        hf.setdefault("norm_topk_prob", True)  # llama.cpp renormalises all qwen3moe models
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    return {"model_type": model_type, "torch_dtype": "bfloat16", **hf}


def _of_deepseek(
    hf: dict[str, Any], function: Value | None, has_bias: bool, overrides: Collection[str]
) -> tuple[str, list[str]]:
    """The model_type of a deepseek2 file, and the problems of its router; completes hf."""
    problems = []
    if function is None:  # only layers with sigmoid scores have a bias
        function = SIGMOID if has_bias else SOFTMAX
    elif function == SOFTMAX and has_bias and "scoring_func" not in overrides:
        problems.append(
            "deepseek2.expert_gating_func is 1 (softmax), but the layers have a bias (exp_probs_b), which DeepSeek "
            "adds to sigmoid scores; state scoring_func='softmax' or 'sigmoid'"
        )
    sizes = (hf["n_routed_experts"], hf["hidden_size"])
    groups = _GROUPS.get(sizes) if not {"n_group", "topk_group"} & hf.keys() else None
    hf |= dict(zip(("n_group", "topk_group"), groups, strict=True)) if groups else {}
    if function != SIGMOID:
        hf |= {"topk_method": "group_limited_greedy"}
        hf.setdefault("norm_topk_prob", False)
    needed = {
        "n_shared_experts": ("num_shared_experts", "0 for none, DeepSeek-V3 has 1"),
        "n_group": ("num_expert_group", "1 for none, DeepSeek-V3 has 8 groups"),
        "topk_group": ("topk_group", "1 for none, DeepSeek-V3 keeps 4 groups"),
        "routed_scaling_factor": ("routed_scaling_factor", "DeepSeek-V3 has 2.5"),
        "norm_topk_prob": ("renormalize", "DeepSeek-V3 has true"),
    }
    for key, (setting, known) in needed.items():
        if key not in hf and setting not in overrides:
            problems.append(f"the metadata lacks deepseek2.{KEYS[key]}; state {setting}= ({known})")
        hf.setdefault(key, key == "norm_topk_prob" or 1)  # replaced by the setting
    return ("deepseek_v3" if function == SIGMOID else "deepseek_v2"), problems
