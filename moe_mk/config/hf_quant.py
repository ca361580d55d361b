"""From the `quantization_config` of a `config.json` to our settings: one reader for each way of saying it.

Key names as of DeepSeek-V3 and DeepSeek-V4 (fp8), gpt-oss (mxfp4), compressed-tensors 0.12 (W8A8)
and 0.20 (pack-quantized, as Kimi-K2-Thinking), AutoGPTQ 0.7, GPTQModel 7.7, AutoAWQ 0.2, AutoRound 0.16, AMD Quark 0.13
and NVIDIA modelopt (NVFP4, MXFP8, FP8 of whole tensors). Static activation scales are stored with the weights, see
`weights.input_scales`. `config.modules` has the names of modules, and how the lists of each writer name them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moe_mk.config import hf_rules
from moe_mk.config.hf_rules import Found, Rules, Said, one_format, others_of
from moe_mk.config.keys import is_empty, section_problems
from moe_mk.config.modules import CLASSES, Block, Module, matcher, with_layers
from moe_mk.errors import ConfigError
from moe_mk.quant.blocked import WHOLE

LISTS = ("ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""The keys of lists of modules that are not quantised."""


def quant_from_hf(
    quant: object, where: str, hf: Said | None = None, layer: int | None = None, block: Block | None = None
) -> dict[str, Any]:
    """Settings of `model.quant`; raises ConfigError listing everything that is not supported.

    hf: the config.json, for its dtype and number of layers. layer: the layer to describe; None: the layers together.
    block: the names of the modules; None: those of DeepSeek-V3.
    """
    if not isinstance(quant, Mapping):
        raise ConfigError(f"{where}: quantization_config is a {type(quant).__name__}, expected a mapping")
    method = quant.get("quant_method")
    method = str(getattr(method, "value", method))  # transformers spells it as an enumeration
    is_mixed = method == "fp8" and ("quant_algo" in quant or not is_empty(quant.get("moe_quant_algo")))
    reader = _mixed if is_mixed else _READERS.get(method)
    block = with_layers(block or Block(), hf or {}, layer)
    settings: dict[str, Any] = {}
    if reader is None:
        problems = [f"quant_method is {quant.get('quant_method')!r}"]
    elif not (problems := section_problems(quant, "mixed" if reader is _mixed else method)):
        try:
            rules = reader(quant, block)
            if reader is not _mixed:  # what a mixed section ignores is left in FP8, not in the dtype of the model
                rules = rules.without(_left(quant, method, block))
            settings, problems = hf_rules.by_module(block, rules)
            problems += _named_elsewhere(quant, block)
        except re.error as problem:
            problems = [f"a list of modules has an invalid expression: {problem}"]
    if problems:
        raise ConfigError(
            f"{where}: quantization_config is not supported: {'; '.join(problems)}; supported is quant_method 'fp8' "
            "in e4m3, 'fbgemm_fp8', 'mxfp4', 'compressed-tensors' with 8 bits, packed integers or 4-bit floats, 'gptq' "
            "or 'awq' of version 'gemm', 'auto-round' in their layouts, 'quark' MXFP4, NVFP4, FP8 or INT8, 'modelopt' "
            "NVFP4, MXFP8 or FP8, and MLX's sections"
        )
    plain = plain_kind(hf or {}, where)
    if settings.get("shared") == "plain":
        settings["shared"] = plain
    return {"weights": plain, **settings}


def _left(quant: Said, method: str, block: Block) -> Callable[[Module], bool]:
    """Whether the lists of a section leave a module as it is."""
    styles = {"compressed-tensors": "compressed-tensors", "modelopt": "modelopt", "quark": "quark", "awq": "part"}
    found = _listed(quant)
    if method == "auto-round":
        compiled = [each for text in found if (each := hf_rules.expression(text)) is not None]
        return lambda module: any(each.search(module.name) for each in compiled)
    if method == "awq":  # "gate" is the router also of models with gate_proj: what the tensors are decides
        found = [each for each in found if each != "gate"]
    return matcher(styles.get(method, "transformers"), found)


def _listed(quant: Said) -> list[str]:
    """All entries of the lists of a section, and of the one inside of it that modelopt writes."""
    inner = quant.get("quantization")
    sections = (quant, inner if isinstance(inner, Mapping) else {})
    return [each for section in sections for key in LISTS for each in _entries(section.get(key))]


