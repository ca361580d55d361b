"""From a transformers `config.json` to our settings: one table of names, families as rows.

Key names as of transformers 5.23 configurations of DeepSeek V2, V3 and V4, Kimi-K2, Qwen3-MoE, GLM-4.5, Mixtral and
gpt-oss. The first layers of DeepSeek-V4 have the sizes of the others and choose experts by token id: `router.hashed`.

From the `quantization_config` of a `config.json` to our settings: one reader for each way of saying it.

Key names as of DeepSeek-V3 and DeepSeek-V4 (fp8), gpt-oss (mxfp4), compressed-tensors 0.12 (W8A8)
and 0.20 (pack-quantized, as Kimi-K2-Thinking), AutoGPTQ 0.7, AutoAWQ 0.2 and NVIDIA modelopt
(NVFP4, MXFP8, FP8 of whole tensors). Static activation scales are stored with the weights, see `weights.input_scales`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moe_mk.errors import ConfigError
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.grouped import GROUPS, kind_of
from moe_mk.registry import did_you_mean

Said = Mapping[str, Any]


def quant_from_hf(quant: Said, where: str) -> dict[str, Any]:
    """Settings of `model.quant`; raises ConfigError listing everything that is not supported."""
    method = quant.get("quant_method")
    method = getattr(method, "value", method)  # transformers spells it as an enumeration
    reader = _READERS.get(str(method))
    settings, problems = reader(quant) if reader else ({}, [f"quant_method is {method!r}"])
    if problems:
        raise ConfigError(
            f"{where}: quantization_config is not supported: {'; '.join(problems)}; supported is quant_method 'fp8' "
            "in e4m3 with weight_block_size and dynamic activations, 'mxfp4', 'compressed-tensors' with 8 bits or "
            "packed integers, 'gptq', 'awq' of version 'gemm', and 'modelopt' NVFP4, MXFP8 or FP8"
        )
    return settings


def _fp8(quant: Said) -> tuple[dict[str, Any], list[str]]:
    only = {"fmt": "e4m3", "activation_scheme": "dynamic"}
    problems = [f"{key} is {quant[key]!r}" for key, value in only.items() if key in quant and quant[key] != value]
    if quant.get("expert_dtype") == "fp4":
        return {"weights": "mxfp4", "activations": "mxfp8"}, problems
    if quant.get("expert_dtype", "fp8") != "fp8":
        problems.append(f"expert_dtype is {quant['expert_dtype']!r}")
    if not quant.get("weight_block_size"):
        return {}, [*problems, "weight_block_size is not given"]
    scale = "ue8m0" if quant.get("scale_fmt") == "ue8m0" else "float32"
    return {"weights": "fp8_block", "block": quant["weight_block_size"], "scale": scale}, problems


def _mxfp4(quant: Said) -> tuple[dict[str, Any], list[str]]:
    del quant
    return {"weights": "mxfp4"}, []


def _modelopt(quant: Said) -> tuple[dict[str, Any], list[str]]:
    inner = quant.get("quantization")
    algorithm = quant.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
    known = {"NVFP4": "nvfp4", "MXFP8": "mxfp8", "FP8": "fp8_tensor"}
    if not isinstance(algorithm, str) or algorithm not in known:
        return {}, [f"quant_algo is {algorithm!r}"]
    return {"weights": known[algorithm]}, []


def _compressed_tensors(quant: Said) -> tuple[dict[str, Any], list[str]]:
    groups = quant.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return {}, [f"config_groups has {len(groups) if isinstance(groups, Mapping) else 'no'} groups, one is expected"]
    (group,) = groups.values()
    weights, tokens = (_inside(group, key) for key in ("weights", "input_activations"))
    if not isinstance(weights, Mapping) or not (tokens is None or isinstance(tokens, Mapping)):
        return {}, [f"the group of config_groups has weights {weights!r} and input_activations {tokens!r}"]
    if quant.get("format") == "pack-quantized" or _inside(group, "format") == "pack-quantized":
        return _pack_quantized(weights, tokens, quant.get("ignore"))
    problems = [
        f"weights.{key} is {weights.get(key)!r}"
        for key, allowed in (("num_bits", (8,)), ("type", ("int", "float")), ("symmetric", (True, None)))
        if weights.get(key) not in allowed
    ]
    kind = "int8" if weights.get("type") == "int" else "fp8"
    names = {"channel": "int8" if kind == "int8" else "fp8_channel", "block": f"{kind}_block"}
    if kind == "fp8":
        names["tensor"] = "fp8_tensor"
    strategy = weights.get("strategy")
    if not isinstance(strategy, str) or strategy not in names:
        problems.append(f"weights.strategy is {strategy!r}, not one of {', '.join(names)}")
        return {}, problems
    settings: dict[str, Any] = {"weights": names[strategy]}
    if strategy == "block":
        settings["block"] = weights.get("block_structure") or (128, 128)
    if tokens is None:
        settings["activations"] = "none"
    elif tokens.get("num_bits") != 8 or tokens.get("type") != weights.get("type"):
        problems.append(f"input_activations are {tokens.get('num_bits')}-bit {tokens.get('type')!r}")
    return settings, problems


def _pack_quantized(weights: Said, tokens: object, ignore: object) -> tuple[dict[str, Any], list[str]]:
    """Integers in groups. actorder "weight" or "static" leaves the order of columns in the file."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    columns = WHOLE if strategy == "channel" else size
    symmetric = weights.get("symmetric") in (True, None)
    settings, problems = _integers(weights.get("num_bits"), columns, symmetric=symmetric)
    if weights.get("type", "int") != "int":
        problems.append(f"weights.type is {weights.get('type')!r} in format 'pack-quantized'")
    if strategy not in ("group", "channel"):
        problems.append(f"weights.strategy is {strategy!r}, not one of group, channel")
    if weights.get("actorder") in (True, "group", "dynamic"):
        problems.append(f"weights.actorder is {weights.get('actorder')!r}, which permutes columns of every expert")
    if tokens is not None:
        problems.append(f"input_activations are {tokens!r} with packed integers")
    ignored = ignore if isinstance(ignore, list) else []
    if any("shared_expert" in str(pattern) for pattern in ignored):
        settings["shared"] = "bf16"
    return settings, problems


