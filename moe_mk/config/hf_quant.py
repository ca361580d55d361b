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
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from moe_mk.config.keys import is_empty, section_problems
from moe_mk.errors import ConfigError
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.grouped import GROUPS, kind_of

Said = Mapping[str, Any]
Found = tuple[dict[str, Any], list[str]]
_ROOTS = (
    "model.layers", "language_model.model.layers", "model.language_model.layers", "layers", "backbone.layers",
    "thinker.model.layers",
)  # fmt: skip
_BLOCKS = ("mlp", "ffn", "block_sparse_moe", "mixer", "feed_forward")
_PROJECTIONS = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
_SHARED = ("shared_experts", "shared_expert")
_ENDS = ("", *(f".{word}" for words in _PROJECTIONS for word in words))


def quant_from_hf(quant: object, where: str, hf: Said | None = None, layer: int | None = None) -> dict[str, Any]:
    """Settings of `model.quant`; raises ConfigError listing everything that is not supported.

    hf: the config.json, for its dtype and number of layers. layer: the layer to describe; None: the layers together.
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
            ignored = _ignored({} if reader is _mixed else quant, method, layers)
        except re.error as problem:
            settings, problems, ignored = {}, [f"a list of modules has an invalid expression: {problem}"], {}
        if not problems and (ignored["experts"] or settings.get("weights") is None):
            return {"weights": plain_kind(hf or {}, where)}
        if not problems and (ignored["shared_experts"] or settings.get("shared") == "plain"):
            settings["shared"] = plain_kind(hf or {}, where)
    if problems:
        raise ConfigError(
            f"{where}: quantization_config is not supported: {'; '.join(problems)}; supported is quant_method 'fp8' "
            "in e4m3, 'mxfp4', 'compressed-tensors' with 8 bits, packed integers or 4-bit floats, 'gptq', 'awq' of "
            "version 'gemm', 'auto-round' in their layouts, 'quark' MXFP4, FP8 or INT8, 'modelopt' NVFP4, MXFP8 or FP8"
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


def _matches(style: str, pattern: str, name: str) -> bool:
    if style == "part":
        return pattern in name
    if style in ("name", "quark") and pattern.startswith("re:"):
        return bool(re.match(pattern[3:], name))
    if style == "name":
        return pattern == name
    if style == "quark":
        return fnmatchcase(name, pattern)
    if style == "glob":
        return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
    return bool(re.match(pattern, name)) or name.endswith(pattern)


def _modules(layers: list[int], role: str) -> list[list[str]]:
    """The names that each projection of the experts of the layers may have; of routed experts those of the first."""
    roles = ("experts.0",) if role == "experts" else _SHARED
    return [
        [f"{root}.{n}.{block}.{role}.{w}" for root in _ROOTS for block in _BLOCKS for role in roles for w in words]
        for n in layers for words in _PROJECTIONS
    ]  # fmt: skip


def _covered(style: str, patterns: Iterable[str], layers: list[int], role: str) -> bool:
    """Whether the patterns name every projection of the experts of the layers.

    Patterns that name only some do not count: their tensors then do not fit the format, which the load reports.
    """
    patterns = tuple(patterns)
    return bool(patterns) and all(
        any(_matches(style, pattern, name) for pattern in patterns for name in names)
        for names in _modules(layers, role)
    )


def _ignored(quant: Said, method: str, layers: list[int]) -> dict[str, bool]:
    """Whether the lists of a section leave routed and shared experts as they are."""
    styles = {"compressed-tensors": "name", "modelopt": "glob", "quark": "quark"}
    style = {**styles, "awq": "part", "auto-round": "part"}.get(method, "start")
    inner = quant.get("quantization")
    found: list[str] = []
    for section in (quant, inner if isinstance(inner, Mapping) else {}):
        for key in ("ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers"):
            found += section.get(key) or ()
    return {role: _covered(style, found, layers, role) for role in ("experts", "shared_experts")}


def _others(section: Said, allowed: Mapping[str, tuple[object, ...]], title: str = "") -> list[str]:
    """The keys whose value is none of those allowed; null is allowed where None is, or the key is absent."""
    return [f"{title}{key} is {section.get(key)!r}" for key, fit in allowed.items() if section.get(key) not in fit]


def _fp8(quant: Said, layers: list[int]) -> Found:
    in_blocks = bool(quant.get("weight_block_size")) or quant.get("expert_dtype") == "fp4"
    problems = _others(quant, {
        "fmt": ("e4m3", "float8_e4m3fn", None), "scale_fmt": ("ue8m0", "float", None) if in_blocks else ("float", None),
        "activation_scheme": ("dynamic", None) if in_blocks else ("dynamic", "static"),
        "expert_dtype": ("fp4", "fp8", None),
    })  # fmt: skip
    if quant.get("expert_dtype") == "fp4":
        return {"weights": "mxfp4", "activations": "mxfp8", **_shared_fp8(quant)}, problems
    return {"weights": "fp8_block", **_blocks(quant)} if in_blocks else {"weights": "fp8_tensor"}, problems


def _blocks(quant: Said) -> dict[str, Any]:
    return {"block": quant["weight_block_size"], "scale": "ue8m0" if quant.get("scale_fmt") == "ue8m0" else "float32"}


def _shared_fp8(quant: Said) -> dict[str, Any]:
    """Shared experts that stay in the FP8 blocks of a section whose routed experts have four bits."""
    return {"shared": "fp8_block", **_blocks(quant)} if quant.get("weight_block_size") else {}


def _mixed(quant: Said, layers: list[int]) -> Found:
    """An FP8 checkpoint whose routed experts modelopt has quantised: DeepSeek-V4 in NVFP4."""
    _, problems = _fp8({**quant, "expert_dtype": quant.get("expert_dtype") or "fp4"}, layers)
    problems += _others(
        quant, {"quant_algo": ("MIXED_PRECISION",), "moe_quant_algo": ("NVFP4",), "group_size": (16, None)}
    )
    algorithm, more = _listed(quant, layers, "experts")
    problems += more if algorithm == "NVFP4" else [f"quantized_layers states {algorithm!r} for the experts", *more]
    if quant.get("config_groups") is not None:
        problems += _group_in(quant["config_groups"], layers, "NVFP4", 4, 16)[1]
    return {"weights": "nvfp4", **_shared_fp8(quant)}, problems


def _listed(quant: Said, layers: list[int], role: str) -> tuple[str | None, list[str]]:
    """The algorithm that quantized_layers states for all experts of a role, None for none, and what differs."""
    listed, inners = quant.get("quantized_layers") or {}, ("experts", "experts.0") if role == "experts" else _SHARED
    paths = [f"{block}.{inner}{end}" for block in _BLOCKS for inner in inners for end in _ENDS]
    algorithms, problems = dict[str | None, None](), list[str]()
    for layer in layers:
        found = [listed[name] for root in _ROOTS for path in paths if (name := f"{root}.{layer}.{path}") in listed]
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


def _mxfp4(quant: Said, layers: list[int]) -> Found:
    return {"weights": "mxfp4"}, []


_MODELOPT: Mapping[str | None, tuple[str, int, int | None]] = {
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), ("nvfp4", 4, 16)), "MXFP8": ("mxfp8", 8, 32),
    "FP8": ("fp8_tensor", 8, None),
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
    groups = quant.get("config_groups")
    if groups is None or is_mixed:  # what lists modules one by one decides
        return settings, problems
    group, more = _group_in(groups, layers, algorithm, bits, columns)
    if group is None:
        return {}, problems + more
    tokens = group.get("input_activations")
    settings["activations"] = "none" if is_empty(tokens) else "nvfp4" if kind == "nvfp4" else "auto"
    return settings, problems + more


def _group_in(
    groups: object, layers: list[int], algorithm: str, bits: int, columns: int | None
) -> tuple[Said | None, list[str]]:
    """The group of the routed experts, and where it is not of an algorithm with that many bits and columns a scale."""
    group, problems = _group_of(groups, layers)
    for title in ("weights", "input_activations") if group is not None else ():
        section = (group or {}).get(title) or {}
        for key, fitting in {"num_bits": bits, "type": "float", "group_size": columns}.items():
            if section.get(key) not in (None, fitting):
                problems.append(f"{title}.{key} is {section[key]!r}, {algorithm} has {fitting!r}")
    return group, problems


def _group_of(groups: object, layers: list[int]) -> tuple[Said | None, list[str]]:
    """The group of config_groups that the routed experts belong to; None if there is none.

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
    chosen: dict[str, Said | None] = {}
    for role in ("experts", "shared_experts"):
        by_name = [g for g in groups.values() if _covered("name", g.get("targets") or (), layers, role)]
        by_class = [g for g in groups.values() if "targets" not in g or "Linear" in (g.get("targets") or ())]
        fitting = by_name or by_class
        if len(fitting) > 1:
            return None, [f"config_groups has {len(fitting)} groups for {role}, one is expected"]
        chosen[role] = fitting[0] if fitting else None
    group = chosen["experts"]
    if group is not None and chosen["shared_experts"] is not group:
        problems.append("targets of config_groups give shared experts another format than routed ones")
    return group, problems