def _entries(value: object) -> list[Any]:
    """Of a list, or the keys of a mapping; none of another value, which the check of types refuses."""
    return list(value) if isinstance(value, list | tuple | Mapping) else []


def _named_elsewhere(quant: Said, block: Block) -> list[str]:
    """Lists whose names of experts are all those of other modules than the experts: nothing of them would be read."""
    groups = quant.get("config_groups")
    parts = [group for group in (groups.values() if isinstance(groups, Mapping) else ()) if isinstance(group, Mapping)]
    targets = [each for group in parts for each in _entries(group.get("targets"))]
    listed = [*_listed(quant), *targets, *_entries(quant.get("quantized_layers"))]
    listed = [each for each in listed if isinstance(each, str)]
    named = [each for each in listed if _OF_EXPERTS.fullmatch(each) and "mtp" not in each.split(".")]
    others = [] if any(map(block.names_experts, named)) else named
    start, ours = block.prefix.partition("{N}")[0], next(block.modules("experts")).name
    blocks = [each for each in hf_rules.starts(quant) if each.endswith("layers")]
    others += [] if any(map(start.startswith, blocks)) else blocks
    text = "lists of modules name {}, and experts of this model are called {}; state the names that tensors have"
    return [text.format(others[0], ours)] if others else []


_OF_EXPERTS = re.compile(r"[\w.]*\.\d+\.(?:[a-z_]+\.)*(?:experts|switch_mlp)(?:\.\w+)*")


def plain_kind(hf: Said, where: str) -> str:
    """The kind of weights that are not quantised. Raises ConfigError for another dtype than a floating-point one."""
    stated = next((hf[key] for key in ("torch_dtype", "dtype") if hf.get(key) is not None), "bfloat16")
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    dtype = str(stated).removeprefix("torch.")
    if dtype not in names:
        raise ConfigError(f"{where}: dtype {dtype!r} is not one of {', '.join(names)}")
    return names[dtype]


def _fp8(quant: Said, block: Block) -> Rules:
    in_blocks = bool(quant.get("weight_block_size")) or quant.get("expert_dtype") == "fp4"
    problems = others_of(quant, {
        "fmt": ("e4m3", "float8_e4m3fn", None), "scale_fmt": ("ue8m0", "float", None) if in_blocks else ("float", None),
        "activation_scheme": ("dynamic", None) if in_blocks else ("dynamic", "static"),
        "expert_dtype": ("fp4", "fp8", None),
    })  # fmt: skip
    if quant.get("expert_dtype") == "fp4":
        return _with_fp8(quant, lambda module: quant, ({"weights": "mxfp4", "activations": "mxfp8"}, problems))
    if in_blocks:
        return one_format(quant, ({"weights": "fp8_block", **_blocks(quant)}, problems))
    return one_format(quant, ({"weights": "fp8_tensor", "activation_scales": quant.get("activation_scheme")}, problems))


def _blocks(quant: Said) -> dict[str, Any]:
    return {"block": quant["weight_block_size"], "scale": "ue8m0" if quant.get("scale_fmt") == "ue8m0" else "float32"}


def _with_fp8(quant: Said, routed: Callable[[Module], Said | None], found: Found) -> Rules:
    """Rules of routed experts in another format than FP8, in which shared ones are if the section states its blocks."""
    if not quant.get("weight_block_size"):
        return Rules(routed, lambda part: found)
    fp8, blocks = {"fp8": True}, {"weights": "fp8_block", **_blocks(quant)}
    return Rules(lambda m: routed(m) if m.holder else fp8, lambda part: (blocks, []) if part is fp8 else found)


def _mixed(quant: Said, block: Block) -> Rules:
    """An FP8 checkpoint whose routed experts modelopt has quantised: DeepSeek-V4 in NVFP4."""
    problems = _fp8({**quant, "expert_dtype": quant.get("expert_dtype") or "fp4"}, block).read(quant)[1]
    problems += others_of(
        quant, {"quant_algo": ("MIXED_PRECISION", None), "moe_quant_algo": ("NVFP4",), "group_size": (16, None)}
    )
    if is_empty(quant.get("quantized_layers")):  # all routed experts
        return _with_fp8(quant, lambda module: quant, ({"weights": "nvfp4"}, problems))
    listed = _by_listed(quant, quant.get("quantized_layers") or {})
    for module in block.modules("experts"):
        part = listed.part_of(module)
        algorithm = None if part is None else part.get("quant_algo")
        if algorithm != "NVFP4":
            problems.append(f"quantized_layers states {algorithm!r} for the experts of layer {module.layer}")
            break
        problems += listed.read(part or {})[1]
    if quant.get("config_groups") is not None:
        by_group = _by_group(quant, block, "NVFP4")
        problems += hf_rules.by_module(replace(block, shared=()), by_group)[1]
    return _with_fp8(quant, lambda module: quant, ({"weights": "nvfp4"}, list(dict.fromkeys(problems))))