def _integers(bits: object, columns: object, *, symmetric: bool) -> tuple[dict[str, Any], list[str]]:
    if bits not in (4, 8) or columns not in GROUPS:
        sizes = ", ".join(str(group) for group in GROUPS if group != WHOLE)
        return {}, [f"{bits!r} bits in groups of {columns!r} (supported are 4 and 8 bits in {sizes} or whole rows)"]
    assert isinstance(bits, int) and isinstance(columns, int)
    return {"weights": kind_of(bits, columns, zeros=not symmetric)}, []


def _gptq(quant: Said) -> tuple[dict[str, Any], list[str]]:
    size = quant.get("group_size")
    symmetric = quant.get("sym") is not False
    settings, problems = _integers(quant.get("bits"), WHOLE if size == -1 else size, symmetric=symmetric)
    stored = quant.get("checkpoint_format", "gptq")
    if stored not in ("gptq", "gptq_v2") and not symmetric:
        problems.append(f"checkpoint_format is {stored!r} with zero points (supported are gptq and gptq_v2)")
    if stored == "gptq_v2" and not symmetric:
        settings["gptq_v2"] = True
    if quant.get("dynamic"):
        problems.append("dynamic gives modules formats of their own")
    return settings, problems


def _awq(quant: Said) -> tuple[dict[str, Any], list[str]]:
    size = quant.get("group_size")
    settings, problems = _integers(quant.get("bits"), WHOLE if size == -1 else size, symmetric=False)
    only: dict[str, tuple[object, ...]] = {"version": ("gemm", "GEMM"), "zero_point": (True,), "bits": (4,)}
    problems += [f"{key} is {quant[key]!r}" for key, fit in only.items() if key in quant and quant[key] not in fit]
    ignored = quant.get("modules_to_not_convert")
    if any("shared_expert" in str(pattern) for pattern in (ignored if isinstance(ignored, list) else [])):
        settings["shared"] = "bf16"
    return settings, problems


def _inside(group: object, key: str) -> object:
    return group.get(key) if isinstance(group, Mapping) else group


_READERS: Mapping[str, Callable[[Said], tuple[dict[str, Any], list[str]]]] = {
    "fp8": _fp8, "mxfp4": _mxfp4, "modelopt": _modelopt, "compressed-tensors": _compressed_tensors, "gptq": _gptq,
    "awq": _awq,
}  # fmt: skip


DEEPSEEK_LIKE = ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "dots1")
SOFTMAX_GROUPED = ("deepseek_v2",)
PLAIN_SOFTMAX = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
ONLY_EXPERTS = ("mixtral", "olmoe", "gpt_oss")
"""Without dense layers, so that `intermediate_size` is that of an expert."""
GPT_OSS = ("gpt_oss",)
DEEPSEEK_V4 = ("deepseek_v4",)
FAMILIES = (*DEEPSEEK_LIKE, *DEEPSEEK_V4, *SOFTMAX_GROUPED, *PLAIN_SOFTMAX, *GPT_OSS)


