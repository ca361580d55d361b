"""From the `quantization_config` of a `config.json` to our settings: one reader for each way of saying it.

Key names as of DeepSeek-V3 and DeepSeek-V4 (fp8), gpt-oss (mxfp4), compressed-tensors 0.12 (W8A8)
and 0.20 (pack-quantized, as Kimi-K2-Thinking), AutoGPTQ 0.7, GPTQModel 5, AutoAWQ 0.2, AutoRound 0.12, AMD Quark 0.11
and NVIDIA modelopt (NVFP4, MXFP8, FP8 of whole tensors). Static activation scales are stored with the weights, see
`weights.input_scales`. Lists of modules are matched as their writers do: compressed-tensors by name or "re:", Quark by
glob or "re:", modelopt by glob, AutoAWQ and AutoRound by a part of the name, transformers by an expression at the start
or a name at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from moe_mk.config import hf_rules
from moe_mk.config.hf_rules import BLOCKS, PROJECTIONS, ROOTS, SHARED, Found, Said, others_of
from moe_mk.config.keys import is_empty, section_problems
from moe_mk.errors import ConfigError
from moe_mk.quant.blocked import WHOLE

_ENDS = ("", *(f".{word}" for words in PROJECTIONS for word in words))


def quant_from_hf(
    quant: object, where: str, hf: Said | None = None, layer: int | None = None, *, numbered: bool = False
) -> dict[str, Any]:
    """Settings of `model.quant`; raises ConfigError listing everything that is not supported.

    hf: the config.json, for its dtype and number of layers. layer: the layer to describe; None: the layers together.
    numbered: whether the model has w1, w2 and w3, and not gate_proj, down_proj and up_proj.
    """
    if not isinstance(quant, Mapping):
        raise ConfigError(f"{where}: quantization_config is a {type(quant).__name__}, expected a mapping")
    method = quant.get("quant_method")
    method = str(getattr(method, "value", method))  # transformers spells it as an enumeration
    reader = _mixed if method == "fp8" and "quant_algo" in quant else _READERS.get(method)
    layers = layers_with_experts(hf or {}, layer)
    settings: dict[str, Any] = {}
    if reader is None:
        problems = [f"quant_method is {quant.get('quant_method')!r}"]
    elif not (problems := section_problems(quant, "mixed" if reader is _mixed else method)):
        try:
            settings, problems = reader(quant, layers)
            # What a mixed section ignores is left in FP8, not in the dtype of the model.
            ignored, others = _ignored({} if reader is _mixed else quant, method, layers, numbered=numbered)
            problems += others
        except re.error as problem:
            settings, problems, ignored = {}, [f"a list of modules has an invalid expression: {problem}"], {}
        if not problems and (ignored["experts"] or settings.get("weights") is None):
            return {"weights": plain_kind(hf or {}, where)}
        if not problems and (ignored["shared_experts"] or settings.get("shared") == "plain"):
            settings["shared"] = plain_kind(hf or {}, where)
    if problems:
        raise ConfigError(
            f"{where}: quantization_config is not supported: {'; '.join(problems)}; supported is quant_method 'fp8' "
            "in e4m3, 'fbgemm_fp8', 'mxfp4', 'compressed-tensors' with 8 bits, packed integers or 4-bit floats, 'gptq' "
            "or 'awq' of version 'gemm', 'auto-round' in their layouts, 'quark' MXFP4, NVFP4, FP8 or INT8, 'modelopt' "
            "NVFP4, MXFP8 or FP8, and MLX's sections"
        )
    return settings


def plain_kind(hf: Said, where: str) -> str:
    """The kind of weights that are not quantised. Raises ConfigError for another dtype than a floating-point one."""
    stated = next((hf[key] for key in ("torch_dtype", "dtype") if hf.get(key) is not None), "bfloat16")
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    dtype = str(stated).removeprefix("torch.")
    if dtype not in names:
        raise ConfigError(f"{where}: dtype {dtype!r} is not one of {', '.join(names)}")
    return names[dtype]


def layers_with_experts(hf: Said, layer: int | None = None) -> list[int]:
    """The layer, or the first, the middle and the last layer with experts."""
    names = ("hybrid_override_pattern", "layers_block_type", "mlp_layer_types", "moe_layer_freq")
    kinds = next((hf[name] for name in names[: 2 if hf.get("first_k_dense_replace") else 4] if hf.get(name)), None)
    if layer is None and isinstance(kinds, str | list):
        found = [number for number, kind in enumerate(kinds) if kind in ("E", "moe", "sparse", 1)]
        return sorted({found[0], found[len(found) // 2], found[-1]}) if found else [0]
    count, first = (hf.get(key) for key in ("num_hidden_layers", "first_k_dense_replace"))
    first = first if isinstance(first, int) else 0
    if layer is not None or not isinstance(count, int) or count <= first:
        return [first if layer is None else layer]
    return sorted({first, (first + count) // 2, count - 1})


def _ignored(quant: Said, method: str, layers: list[int], *, numbered: bool) -> tuple[dict[str, bool], list[str]]:
    """Whether the lists of a section leave routed and shared experts as they are, and those that leave some of both."""
    styles = {"compressed-tensors": "name", "modelopt": "glob", "quark": "quark"}
    style = {**styles, "awq": "part", "auto-round": "part"}.get(method, "start")
    inner = quant.get("quantization")
    found: list[str] = []
    for section in (quant, inner if isinstance(inner, Mapping) else {}):
        for key in ("ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers"):
            found += section.get(key) or ()
    ignored = {role: hf_rules.covered(style, found, layers, role) for role in ("experts", "shared_experts")}
    # AWQ of models with gate_proj lists "gate" for the router too: what the tensors are decides.
    found = [each for each in found if (style, each) != ("part", "gate")]
    partly = {role: hf_rules.some_named(style, found, layers, role, numbered=numbered) for role in ignored}
    return ignored, [f"{role}: {text}" for role, text in partly.items() if text and method != "compressed-tensors"]


def _fp8(quant: Said, layers: list[int]) -> Found:
    in_blocks = bool(quant.get("weight_block_size")) or quant.get("expert_dtype") == "fp4"
    problems = others_of(quant, {
        "fmt": ("e4m3", "float8_e4m3fn", None), "scale_fmt": ("ue8m0", "float", None) if in_blocks else ("float", None),
        "activation_scheme": ("dynamic", None) if in_blocks else ("dynamic", "static"),
        "expert_dtype": ("fp4", "fp8", None),
    })  # fmt: skip
    if quant.get("expert_dtype") == "fp4":
        return {"weights": "mxfp4", "activations": "mxfp8", **_shared_fp8(quant)}, problems
    if in_blocks:
        return {"weights": "fp8_block", **_blocks(quant)}, problems
    return {"weights": "fp8_tensor", "activation_scales": quant.get("activation_scheme")}, problems


def _blocks(quant: Said) -> dict[str, Any]:
    return {"block": quant["weight_block_size"], "scale": "ue8m0" if quant.get("scale_fmt") == "ue8m0" else "float32"}


def _shared_fp8(quant: Said) -> dict[str, Any]:
    """Shared experts that stay in the FP8 blocks of a section whose routed experts have four bits."""
    return {"shared": "fp8_block", **_blocks(quant)} if quant.get("weight_block_size") else {}


def _mixed(quant: Said, layers: list[int]) -> Found:
    """An FP8 checkpoint whose routed experts modelopt has quantised: DeepSeek-V4 in NVFP4."""
    _, problems = _fp8({**quant, "expert_dtype": quant.get("expert_dtype") or "fp4"}, layers)
    problems += others_of(
        quant, {"quant_algo": ("MIXED_PRECISION",), "moe_quant_algo": ("NVFP4",), "group_size": (16, None)}
    )
    algorithm, more = _listed(quant, layers, "experts")
    problems += more if algorithm == "NVFP4" else [f"quantized_layers states {algorithm!r} for the experts", *more]
    if quant.get("config_groups") is not None:
        problems += _group_in(quant["config_groups"], layers, "NVFP4", 4, 16)[1]
    return {"weights": "nvfp4", **_shared_fp8(quant)}, problems


def _listed(quant: Said, layers: list[int], role: str) -> tuple[str | None, list[str]]:
    """The algorithm that quantized_layers states for all experts of a role, None for none, and what differs."""
    listed, inners = quant.get("quantized_layers") or {}, ("experts", "experts.0") if role == "experts" else SHARED
    paths = [f"{block}.{inner}{end}" for block in BLOCKS for inner in inners for end in _ENDS]
    algorithms, problems = dict[str | None, None](), list[str]()
    for layer in layers:
        found = [listed[name] for root in ROOTS for path in paths if (name := f"{root}.{layer}.{path}") in listed]
        for each in found or [{}]:
            more = sorted(key for key in each.keys() - {"quant_algo", "group_size"} if not is_empty(each[key]))
            problems += [f"quantized_layers states {key}={each[key]!r} for {role}" for key in more]
            algorithm = None if is_empty(each.get("quant_algo")) else str(each["quant_algo"])
            algorithms[algorithm], columns = None, _MODELOPT[algorithm][2] if algorithm in _MODELOPT else None
            if not is_empty(size := each.get("group_size")) and size != columns:
                problems.append(f"quantized_layers states group_size {size!r} for {role}")
    if len(algorithms) > 1:
        problems.append(f"quantized_layers states {' and '.join(map(str, algorithms))} for {role}")
    return next(iter(algorithms), None), problems


_MODELOPT: Mapping[str | None, tuple[str, int, int | None]] = {
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), ("nvfp4", 4, 16)), "MXFP8": ("mxfp8", 8, 32),
    "FP8": ("fp8_tensor", 8, None), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_channel", 8, None),
}  # fmt: skip
"""(kind, bits, columns of a scale) of its algorithms; W4A16: activations stay as they are."""


def _modelopt(quant: Said, layers: list[int]) -> Found:
    inner = quant.get("quantization")
    inner = inner if isinstance(inner, Mapping) else {}
    problems = section_problems(inner, "modelopt")
    stated = {section["quant_algo"] for section in (quant, inner) if isinstance(section.get("quant_algo"), str)}
    algorithm, settings = ", ".join(sorted(stated)) or None, dict[str, Any]()
    if is_mixed := algorithm == "MIXED_PRECISION":
        quant = {"quantized_layers": inner.get("quantized_layers"), **quant}
        (algorithm, more), (shared, others) = (_listed(quant, layers, role) for role in ("experts", "shared_experts"))
        problems += more + others
        if shared not in (algorithm, "MXFP8", None):
            problems.append(f"quantized_layers states {shared!r} for shared experts")
        if algorithm is None and shared is None and quant["quantized_layers"]:  # a layer that is not listed
            return {}, problems
        settings = {} if shared == algorithm else {"shared": "mxfp8" if shared else "plain"}
    if algorithm is None or algorithm not in _MODELOPT:
        return {}, [*problems, f"quant_algo is {algorithm!r}"]
    kind, bits, columns = _MODELOPT[algorithm]
    for section in () if is_mixed else (quant, inner):
        if columns is not None and section.get("group_size") not in (None, columns):
            problems.append(f"group_size is {section['group_size']}, {algorithm} has {columns}")
    settings |= {"weights": kind} | ({"activations": "none"} if algorithm.startswith("W4A16") else {})
    settings |= {"activation_scales": "static"} if algorithm == "FP8" else {}
    groups = quant.get("config_groups")
    if groups is None or is_mixed:  # what lists modules one by one decides
        return settings, problems
    group, more = _group_in(groups, layers, algorithm, bits, columns)
    if group is None:
        return {}, problems + more
    tokens = group.get("input_activations")
    settings["activations"] = "none" if is_empty(tokens) else "nvfp4" if kind == "nvfp4" else "auto"
    scales, others = hf_rules.scales_of(kind, tokens)
    return settings | scales, problems + more + others


def _group_in(
    groups: object, layers: list[int], algorithm: str, bits: int, columns: int | None
) -> tuple[Said | None, list[str]]:
    """The group of the experts, and where it is not of an algorithm with that many bits and columns a scale."""
    modules = [*hf_rules.modules(layers, "experts"), *hf_rules.modules(layers, "shared_experts")]
    group, problems = _group_of(groups, modules[0])
    if not problems and any(_group_of(groups, names)[0] is not group for names in modules):
        problems.append("targets of config_groups give some projections of the experts another format than others")
    for title in ("weights", "input_activations") if group is not None else ():
        section = (group or {}).get(title) or {}
        for key, fitting in {"num_bits": bits, "type": "float", "group_size": columns}.items():
            if section.get(key) not in (None, fitting):
                problems.append(f"{title}.{key} is {section[key]!r}, {algorithm} has {fitting!r}")
    return group, problems


def _group_of(groups: object, names: list[str]) -> tuple[Said | None, list[str]]:
    """The group of config_groups that a module belongs to, by the names that it may have; None if there is none.

    Names and expressions come before the class of a module, as in compressed-tensors.
    """
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(each, Mapping) for each in groups.values()):
        return None, [f"config_groups has no groups but {groups!r}, one is expected"]
    kinds = ("group", ""), ("weights", "weights"), ("weights", "input_activations")
    parts = [(kind, group.get(key) if key else group) for group in groups.values() for kind, key in kinds]
    problems = [each for kind, part in parts if isinstance(part, Mapping) for each in section_problems(part, kind)]
    weights = [found for group in groups.values() if isinstance(found := group.get("weights"), Mapping)]
    stated = [found["dynamic"] for found in weights if found.get("dynamic") not in (None, False)]
    problems += [f"weights.dynamic is {value!r}, weights with stored scales are supported" for value in stated]
    if problems:
        return None, problems
    by_name = [g for g in groups.values() if hf_rules.named("name", g.get("targets") or (), names)]
    by_class = [g for g in groups.values() if "targets" not in g or "Linear" in (g.get("targets") or ())]
    fitting = by_name or by_class
    if len(fitting) > 1:
        return None, [f"config_groups has {len(fitting)} groups for {names[0]}, one is expected"]
    others = [] if fitting else [each for g in groups.values() for each in g["targets"] or () if _BLOCK.match(each)]
    problems = [f"targets has {each!r}; names, expressions and 'Linear' are read, no other classes" for each in others]
    return next(iter(fitting), None), problems


_BLOCK = re.compile(r"[A-Z]\w*(?:MoE|Moe|MoeBlock|MLP|Experts?)$")
"""A class of modules that may hold experts."""
_IN_GROUPS = {
    "mxfp4-pack-quantized": ("mxfp4", 4, 32), "nvfp4-pack-quantized": ("nvfp4", 4, 16),
    "mxfp8-quantized": ("mxfp8", 8, 32),
}  # fmt: skip
_SCALES = {**dict.fromkeys(("mxfp4", "mxfp8"), ("torch.uint8", None)), "nvfp4": ("torch.float8_e4m3fn", None)}


def _compressed_tensors(quant: Said, layers: list[int]) -> Found:
    def of(names: list[str]) -> Found:
        is_ignored = hf_rules.named("name", quant.get("ignore") or (), names)
        return ({}, []) if is_ignored else _of_group(quant, *_group_of(quant.get("config_groups"), names))

    return hf_rules.of_roles(layers, of)


def _of_group(quant: Said, group: Said | None, problems: list[str]) -> Found:
    sparsity = quant.get("sparsity_config") or {}
    if not is_empty(sparsity) and sparsity.get("format") != "dense":
        problems.append(f"sparsity_config is {sparsity!r}, weights without sparsity are supported")
    if group is None or problems:
        return {}, problems
    weights, tokens = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        return {}, [f"the group of config_groups has weights {weights!r} and input_activations {tokens!r}"]
    formats = {each["format"] for each in (quant, group) if each.get("format") not in (None, "mixed-precision")}
    if len(formats) > 1:
        problems.append(f"format is {' and '.join(sorted(formats))}, which differ")
    if formats and (floats := _IN_GROUPS.get(next(iter(formats)))) is not None:
        kind, bits, size = floats
        held = {"num_bits": (bits,), "type": ("float",), "group_size": (size,), "symmetric": (True, None)}
        rest = {"strategy": ("group", "tensor_group"), "actorder": (None, False), "scale_dtype": _SCALES[kind]}
        problems += others_of(weights, held | rest, "weights.")
        problems += [] if is_empty(tokens) else others_of(tokens or {}, held, "input_activations.")
        scales, more = hf_rules.scales_of(kind, tokens)
        return {"weights": kind, "activations": "none" if is_empty(tokens) else kind, **scales}, problems + more
    if formats == {"pack-quantized"}:
        return _pack_quantized(weights, tokens)
    kind = "int8" if weights.get("type") == "int" else "fp8"
    eight = {"num_bits": (8,), "type": ("int", "float"), "symmetric": (True, None)}
    problems += others_of(weights, eight | {"actorder": (None, False, "weight", "static")}, "weights.")
    named = "int" if kind == "int8" else "float"
    problems += [f"format is {each!r}" for each in formats if each not in (f"{named}-quantized", "naive-quantized")]
    names = {"channel": "int8" if kind == "int8" else "fp8_channel", "block": f"{kind}_block"}
    if kind == "fp8":
        names["tensor"] = "fp8_tensor"
    strategy = weights.get("strategy")
    if not isinstance(strategy, str) or strategy not in names:
        problems.append(f"weights.strategy is {strategy!r}, not one of {', '.join(names)}")
        return {}, problems
    settings: dict[str, Any] = {"weights": names[strategy]}
    if strategy == "block":
        settings["block"] = [128, 128] if weights.get("block_structure") is None else weights["block_structure"]
    if tokens is None:
        settings["activations"] = "none"
    elif tokens.get("num_bits") != 8 or tokens.get("type") != weights.get("type"):
        problems.append(f"input_activations are {tokens.get('num_bits')}-bit {tokens.get('type')!r}")
    else:
        problems += others_of(tokens, {"symmetric": (True, None), "dynamic": (True, False, None)}, "input_activations.")
    return settings | hf_rules.scales_of(settings["weights"], tokens)[0], problems


def _pack_quantized(weights: Said, tokens: object) -> Found:
    """Integers in groups. actorder "weight" or "static" leaves the order of columns in the file."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    columns = WHOLE if strategy == "channel" else size
    symmetric = weights.get("symmetric") in (True, None)
    settings, problems = hf_rules.integers(weights.get("num_bits"), columns, symmetric=symmetric)
    if weights.get("type", "int") != "int":
        problems.append(f"weights.type is {weights.get('type')!r} in format 'pack-quantized'")
    if strategy not in ("group", "channel"):
        problems.append(f"weights.strategy is {strategy!r}, not one of group, channel")
    if weights.get("actorder") in (True, "group", "dynamic"):
        problems.append(f"weights.actorder is {weights.get('actorder')!r}, which permutes columns of every expert")
    if tokens is not None:
        problems.append(f"input_activations are {tokens!r} with packed integers")
    return settings, problems


_READERS: Mapping[str, Callable[[Said, list[int]], Found]] = {
    "fp8": _fp8, "mxfp4": lambda quant, layers: ({"weights": "mxfp4"}, []), "modelopt": _modelopt,
    "fbgemm_fp8": lambda quant, layers: ({"weights": "fp8_channel", "activation_scales": "dynamic"}, []),
    "compressed-tensors": _compressed_tensors, "gptq": hf_rules.gptq, "awq": hf_rules.awq,
    "auto-round": hf_rules.auto_round, "quark": hf_rules.quark, "mlx": hf_rules.mlx,
}  # fmt: skip