def _by_listed(quant: Said, listed: Mapping[str, Said]) -> Rules:
    """The algorithm that quantized_layers states for a module, or for one that holds it; plain where there is none."""

    def part_of(module: Module) -> Said | None:
        return next((listed[name] for name in (module.name, *module.above()) if name in listed), None)

    def read(part: Said) -> Found:
        algorithm = None if is_empty(part.get("quant_algo")) else str(part["quant_algo"])
        more = sorted(key for key in part.keys() - {"quant_algo", "group_size"} if not is_empty(part[key]))
        problems = [f"quantized_layers states {key}={part[key]!r} for experts" for key in more]
        columns = _MODELOPT[algorithm][2] if algorithm in _MODELOPT else None
        if not is_empty(size := part.get("group_size")) and size != columns:
            problems.append(f"quantized_layers states group_size {size!r} for experts")
        if algorithm is None or algorithm not in _MODELOPT:
            return {}, [*problems, f"quantized_layers states {algorithm!r} for experts"]
        return _of_algorithm(algorithm), problems

    return Rules(part_of, read)


_MODELOPT: Mapping[str | None, tuple[str, int, int | None]] = {
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), ("nvfp4", 4, 16)), "MXFP8": ("mxfp8", 8, 32),
    "FP8": ("fp8_tensor", 8, None), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_channel", 8, None),
}  # fmt: skip
"""(kind, bits, columns of a scale) of its algorithms; W4A16: activations stay as they are."""


def _of_algorithm(algorithm: str) -> dict[str, Any]:
    settings = {"weights": _MODELOPT[algorithm][0]}
    settings |= {"activations": "none"} if algorithm.startswith("W4A16") else {}
    return settings | ({"activation_scales": "static"} if algorithm == "FP8" else {})


def _modelopt(quant: Said, block: Block) -> Rules:
    inner = quant.get("quantization")
    inner = inner if isinstance(inner, Mapping) else {}
    problems = section_problems(inner, "modelopt")
    stated = {section["quant_algo"] for section in (quant, inner) if isinstance(section.get("quant_algo"), str)}
    algorithm = ", ".join(sorted(stated)) or None
    if algorithm == "MIXED_PRECISION":  # what lists modules one by one decides, not config_groups
        listed = quant.get("quantized_layers") or inner.get("quantized_layers") or {}
        problems += [] if listed else ["quant_algo is MIXED_PRECISION and quantized_layers is empty"]
        rules = _by_listed(quant, listed)
        routed, shared = (
            {str((rules.part_of(module) or {}).get("quant_algo")) for module in block.modules(role)}
            for role in ("experts", "shared_experts")
        )
        others = sorted(shared - routed - {"MXFP8", "None"})
        problems += [f"quantized_layers states {each!r} for shared experts" for each in others]
        return replace(rules, problems=problems)
    if algorithm is None or algorithm not in _MODELOPT:
        return Rules(lambda module: None, lambda part: ({}, []), [*problems, f"quant_algo is {algorithm!r}"])
    columns = _MODELOPT[algorithm][2]
    for section in (quant, inner):
        if columns is not None and section.get("group_size") not in (None, columns):
            problems.append(f"group_size is {section['group_size']}, {algorithm} has {columns}")
    if quant.get("config_groups") is None:
        return one_format(quant, (_of_algorithm(algorithm), problems))
    rules = _by_group(quant, block, algorithm)
    return replace(rules, problems=problems + rules.problems)