_IN_GROUPS = {
    "mxfp4-pack-quantized": ("mxfp4", 4, 32), "nvfp4-pack-quantized": ("nvfp4", 4, 16),
    "mxfp8-quantized": ("mxfp8", 8, 32),
}  # fmt: skip
_SCALES = {**dict.fromkeys(("mxfp4", "mxfp8"), ("torch.uint8", None)), "nvfp4": ("torch.float8_e4m3fn", None)}


def _compressed_tensors(quant: Said, layers: list[int]) -> Found:
    group, problems = _group_of(quant.get("config_groups"), layers)
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
        problems += _others(weights, held | rest, "weights.")
        problems += [] if is_empty(tokens) else _others(tokens or {}, held, "input_activations.")
        return {"weights": kind, "activations": "none" if is_empty(tokens) else kind}, problems
    if formats == {"pack-quantized"}:
        return _pack_quantized(weights, tokens)
    kind = "int8" if weights.get("type") == "int" else "fp8"
    eight = {"num_bits": (8,), "type": ("int", "float"), "symmetric": (True, None)}
    problems += _others(weights, eight | {"actorder": (None, False, "weight", "static")}, "weights.")
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
        settings["block"] = (128, 128) if weights.get("block_structure") is None else weights["block_structure"]
    if tokens is None:
        settings["activations"] = "none"
    elif tokens.get("num_bits") != 8 or tokens.get("type") != weights.get("type"):
        problems.append(f"input_activations are {tokens.get('num_bits')}-bit {tokens.get('type')!r}")
    else:
        problems += _others(tokens, {"symmetric": (True, None), "dynamic": (True, False, None)}, "input_activations.")
    return settings, problems


