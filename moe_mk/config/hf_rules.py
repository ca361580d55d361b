"""Formats that rules give to modules, and the readers of GPTQ, AWQ, AutoRound, MLX and Quark sections.

A reader states which part of a section describes a module, and what such a part means (`Rules`); `by_module` asks it
for every module of the experts. Routed experts of a layer have one format, shared experts may have another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from moe_mk.config.keys import is_empty, section_problems
from moe_mk.config.modules import Block, Module, matcher
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.grouped import GROUPED, GROUPS, kind_of
from moe_mk.quant.kinds import FORMATS

Said = Mapping[str, Any]
Found = tuple[dict[str, Any], list[str]]


@dataclass(frozen=True)
class Rules:
    """How a section of quantisation describes modules."""

    part_of: Callable[[Module], Said | None]
    """The part of the section that describes a module; None: it is left in the dtype of the model."""
    read: Callable[[Said], Found]
    """The settings of a part, none for plain weights, and what is not supported in it."""
    problems: list[str] = field(default_factory=list)
    """What is not supported in the section itself."""

    def without(self, is_left: Callable[[Module], bool]) -> Rules:
        """These rules with the modules that a list leaves unquantised."""
        return replace(self, part_of=lambda module: None if is_left(module) else self.part_of(module))


def one_format(section: Said, found: Found) -> Rules:
    """One format of all modules."""
    return Rules(lambda module: section, lambda part: found)


def others_of(section: Said, allowed: Mapping[str, tuple[object, ...]], title: str = "") -> list[str]:
    """The keys whose value is none of those allowed; null is allowed where None is, or the key is absent."""
    return [f"{title}{key} is {section.get(key)!r}" for key, fit in allowed.items() if section.get(key) not in fit]


def scales_of(kind: str, tokens: Any, key: str = "dynamic") -> Found:
    """Scale settings of a section of activations: nothing where they cannot be static ("local" is)."""
    dynamic = None if is_empty(tokens) else tokens.get(key)
    if dynamic not in (None, True, False, "local"):
        return {}, [f"input_activations.{key} is {dynamic!r}"]
    if dynamic is None or (dynamic and not FORMATS[kind].static):
        return {}, []
    return {"activation_scales": "static" if dynamic in (False, "local") else "dynamic"}, []


def integers(bits: object, columns: object, *, symmetric: bool, affine: bool = False) -> Found:
    """The settings of integers with a scale for a group of columns, and with a bias for it if they are affine."""
    if (kind := kind_of(bits, columns, zeros=not (symmetric or affine), biases=affine)) not in GROUPED:
        sizes = ", ".join(str(group) for group in GROUPS if group != WHOLE) + (" or whole rows" if not affine else "")
        return {}, [f"{bits!r} bits in groups of {columns!r} (supported are 4 and 8 bits in {sizes})"]
    return {"weights": kind}, []


def by_module(block: Block, rules: Rules) -> Found:
    """The settings of the experts from those of their modules; none where routed experts are left as they are."""
    roles, problems = {}, dict.fromkeys(rules.problems)
    for role in ("experts", "shared_experts"):
        roles[role], more = _of_role(block, rules, role)
        problems |= dict.fromkeys(more)
    experts, shared = roles.values()
    if not block.shared:
        shared = experts
    if shared == experts:
        return experts, list(problems)
    kind: str = shared.get("weights", "plain")
    sizes: dict[str, Any] = {key: shared[key] for key in ("block", "scale") if key in shared}
    if kind not in ("plain", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", *GROUPED) or (
        "down" in shared or (kind == experts.get("weights") and "down" not in experts)
    ):
        problems[f"shared experts have {shared}, routed ones {experts}, which cannot be combined"] = None
    return {**sizes, **experts, "shared": kind}, list(problems)


def _of_role(block: Block, rules: Rules, role: str) -> Found:
    """The one format of the routed or shared experts of all layers of a block, and where they have several."""
    read: dict[int, tuple[Said | None, dict[str, Any]]] = {}  # the parts are kept, so that no other gets their id
    problems: dict[str, None] = {}
    formats: dict[int, dict[Module, dict[str, Any]]] = {}
    for module in block.modules(role):
        part = rules.part_of(module)
        if id(part) not in read:
            settings, more = ({}, list[str]()) if part is None else rules.read(part)
            problems |= dict.fromkeys(more)
            read[id(part)] = part, settings
        formats.setdefault(module.layer, {})[module] = read[id(part)][1]
    found: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for layer, of_modules in formats.items():
        settings, more = _of_layer(f"{role}: ", layer, of_modules)
        if more and len(block.layers) > 1:
            more = [f"{text} (or name another layer: layer=N)" for text in more]
        problems |= dict.fromkeys(more)
        found.setdefault(str(settings), ([], settings))[0].append(layer)
    if not found:
        return {}, list(problems)
    if len(found) > 1:
        each = (f"{settings or 'none'} in layers {_some(layers)}" for layers, settings in found.values())
        problems[f"{role} have the formats {' and '.join(each)} (name one: layer=N)"] = None
    return next(iter(found.values()))[1], list(problems)


def _of_layer(role: str, layer: int, of_modules: Mapping[Module, dict[str, Any]]) -> Found:
    """The format of the experts of one layer, whose down projections may have another one."""
    wide, down = (
        list({str(each): each for module, each in of_modules.items() if (module.end == "down") is is_down}.values())
        for is_down in (False, True)
    )
    kinds = [each[0].get("weights") if len(each) == 1 else None for each in (wide, down)]
    if kinds[0] != kinds[1] and {*kinds} <= GROUPED.keys():
        return {**wide[0], "down": kinds[1]}, []
    if all(each == wide[0] for each in (*wide, *down)):
        return wide[0], []
    if left := [module for module, each in of_modules.items() if not each]:
        words = list(dict.fromkeys(module.word for module in left))
        is_whole = all(module in left for module in of_modules if module.word in words)
        which = " and ".join(words) if is_whole else f"experts {_some(sorted({m.expert or 0 for m in left}))}"
        are = "is left as it is" if is_whole and len(words) == 1 else "are left as they are"
        return wide[0], [f"{role}{which} of layer {layer} {are}, the others are quantised; give all one format"]
    texts = dict.fromkeys(map(str, (*wide, *down)))
    return wide[0], [f"{role}modules of layer {layer} have the formats {' and '.join(texts)}"]


def _some(numbers: list[int]) -> str:
    """Format a list of numbers in short."""
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


def _packed(module: Said, *, zeros: bool = False) -> Found:
    """Integers in groups of one module. zeros: whether symmetric weights have zero points too."""
    own = module.get(_OWN, {})
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


def _floats(module: Said) -> Found:
    """Floats of one module of AutoRound, in the tensors of compressed-tensors."""
    own = module.get(_OWN, {})
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


def gptq(quant: Said, block: Block) -> Rules:
    """Integers of AutoGPTQ, optimum or GPTQModel 7.7.

    The first rule of GPTQModel's `dynamic` that matches at the start of a name states the module, as in `dynamic_get`;
    "-:" leaves it as it is. `modules_in_block_to_quantize` are the ends of names inside of `block_name_to_quantize`.
    """
    stated = quant.get("dynamic") or {}
    rules = [(re.compile(re.sub("^[-+]:", "", rule)), rule.startswith("-:"), own) for rule, own in stated.items()]
    own_of = [{**quant, **own, _OWN: own} if isinstance(own, Mapping) else quant for _, _, own in rules]
    inside, ends = starts(quant), tuple(_flat(quant.get("modules_in_block_to_quantize")))

    def part_of(module: Module) -> Said | None:
        if (inside and not module.name.startswith(inside)) or (ends and not module.name.endswith(ends)):
            return None
        fits = (at for at, (rule, _, _) in enumerate(rules) if rule.match(module.name))
        if (at := next(fits, None)) is None:
            return quant
        return None if rules[at][1] else own_of[at]

    problems = [f"dynamic[{rule!r}] is {own!r}" for rule, own in stated.items() if not isinstance(own, Mapping)]
    stored = {quant[key] for key in ("checkpoint_format", "format") if quant.get(key) is not None} or {"gptq"}
    name = " and ".join(sorted(stored))
    if name not in ("gptq", "gptq_v2"):
        problems.append(f"checkpoint_format is {name!r} (supported are gptq and gptq_v2)")

    def read(part: Said) -> Found:
        settings, more = _packed(part)
        v2 = name == "gptq_v2" and settings.get("weights", "").endswith("_zp")
        return ({**settings, "gptq_v2": True} if v2 else settings), more

    return Rules(part_of, read, problems + others_of(quant, {"method": ("gptq", None)}))


_OWN = " own"
"""The key of the part that a rule states itself, in what it makes of a section."""


def _flat(stated: Any) -> list[str]:
    """The texts of a list, of lists in a list, or of a text with commas."""
    if isinstance(stated, str):
        return stated.split(",")
    return [text for each in stated or () for text in (_flat(each) if isinstance(each, list | tuple) else [each])]


def starts(quant: Said) -> tuple[str, ...]:
    """How names of modules of the blocks start that are quantised; () for all."""
    names = quant.get("block_name_to_quantize") or quant.get("to_quant_block_names")
    return tuple(_flat(names))


def awq(quant: Said, block: Block) -> Rules:
    """Four-bit integers with zero points, as the kernels of version gemm read them."""
    gemm = ("gemm", "GEMM", None)
    held = {"version": gemm, "format": gemm, "zero_point": (True, None), "bits": (4,), "method": ("awq", None)}
    settings, problems = _packed(quant, zeros=True)
    return one_format(quant, (settings, problems + others_of(quant, held)))


_AUTO_ROUND = {
    "auto_gptq": "gptq", "gptq": "gptq", "auto_round": "gptq_v2", "gptqmodel": "gptq_v2", "auto_awq": "awq",
    "awq": "awq", "llm_compressor": "llm_compressor",
}  # fmt: skip
"""How AutoRound 0.16 packs for a `packing_format`; the one of asymmetric weights, `auto_round`, leaves zero points as
they are."""


def stores_whole_zeros(quant: Said) -> bool:
    """Whether zero points in the tensors of GPTQ are stored as they are, not less one."""
    packing = str(quant.get("packing_format") or "").removeprefix("auto_round:")
    stated = quant.get("checkpoint_format"), quant.get("format"), _AUTO_ROUND.get(packing)
    return "gptq_v2" in stated


def auto_round(quant: Said, block: Block) -> Rules:
    """Integers in the tensors of GPTQ or AWQ, or floats in those of compressed-tensors.

    `extra_config` states a module by name, else by the first expression that is found anywhere in it, as in
    `get_layer_config` of AutoRound 0.16; modules outside of `block_name_to_quantize` are left as they are.
    """
    packing = str(quant.get("packing_format") or "auto_round:auto_gptq")
    stored, extra = _AUTO_ROUND.get(packing.removeprefix("auto_round:")), quant.get("extra_config") or {}
    if stored is None:
        supported = "supported are auto_round, auto_round:gptqmodel, auto_gptq, auto_awq and llm_compressor"
        return Rules(lambda module: None, lambda part: ({}, []), [f"packing_format is {packing!r} ({supported})"])
    rules = [(expression(key), key) for key, own in extra.items() if own and not block.names_a_module(key)]
    own_of = {key: {**quant, **own, _OWN: own} for key, own in extra.items()}
    outside = {key: {**quant, "bits": 16, **own, _OWN: {"bits": 16, **own}} for key, own in extra.items()}
    inside = starts(quant)

    @cache
    def matches_inside(rule: re.Pattern[str]) -> bool:
        """Whether an expression is about modules of the blocks, so that it does not count outside of them."""
        names = (module.name for module in block.of_all_layers())
        return any(rule.search(name) for name in names if name.startswith(inside))

    def part_of(module: Module) -> Said | None:
        is_inside = not inside or module.name.startswith(inside)
        fits = (
            key for rule, key in rules
            if rule is not None and rule.search(module.name) and (is_inside or not matches_inside(rule))
        )  # fmt: skip
        key = module.name if module.name in extra else next(fits, None)
        if key is None:
            return quant if is_inside else None
        return (own_of if is_inside else outside)[key]

    def read(part: Said) -> Found:
        if stored == "llm_compressor":
            return _floats(part)
        settings, problems = _packed(part, zeros=stored == "awq")
        if stored == "awq" and str(settings.get("weights")).startswith("int8"):
            problems.append(f"packing_format is {packing!r} with {settings['weights']}, AWQ holds 4 bits")
        if stores_whole_zeros(quant) and str(settings.get("weights")).endswith("_zp"):
            settings = {**settings, "gptq_v2": True}
        return settings, problems

    return Rules(part_of, read)


def expression(text: str) -> re.Pattern[str] | None:
    """None for what is no expression, which AutoRound skips."""
    try:
        return re.compile(text)
    except re.error:
        return None


def mlx(quant: Said, block: Block) -> Rules:
    """One format of all modules, and `modules` that have another one; false leaves a module as it is.

    A module that is not listed is packed where its scales are in the checkpoint, as `load_model` of MLX-LM 0.32 has it.
    """
    modules = quant.get("modules") or {}

    def part_of(module: Module) -> Said | None:
        own = modules.get(module.name, True)
        if own is True:
            is_plain = block.tensors is not None and f"{module.name}.scales" not in block.tensors
            return None if is_plain and module.name not in modules else quant
        return own if own is not False else None

    def read(part: Said) -> Found:
        if part is not quant and (problems := section_problems(part, "mlx module")):
            return {}, problems
        mode, bits, size = part.get("mode") or "affine", part.get("bits", 4), part.get("group_size", 64)
        if mode == "affine":
            return integers(bits, size, symmetric=False, affine=True)
        if (mode, bits, size) in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)):
            return {"weights": mode, "activations": "none"}, []
        return {}, [f"mode is {mode!r} with {bits} bits in groups of {size}"]

    return Rules(part_of, read)


_QUARK: Mapping[object, tuple[str, Mapping[str, tuple[object, ...]]]] = {
    ("fp4", "per_group"): ("mxfp4", {"group_size": (32,), "scale_format": ("e8m0",), "ch_axis": (-1, 1)}),
    ("fp8_e4m3", "per_group"): ("mxfp8", {"group_size": (32,), "scale_format": ("e8m0",), "ch_axis": (-1, 1)}),
    ("fp8_e4m3", "per_tensor"): ("fp8_tensor", {}), ("fp8_e4m3", "per_channel"): ("fp8_channel", {"ch_axis": (0,)}),
    ("fp8_e4m3", "per_block"): ("fp8_block", {}), ("int8", "per_channel"): ("int8", {"ch_axis": (0,)}),
}  # fmt: skip
"""The kind of weights of a (dtype, qscheme) of Quark, and what else they must state."""


def quark(quant: Said, block: Block) -> Rules:
    """The part of `layer_quant_config` with the name of a module, or the first whose glob fits, then that of its class,
    then `global_quant_config`, as in `setup_config_per_layer`.
    """
    written = {"weight_format": ("real_quantized", None), "pack_method": ("reorder", "order", None)}
    problems = others_of(quant.get("export") or {}, written, "export.")
    algorithms = quant.get("algo_config") or []
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        problems += others_of(each, {"name": ("awq", "gptq", "smooth", "autosmoothquant", "qronos")}, "algo_config.")
        if each.get("desc_act") and not each.get("static_groups"):
            problems.append("algo_config.desc_act is true without static_groups, which orders columns by activation")
    by_class, stated = quant.get("layer_type_quant_config") or {}, quant.get("layer_quant_config") or {}
    problems += [f"layer_type_quant_config is for {key}" for key in by_class if key not in ("Linear", "Embedding")]
    rules = [(matcher("quark", [rule]), part) for rule, part in stated.items()]
    others = by_class.get("Linear", quant.get("global_quant_config"))

    def part_of(module: Module) -> Said | None:
        by_name = stated.get(module.name)
        return next((part for fits, part in rules if fits(module)), others) if by_name is None else by_name

    return Rules(part_of, _of_quark, problems)


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