def _by_group(quant: Said, block: Block, algorithm: str) -> Rules:
    """The group of config_groups that modelopt writes for its other readers, which must be of the algorithm."""
    kind, bits, columns = _MODELOPT[algorithm]

    def read(group: Said) -> Found:
        problems = []
        for title in ("weights", "input_activations"):
            section = group.get(title) or {}
            for key, fitting in {"num_bits": bits, "type": "float", "group_size": columns}.items():
                if section.get(key) not in (None, fitting):
                    problems.append(f"{title}.{key} is {section[key]!r}, {algorithm} has {fitting!r}")
        tokens = group.get("input_activations")
        settings = _of_algorithm(algorithm)
        settings["activations"] = "none" if is_empty(tokens) else "nvfp4" if kind == "nvfp4" else "auto"
        scales, others = hf_rules.scales_of(kind, tokens)
        return settings | scales, problems + others

    return _of_groups(quant.get("config_groups"), read)


def _of_groups(groups: object, read: Callable[[Said], Found]) -> Rules:
    """The group of config_groups that a module belongs to; plain where there is none.

    A name comes before an expression, and that before the class of a module, as in `match_targets` of
    compressed-tensors; of expressions the first by alphabet.
    """
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(each, Mapping) for each in groups.values()):
        problem = f"config_groups has no groups but {groups!r}, one is expected"
        return Rules(lambda module: None, read, [problem])
    kinds = ("group", ""), ("weights", "weights"), ("weights", "input_activations")
    parts = [(kind, group.get(key) if key else group) for group in groups.values() for kind, key in kinds]
    problems = [each for kind, part in parts if isinstance(part, Mapping) for each in section_problems(part, kind)]
    weights = [found for group in groups.values() if isinstance(found := group.get("weights"), Mapping)]
    stated = [found["dynamic"] for found in weights if found.get("dynamic") not in (None, False)]
    problems += [f"weights.dynamic is {value!r}, weights with stored scales are supported" for value in stated]
    if problems:
        return Rules(lambda module: None, read, problems)
    group_of = {target: group for group in groups.values() for target in group.get("targets", ["Linear"]) or ()}
    expressions = sorted(target for target in group_of if target.startswith("re:"))
    rules = [(re.compile(target[3:]), group_of[target]) for target in expressions]
    by_class = next((group_of[target] for target in CLASSES if target in group_of), None)
    if by_class is None and (others := [target for target in group_of if _BLOCK.match(target)]):
        problems = [
            f"targets has {each!r}; names, expressions and 'Linear' are read, no other classes" for each in others
        ]

    def part_of(module: Module) -> Said | None:
        by_name = group_of.get(module.name)
        return (
            next((group for rule, group in rules if rule.match(module.name)), by_class) if by_name is None else by_name
        )

    return Rules(part_of, read, problems)


_BLOCK = re.compile(r"[A-Z]\w*(?:MoE|Moe|MoeBlock|MLP|Experts?)$")
"""A class of modules that may hold experts."""
_IN_GROUPS = {
    "mxfp4-pack-quantized": ("mxfp4", 4, 32), "nvfp4-pack-quantized": ("nvfp4", 4, 16),
    "mxfp8-quantized": ("mxfp8", 8, 32),
}  # fmt: skip
_SCALES = {**dict.fromkeys(("mxfp4", "mxfp8"), ("torch.uint8", None)), "nvfp4": ("torch.float8_e4m3fn", None)}


def _compressed_tensors(quant: Said, block: Block) -> Rules:
    sparsity = quant.get("sparsity_config") or {}
    problems = []
    if not is_empty(sparsity) and sparsity.get("format") != "dense":
        problems.append(f"sparsity_config is {sparsity!r}, weights without sparsity are supported")
    if not quant.get("config_groups") and quant.get("moe_sparsity_config"):  # experts are pruned, nothing is quantised
        return Rules(lambda module: None, lambda part: ({}, []), problems)
    rules = _of_groups(quant.get("config_groups"), lambda group: _of_group(quant, group))
    return replace(rules, problems=problems + rules.problems)


def _of_group(quant: Said, group: Said) -> Found:
    problems: list[str] = []
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


_READERS: Mapping[str, Callable[[Said, Block], Rules]] = {
    "fp8": _fp8, "mxfp4": lambda quant, block: one_format(quant, ({"weights": "mxfp4"}, [])), "modelopt": _modelopt,
    "fbgemm_fp8": lambda quant, block: one_format(
        quant, ({"weights": "fp8_channel", "activation_scales": "dynamic"}, [])),
    "compressed-tensors": _compressed_tensors, "gptq": hf_rules.gptq, "awq": hf_rules.awq,
    "auto-round": hf_rules.auto_round, "quark": hf_rules.quark, "mlx": hf_rules.mlx,
}  # fmt: skip