def _pack_quantized(weights: Said, tokens: object) -> Found:
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
    return settings, problems


def _integers(bits: object, columns: object, *, symmetric: bool) -> Found:
    if bits not in (4, 8) or type(columns) is not int or columns not in GROUPS:
        sizes = ", ".join(str(group) for group in GROUPS if group != WHOLE)
        return {}, [f"{bits!r} bits in groups of {columns!r} (supported are 4 and 8 bits in {sizes} or whole rows)"]
    assert isinstance(bits, int)
    return {"weights": kind_of(bits, columns, zeros=not symmetric)}, []


def _of_roles(layers: list[int], of: Callable[[list[str]], Found]) -> Found:
    """The settings of the experts from those of their modules, by names; none where they are left as they are."""
    found: dict[str, list[dict[str, Any]]] = {"experts": [], "shared_experts": []}
    problems: dict[str, None] = {}
    for role, formats in found.items():
        for settings, more in map(of, _modules(layers, role)):
            formats += [settings] * (settings not in formats)
            problems |= dict.fromkeys(more)
        if len(formats) > 1:
            problems[f"{role} have the formats {' and '.join(map(str, formats))}"] = None
    experts, shared = (formats[0] for formats in found.values())
    if shared == experts or not experts:
        return experts, list(problems)
    if shared.get("weights") == experts.get("weights"):
        problems[f"shared experts have {shared}, routed ones {experts}"] = None
    return {**experts, "shared": shared.get("weights", "plain")}, list(problems)