def settings_from_hf(hf: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate a parsed `config.json`; raises ConfigError naming what is missing or unknown."""
    family = str(hf.get("model_type", ""))
    if family == "kimi_k25" and isinstance(text := hf.get("text_config"), Mapping) and "text_config" not in text:
        return settings_from_hf(text, where)
    if family not in FAMILIES:
        raise ConfigError(f"{where}: no MoE layer is known for model_type {family!r}{did_you_mean(family, FAMILIES)}")
    return {"model": _model(hf, family, where), "router": _router(hf, family, where)}


def _model(hf: Mapping[str, Any], family: str, where: str) -> dict[str, Any]:
    if family == "qwen2_moe":
        raise ConfigError(f"{where}: qwen2_moe gates its shared expert (shared_expert_gate), which is not supported")
    activation = hf.get("hidden_act", "silu")
    width = "intermediate_size" if family in ONLY_EXPERTS else "moe_intermediate_size"
    clamped = {}
    if family in GPT_OSS:
        activation = "swiglu_oai"
        clamped = {"swiglu_limit": hf.get("swiglu_limit") or 7.0, "swiglu_alpha": hf.get("swiglu_alpha") or 1.702}
        clamped["expert_bias"] = True
    if family in DEEPSEEK_V4:
        activation, clamped = _v4_activation(hf, where)
    return {
        "name": family,
        **clamped,
        "hidden_size": _first(hf, where, "hidden_size"),
        "moe_intermediate_size": _first(hf, where, width),
        "num_experts": _first(hf, where, "n_routed_experts", "num_experts", "num_local_experts"),
        "num_shared_experts": hf.get("n_shared_experts") or 0,
        "activation": "gelu_tanh" if activation == "gelu_pytorch_tanh" else activation,
        "quant": _quant(hf, where),
    }


def _router(hf: Mapping[str, Any], family: str, where: str) -> dict[str, Any]:
    router: dict[str, Any] = {
        "top_k": _first(hf, where, "num_experts_per_tok"),
        "num_expert_group": hf.get("n_group") or 1,
        "topk_group": hf.get("topk_group") or 1,
        "renormalize": True if family in ("mixtral", *GPT_OSS) else _first(hf, where, "norm_topk_prob"),
        "routed_scaling_factor": hf.get("routed_scaling_factor") or 1.0,
    }
    if family in GPT_OSS:
        # The softmax over the chosen logits is that over all of them, renormalised.
        router |= {"scoring_func": "softmax", "has_logit_bias": True}
    elif family in DEEPSEEK_V4:
        router |= {"scoring_func": "sqrtsoftplus", "has_correction_bias": True}
    elif family in DEEPSEEK_LIKE:
        router |= {"scoring_func": "sigmoid", "has_correction_bias": True}
    else:
        router |= {"scoring_func": "softmax", "has_correction_bias": False}
    if family in SOFTMAX_GROUPED and hf.get("topk_method") == "greedy":
        router |= {"num_expert_group": 1, "topk_group": 1}
    stated = hf.get("scoring_func")
    if stated is not None and stated != router["scoring_func"]:
        raise ConfigError(f"{where}: scoring_func={stated!r} is not what {family} uses ({router['scoring_func']!r})")
    return router


def _v4_activation(hf: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """Clamped SwiGLU if the config has a limit, plain SwiGLU if it is 0 or absent."""
    stated, limit = hf.get("hidden_act", "silu"), hf.get("swiglu_limit")
    if stated != "silu":
        raise ConfigError(f"{where}: hidden_act={stated!r} is not what deepseek_v4 uses ('silu')")
    return ("swiglu_limit", {"swiglu_limit": limit}) if limit else ("silu", {})


def _quant(hf: Mapping[str, Any], where: str) -> dict[str, Any]:
    quant = hf.get("quantization_config")
    if not quant:
        dtype = str(hf.get("torch_dtype") or hf.get("dtype") or "bfloat16").removeprefix("torch.")
        names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        if dtype not in names:
            raise ConfigError(f"{where}: dtype {dtype!r} is not one of {', '.join(names)}")
        return {"weights": names[dtype]}
    if not isinstance(quant, Mapping):
        raise ConfigError(f"{where}: quantization_config is a {type(quant).__name__}, expected a mapping")
    # DeepSeek-V4 checkpoints give the dtype of experts next to the quantisation config, later ones inside it.
    expert_dtype = {"expert_dtype": hf["expert_dtype"]} if hf.get("expert_dtype") else {}
    return quant_from_hf({**expert_dtype, **quant}, where)


def _first(hf: Mapping[str, Any], where: str, *names: str) -> Any:
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    raise ConfigError(f"{where}: none of {', '.join(names)} is given; is this a MoE model?")
