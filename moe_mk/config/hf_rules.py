"""Formats that rules give to modules: lists of names, and the readers of GPTQ, AWQ, AutoRound, MLX and Quark sections.

A reader finds the settings of each projection by the names that it may have. Routed experts of a layer have one format,
shared experts may have another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from moe_mk.config.keys import is_empty, section_problems
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.grouped import GROUPED, GROUPS, kind_of
from moe_mk.quant.kinds import STATIC_KINDS

Said = Mapping[str, Any]
Found = tuple[dict[str, Any], list[str]]
ROOTS = (
    "model.layers", "language_model.model.layers", "model.language_model.layers", "layers", "backbone.layers",
    "thinker.model.layers",
)  # fmt: skip
BLOCKS = ("mlp", "ffn", "block_sparse_moe", "mixer", "feed_forward")
PROJECTIONS = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
SHARED = ("shared_experts", "shared_expert", "shared_mlp")


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


def modules(layers: list[int], role: str) -> list[list[str]]:
    """The names that each projection of the experts of the layers may have; of routed experts those of the first."""
    roles = ("experts.0",) if role == "experts" else SHARED
    return [
        [f"{root}.{n}.{block}.{role}.{w}" for root in ROOTS for block in BLOCKS for role in roles for w in words]
        for n in layers for words in PROJECTIONS
    ]  # fmt: skip


def covered(style: str, patterns: Iterable[str], layers: list[int], role: str) -> bool:
    """Whether the patterns name every projection of the experts of the layers."""
    patterns = tuple(patterns)
    return bool(patterns) and all(named(style, patterns, names) for names in modules(layers, role))


def some_named(style: str, patterns: Collection[str], layers: list[int], role: str, *, numbered: bool) -> str:
    """What the patterns name if it is some projections of the experts, or those of some layers; else ""."""
    words = [each[numbered] for each in PROJECTIONS]
    left = [
        named(style, patterns, [name for name in names if name.endswith(words[at % 3])])
        for at, names in enumerate(modules(layers, role))
    ]
    for n, of_layer in zip(layers, zip(*[iter(left)] * 3, strict=True), strict=True):
        if len(set(of_layer)) > 1:
            which = [word for word, is_left in zip(words, of_layer, strict=True) if is_left]
            are = "is left as it is" if len(which) == 1 else "are left as they are"
            return f"{' and '.join(which)} of layer {n} {are}, the others are quantised; give all one format"
    if len(set(left)) < 2:
        return ""
    return f"some of layers {', '.join(map(str, layers))} are left as they are (name one: layer=N)"


def named(style: str, patterns: Iterable[str], names: list[str]) -> bool:
    """Whether a pattern names a module, by the names that it may have."""
    return any(_matches(style, pattern, name) for pattern in patterns for name in names)


def others_of(section: Said, allowed: Mapping[str, tuple[object, ...]], title: str = "") -> list[str]:
    """The keys whose value is none of those allowed; null is allowed where None is, or the key is absent."""
    return [f"{title}{key} is {section.get(key)!r}" for key, fit in allowed.items() if section.get(key) not in fit]


def scales_of(kind: str, tokens: Any, key: str = "dynamic") -> Found:
    """What a section of activations states about their scales: nothing where they cannot be static ("local" is)."""
    dynamic = None if is_empty(tokens) else tokens.get(key)
    if dynamic not in (None, True, False, "local"):
        return {}, [f"input_activations.{key} is {dynamic!r}"]
    if dynamic is None or (dynamic and kind not in STATIC_KINDS):
        return {}, []
    return {"activation_scales": "static" if dynamic in (False, "local") else "dynamic"}, []


def with_shared(experts: dict[str, Any], shared: dict[str, Any], problems: list[str]) -> Found:
    """The settings of routed experts with the format of shared ones, where it is another one."""
    if shared == experts or not experts:
        return experts, problems
    kind, block = shared.get("weights", "plain"), {key: shared[key] for key in ("block",) if key in shared}
    if kind not in ("plain", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", *GROUPED) or (
        "down" in shared or (kind == experts["weights"] and "down" not in experts)
    ):
        problems = [*problems, f"shared experts have {shared}, routed ones {experts}, which cannot be combined"]
    return {**block, **experts, "shared": kind}, problems


def integers(bits: object, columns: object, *, symmetric: bool, affine: bool = False) -> Found:
    """The settings of integers with a scale for a group of columns, and with a bias for it if they are affine."""
    if (kind := kind_of(bits, columns, zeros=not (symmetric or affine), biases=affine)) not in GROUPED:
        sizes = ", ".join(str(group) for group in GROUPS if group != WHOLE) + (" or whole rows" if not affine else "")
        return {}, [f"{bits!r} bits in groups of {columns!r} (supported are 4 and 8 bits in {sizes})"]
    return {"weights": kind}, []


def of_roles(layers: list[int], of: Callable[[list[str]], Found]) -> Found:
    """The settings of the experts from those of their modules, by names; none where they are left as they are."""
    found: dict[str, list[dict[str, Any]]] = {"experts": [], "shared_experts": []}
    problems: dict[str, None] = {}
    for role, formats in found.items():
        ends: tuple[list[dict[str, Any]], ...] = ([], [])  # of gate and up, and of down
        for at, (settings, more) in enumerate(map(of, modules(layers, role))):
            of_end = ends[at % len(PROJECTIONS) == 2]
            of_end += [settings] * (settings not in of_end)
            problems |= dict.fromkeys(more)
        (wide, *others), (down, *more_downs) = ends
        kinds = wide.get("weights"), down.get("weights")
        if kinds[0] != kinds[1] and {*kinds} <= GROUPED.keys():
            wide, down = {**wide, "down": kinds[1]}, {**down, "weights": kinds[0], "down": kinds[1]}
        formats += [wide, *others, *([down] if down != wide else []), *more_downs]
        if len(formats) > 1:
            which = f" of layers {', '.join(map(str, layers))} (name one: layer=N)" if len(layers) > 1 else ""
            problems[f"{role}{which} have the formats {' and '.join(map(str, formats))}"] = None
    experts, shared = (formats[0] for formats in found.values())
    return with_shared(experts, shared, list(problems))


def _packed(module: Said, own: Said, *, zeros: bool = False) -> Found:
    """Integers in groups of one module. zeros: whether symmetric weights have zero points too."""
    module = {**module, **own}
    problems = section_problems(own, "module") + others_of(module, {"act_bits": (16, None)})
    if own.get("bits") == 16:
        return {}, problems
    size, symmetric = module.get("group_size"), module.get("sym") is not False and not zeros
    settings, more = integers(module.get("bits"), WHOLE if size == -1 else size, symmetric=symmetric)
    return settings, problems + more + others_of(module, {"data_type": ("int", None)})


_FLOATS: Mapping[tuple[object, object], tuple[str, int, tuple[str, ...]]] = {
    **{("mx_fp", bits): (f"mxfp{bits}", 32, ("mx_fp", "mx_fp_rceil")) for bits in (4, 8)},
    ("nv_fp", 4): ("nvfp4", 16, ("nv_fp4_with_static_gs",)),
}
"""The kind of weights of a (data_type, bits) of AutoRound, the columns of a scale, and the types of activations."""


def _floats(module: Said, own: Said) -> Found:
    """Floats of one module of AutoRound, in the tensors of compressed-tensors."""
    module = {**module, **own}
    bits, problems = module.get("bits"), section_problems(own, "module")
    if own.get("bits") == 16:
        return {}, problems
    if (module.get("data_type"), bits) not in _FLOATS:
        return {}, [*problems, f"data_type is {module.get('data_type')!r} with {bits!r} bits in llm_compressor"]
    kind, size, types = _FLOATS[module["data_type"], bits]
    held = {"group_size": (size,), "sym": (True, None), "act_bits": (bits, 16, None), "act_data_type": (*types, None)}
    activations = kind if module.get("act_bits") == bits else "none"
    scales = {"activation_scales": "static"} if activations == "nvfp4" else {}
    return {"weights": kind, "activations": activations, **scales}, problems + others_of(module, held)


def gptq(quant: Said, layers: list[int]) -> Found:
    """Integers of AutoGPTQ or GPTQModel, whose `dynamic` states modules by expressions at the start of the name."""
    rules = quant.get("dynamic") or {}

    def of(names: list[str]) -> Found:
        """By the first rule that fits; "-:" leaves a module as it is."""
        fits = (rule for rule in rules if any(re.match(re.sub("^[-+]:", "", rule), name) for name in names))
        rule = next(fits, "")
        own = {"bits": 16} if rule.startswith("-:") else rules.get(rule)
        return _packed(quant, own if isinstance(own, Mapping) else {})

    settings, problems = of_roles(layers, of)
    stated = {quant[key] for key in ("checkpoint_format", "format") if quant.get(key) is not None} or {"gptq"}
    stored, has_zeros = " and ".join(sorted(stated)), settings.get("weights", "").endswith("_zp")
    if stored not in ("gptq", "gptq_v2"):
        problems.append(f"checkpoint_format is {stored!r} (supported are gptq and gptq_v2)")
    return {**settings, "gptq_v2": True} if stored == "gptq_v2" and has_zeros else settings, problems


def awq(quant: Said, layers: list[int]) -> Found:
    """Four-bit integers with zero points, as the kernels of version gemm read them."""
    gemm = ("gemm", "GEMM", None)
    settings, problems = _packed(quant, {}, zeros=True)
    problems += others_of(quant, {"version": gemm, "format": gemm, "zero_point": (True, None), "bits": (4,)})
    return settings, problems


def auto_round(quant: Said, layers: list[int]) -> Found:
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
        own = own if inside else {"bits": 16, **own}
        return _floats(quant, own) if stored == "llm_compressor" else _packed(quant, own, zeros=stored == "awq")

    if stored not in ("gptq", "awq", "llm_compressor"):
        return {}, [f"packing_format is {packing!r} (supported are auto_round:auto_gptq, auto_awq and llm_compressor)"]
    settings, problems = of_roles(layers, of)
    if stored == "awq":
        eight = [kind for kind in settings.values() if kind.startswith("int8")]
        problems += [f"packing_format is {packing!r} with {kind}, AWQ holds 4 bits" for kind in eight]
    return settings, problems


def mlx(quant: Said, layers: list[int]) -> Found:
    """One format of all modules, and `modules` that have another one; false leaves a module as it is."""

    def of(names: list[str]) -> Found:
        modules, stacks = quant.get("modules") or {}, [name.replace(".experts.0.", ".switch_mlp.") for name in names]
        own = next((modules[name] for name in stacks if name in modules), True)
        if own is False or (problems := [] if own is True else section_problems(own, "mlx module")):
            return {}, problems if own else []
        stated = quant if own is True else own
        mode, bits, size = stated.get("mode") or "affine", stated.get("bits", 4), stated.get("group_size", 64)
        if mode == "affine":
            return integers(bits, size, symmetric=False, affine=True)
        if (mode, bits, size) in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)):
            return {"weights": mode, "activations": "none"}, []
        return {}, [f"mode is {mode!r} with {bits} bits in groups of {size}"]

    return of_roles(layers, of)


_QUARK: Mapping[object, tuple[str, Mapping[str, tuple[object, ...]]]] = {
    ("fp4", "per_group"): ("mxfp4", {"group_size": (32,), "scale_format": ("e8m0",), "ch_axis": (-1, 1)}),
    ("fp8_e4m3", "per_group"): ("mxfp8", {"group_size": (32,), "scale_format": ("e8m0",), "ch_axis": (-1, 1)}),
    ("fp8_e4m3", "per_tensor"): ("fp8_tensor", {}), ("fp8_e4m3", "per_channel"): ("fp8_channel", {"ch_axis": (0,)}),
    ("fp8_e4m3", "per_block"): ("fp8_block", {}), ("int8", "per_channel"): ("int8", {"ch_axis": (0,)}),
}  # fmt: skip
"""The kind of weights of a (dtype, qscheme) of Quark, and what else they must state."""


def quark(quant: Said, layers: list[int]) -> Found:
    """The first of `layer_quant_config` that fits states a module, then its class, then `global_quant_config`."""
    written = {"weight_format": ("real_quantized", None), "pack_method": ("reorder", "order", None)}
    problems = others_of(quant.get("export") or {}, written, "export.")
    algorithms = quant.get("algo_config") or []
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        problems += others_of(each, {"name": ("awq", "gptq", "smooth", "autosmoothquant", "qronos")}, "algo_config.")
        if each.get("desc_act") and not each.get("static_groups"):
            problems.append("algo_config.desc_act is true without static_groups, which orders columns by activation")
    by_class, rules = quant.get("layer_type_quant_config") or {}, quant.get("layer_quant_config") or {}
    problems += [f"layer_type_quant_config is for {key}" for key in by_class if key not in ("Linear", "Embedding")]

    def of(names: list[str]) -> Found:
        fits = (rules[rule] for rule in rules if any(_matches("quark", rule, name) for name in names))
        return _of_quark(next(fits, by_class.get("Linear", quant.get("global_quant_config"))))

    settings, more = of_roles(layers, of)
    return settings, problems + more


def _of_quark(stated: Any) -> Found:
    """The settings of one section of Quark; none for weights that are left as they are."""
    if is_empty(stated) or is_empty(stated.get("weight")):
        return {}, []
    weight, tokens = stated["weight"], stated.get("input_tensors") or {}
    if isinstance(weight, list) and any(isinstance(each, Mapping) and each.get("dtype") == "int4" for each in weight):
        return {}, ["weight is int4 under FP8 scales (W4A8), which no experts backend supports; "
                    "export fp8_e4m3 per_channel"]  # fmt: skip
    if isinstance(weight, list) and isinstance(tokens or [], list):
        return _of_levels(stated, {"weight": weight, "input_tensors": list(tokens)})
    if not (isinstance(weight, Mapping) and isinstance(tokens, Mapping)):
        return {}, [f"weight and input_tensors are {weight!r} and {tokens!r}, one scale each is supported"]
    problems = section_problems(stated, "quark module")
    problems += [more for each in (weight, tokens) for more in section_problems(each, "quark tensor")]
    if problems:
        return {}, problems
    if (key := (weight.get("dtype"), weight.get("qscheme"))) not in _QUARK:
        return {}, [f"weight.dtype is {key[0]!r} with qscheme {key[1]!r}, which is not supported"]
    kind, held = _QUARK[key]
    settings: dict[str, Any] = {"weights": kind, "activations": "auto" if tokens else "none"}
    problems += others_of(weight, {"is_dynamic": (False, None), "symmetric": (True, None), **held}, "weight.")
    if kind == "fp8_block":
        settings["block"] = weight.get("block_size") or (128, 128)
    if not tokens:
        return settings, problems
    name, also = _QUARK.get((tokens.get("dtype"), tokens.get("qscheme")), ("", {}))
    if kind in ("mxfp4", "mxfp8"):
        settings["activations"] = name
        problems += others_of(tokens, {"is_dynamic": (True,), **also}, "input_tensors.")
    fitting = {"mxfp4": name in ("mxfp4", "mxfp8"), "mxfp8": name == "mxfp8"}
    if not fitting.get(kind, tokens.get("dtype") == key[0]):
        problems.append(f"input_tensors are {tokens.get('dtype')} {tokens.get('qscheme')} with {kind} weights")
    settings |= scales_of(kind, tokens, "is_dynamic")[0]
    return settings, problems + others_of(tokens, {"symmetric": (True, None)}, "input_tensors.")


def _of_levels(stated: Said, parts: Mapping[str, list[Any]]) -> Found:
    """NVFP4 of Quark: values of four bits under FP8 scales of blocks, and these under one of a whole tensor."""
    block: dict[str, tuple[object, ...]] = {"dtype": ("fp4",), "qscheme": ("per_group",), "group_size": (16,)}
    whole: dict[str, tuple[object, ...]] = {"dtype": ("fp8_e4m3",), "qscheme": ("per_tensor",), "is_dynamic": (False,)}
    problems = section_problems(stated, "quark module")
    for title, levels in parts.items():
        block["is_dynamic"] = (title == "input_tensors",)
        for each, held in zip(levels, (block, whole), strict=False):
            more = others_of(each, held, f"{title}.") if isinstance(each, Mapping) else [f"{title} has {each!r}"]
            problems += more or section_problems(each, "quark tensor")
        problems += [f"{title} has {len(levels)} scales, NVFP4 has two"] * (len(levels) not in (0, 2))
    tokens = parts["input_tensors"]
    scales = {"activations": "nvfp4", "activation_scales": "static"} if tokens else {"activations": "none"}
    return {"weights": "nvfp4", **scales}, problems