def _packed(module: Said, own: Said, *, zeros: bool = False) -> Found:
    """Integers in groups of one module. zeros: whether symmetric weights have zero points too."""
    module = {**module, **own}
    problems = section_problems(own, "module") + _others(module, {"act_bits": (16, None)})
    if own.get("bits") == 16:
        return {}, problems
    size, symmetric = module.get("group_size"), module.get("sym") is not False and not zeros
    settings, more = _integers(module.get("bits"), WHOLE if size == -1 else size, symmetric=symmetric)
    return settings, problems + more + _others(module, {"data_type": ("int", None)})


def _gptq(quant: Said, layers: list[int]) -> Found:
    rules = quant.get("dynamic") or {}

    def of(names: list[str]) -> Found:
        """By the first rule that fits; "-:" leaves a module as it is."""
        fits = (rule for rule in rules if any(re.match(re.sub("^[-+]:", "", rule), name) for name in names))
        rule = next(fits, "")
        own = {"bits": 16} if rule.startswith("-:") else rules.get(rule)
        return _packed(quant, own if isinstance(own, Mapping) else {})

    settings, problems = _of_roles(layers, of)
    named = {quant[key] for key in ("checkpoint_format", "format") if quant.get(key) is not None} or {"gptq"}
    stored, has_zeros = " and ".join(sorted(named)), settings.get("weights", "").endswith("_zp")
    if stored not in ("gptq", "gptq_v2") and (len(named) > 1 or has_zeros):
        problems.append(f"checkpoint_format is {stored!r} with zero points (supported are gptq and gptq_v2)")
    return {**settings, "gptq_v2": True} if stored == "gptq_v2" and has_zeros else settings, problems


def _awq(quant: Said, layers: list[int]) -> Found:
    gemm = ("gemm", "GEMM", None)
    settings, problems = _packed(quant, {}, zeros=True)
    problems += _others(quant, {"version": gemm, "format": gemm, "zero_point": (True, None), "bits": (4,)})
    return settings, problems


def _auto_round(quant: Said, layers: list[int]) -> Found:
    """Integers in the tensors of GPTQ or AWQ. `extra_config` states modules by name, or by an expression anywhere."""
    packing = str(quant.get("packing_format") or "auto_round:auto_gptq")
    stored, extra = packing.removeprefix("auto_round:").removeprefix("auto_"), quant.get("extra_config") or {}
    rules = [key for key in extra if "layers." not in key or set(key) & set("*+?^$()[]{}|\\")]
    blocks = quant.get("block_name_to_quantize") or quant.get("to_quant_block_names") or ()
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    starts = tuple(f"{each}." for part in blocks for each in (part if isinstance(part, list) else [part]))

    def of(names: list[str]) -> Found:
        inside = not starts or any(name.startswith(starts) for name in names)
        fits = (rule for rule in rules if extra[rule] and any(re.search(rule, name) for name in names))
        own = extra.get(next((name for name in names if name in extra), None) or next(fits, None), {})
        return _packed(quant, own if inside else {"bits": 16, **own}, zeros=stored == "awq")

    if stored not in ("gptq", "awq"):
        return {}, [f"packing_format is {packing!r} (supported are auto_round:auto_gptq and auto_round:auto_awq)"]
    settings, problems = _of_roles(layers, of)
    if stored == "awq":
        eight = [kind for kind in settings.values() if kind.startswith("int8")]
        problems += [f"packing_format is {packing!r} with {kind}, AWQ holds 4 bits" for kind in eight]
    return settings, problems


