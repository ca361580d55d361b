"""From the `quantization_config` of a `config.json` to our settings: one reader for each way of saying it.

Key names as of DeepSeek-V3 and DeepSeek-V4 (fp8), gpt-oss (mxfp4), compressed-tensors 0.12 (W8A8) and NVIDIA modelopt
(NVFP4, MXFP8, FP8 of whole tensors). Static scales of activations lie beside the weights, see `weights.input_scales`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moe_mk.errors import ConfigError

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
            "in e4m3 with weight_block_size and dynamic activations, 'mxfp4', 'compressed-tensors' with 8 bits, and "
            "'modelopt' NVFP4, MXFP8 or FP8"
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


def _inside(group: object, key: str) -> object:
    return group.get(key) if isinstance(group, Mapping) else group


_READERS: Mapping[str, Callable[[Said], tuple[dict[str, Any], list[str]]]] = {
    "fp8": _fp8, "mxfp4": _mxfp4, "modelopt": _modelopt, "compressed-tensors": _compressed_tensors,
}  # fmt: skip