_QUARK: Mapping[object, tuple[str, Mapping[str, tuple[object, ...]]]] = {
    ("fp4", "per_group"): ("mxfp4", {"group_size": (32,), "scale_format": ("e8m0",), "ch_axis": (-1, 1)}),
    ("fp8_e4m3", "per_group"): ("mxfp8", {"group_size": (32,), "scale_format": ("e8m0",), "ch_axis": (-1, 1)}),
    ("fp8_e4m3", "per_tensor"): ("fp8_tensor", {}), ("fp8_e4m3", "per_channel"): ("fp8_channel", {"ch_axis": (0,)}),
    ("fp8_e4m3", "per_block"): ("fp8_block", {}), ("int8", "per_channel"): ("int8", {"ch_axis": (0,)}),
}  # fmt: skip
"""The kind of weights of a (dtype, qscheme) of Quark, and what else they must state."""


def _quark(quant: Said, layers: list[int]) -> Found:
    """The first of `layer_quant_config` that fits states a module, then its class, then `global_quant_config`."""
    written = {"weight_format": ("real_quantized", None), "pack_method": ("reorder", "order", None)}
    problems = _others(quant.get("export") or {}, written, "export.")
    algorithms = quant.get("algo_config") or []
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        problems += _others(each, {"name": ("awq", "gptq", "smooth", "autosmoothquant", "qronos")}, "algo_config.")
        if each.get("desc_act") and not each.get("static_groups"):
            problems.append("algo_config.desc_act is true without static_groups, which orders columns by activation")
    by_class, rules = quant.get("layer_type_quant_config") or {}, quant.get("layer_quant_config") or {}
    problems += [f"layer_type_quant_config is for {key}" for key in by_class if key not in ("Linear", "Embedding")]

    def of(names: list[str]) -> Found:
        fits = (rules[rule] for rule in rules if any(_matches("quark", rule, name) for name in names))
        return _of_quark(next(fits, by_class.get("Linear", quant.get("global_quant_config"))))

    settings, more = _of_roles(layers, of)
    return settings, problems + more


def _of_quark(stated: Any) -> Found:
    """The settings of one section of Quark; none for weights that are left as they are."""
    if is_empty(stated) or is_empty(stated.get("weight")):
        return {}, []
    weight, tokens = stated["weight"], stated.get("input_tensors") or {}
    if not (isinstance(weight, Mapping) and isinstance(tokens, Mapping)):
        return {}, [f"weight and input_tensors are {weight!r} and {tokens!r}, one scale each is supported"]
    problems = [*section_problems(stated, "quark module"), *section_problems(weight, "quark tensor")]
    if (key := (weight.get("dtype"), weight.get("qscheme"))) not in _QUARK:
        return {}, [*problems, f"weight.dtype is {key[0]!r} with qscheme {key[1]!r}, which is not supported"]
    kind, held = _QUARK[key]
    settings: dict[str, Any] = {"weights": kind, "activations": "auto" if tokens else "none"}
    problems += _others(weight, {"is_dynamic": (False, None), "symmetric": (True, None), **held}, "weight.")
    if kind == "fp8_block":
        settings["block"] = weight.get("block_size") or (128, 128)
    if not tokens:
        return settings, problems
    name, also = _QUARK.get((tokens.get("dtype"), tokens.get("qscheme")), ("", {}))
    if kind in ("mxfp4", "mxfp8"):
        settings["activations"] = name
        problems += _others(tokens, {"is_dynamic": (True,), **also}, "input_tensors.")
    fitting = {"mxfp4": name in ("mxfp4", "mxfp8"), "mxfp8": name == "mxfp8"}
    if not fitting.get(kind, tokens.get("dtype") == key[0]):
        problems.append(f"input_tensors are {tokens.get('dtype')} {tokens.get('qscheme')} with {kind} weights")
    problems += section_problems(tokens, "quark tensor")
    return settings, problems + _others(tokens, {"symmetric": (True, None)}, "input_tensors.")


_READERS: Mapping[str, Callable[[Said, list[int]], Found]] = {
    "fp8": _fp8, "mxfp4": _mxfp4, "modelopt": _modelopt, "compressed-tensors": _compressed_tensors, "gptq": _gptq,
    "awq": _awq, "auto-round": _auto_round, "quark": _quark,
}  # fmt: skip
