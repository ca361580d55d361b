"""The modules of MoE blocks by the names that a checkpoint has, and how the lists of each writer name them.

Names are those of the tensors next to a config.json, or else follow the one template of the family in `families.json`.
A list is matched as its writer does: transformers 5.24 by an expression from the start up to the end of a part of the
name, or by the end of the name (`should_convert_module`); compressed-tensors 0.20 by name, "re:" or class
(`match_targets`); modelopt 0.47 by globs, or by the name of the module itself or of one that holds it; Quark 0.13 by
globs, in vLLM also by "re:"; AutoAWQ 0.2.9 by a part of the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from moe_mk.config.equation import TensorNames
from moe_mk.errors import unless_signalled
from moe_mk.files import HEADER_BYTES, INDEX_BYTES, parse_json, read_json

INDEX = "model.safetensors.index.json"
ENDS = ("gate", "up", "down")
_WORDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_END_OF = {**dict(zip(_WORDS, ENDS, strict=True)), **dict(zip(_WORDS.values(), ENDS, strict=True))}
SAMPLED = (0, 1, 2, 9, 10, 11, 99, 100)
"""Experts whose names stand for all while no layer is named: of one, two and three digits."""


class Module(NamedTuple):
    """One linear map of the experts of a layer."""

    layer: int
    expert: int | None
    """None: all experts in one module, or shared ones."""
    end: str
    """One of `ENDS`."""
    name: str
    holder: str
    """The module that holds all routed experts; "" for shared ones."""

    @property
    def word(self) -> str:
        """Its own last name."""
        return self.name.rpartition(".")[2]

    def above(self) -> Iterator[str]:
        """The names of the modules that hold it, innermost first."""
        name = self.name
        while name := name.rpartition(".")[0]:
            yield name


@dataclass(frozen=True)
class Block:
    """Names of the linear modules of the MoE blocks of a model. {N}: the layer; {e}: the expert."""

    prefix: str = "model.layers.{N}.mlp."
    experts: tuple[str, ...] = tuple(f"experts.{{e}}.{word}" for word in _WORDS)
    """Gate, up and down; up and down of experts without a gate; or the one module that holds stacks of all."""
    shared: tuple[str, ...] = tuple(f"shared_experts.{word}" for word in _WORDS)
    """The same of shared experts; () without them."""
    layers: tuple[int, ...] = (0,)
    """The layers that are described."""
    of_model: tuple[int, ...] = ()
    """All layers with experts, where only some are described."""
    num_experts: int = 1
    every: bool = True
    """Whether the names of all experts are looked at, and not only of `SAMPLED` ones."""
    tensors: frozenset[str] | None = None
    """The tensors of the first expert, of stacks and of shared experts in the checkpoint; None: not known."""

    def modules(self, role: str) -> Iterator[Module]:
        """Of a role, "experts" or "shared_experts", in all layers."""
        experts: Collection[int | None] = (None,)
        inner = self.experts if role == "experts" else self.shared
        if any("{e}" in each for each in inner):
            experts = range(self.num_experts)
            if not self.every:
                experts = sorted({e for e in (*SAMPLED, self.num_experts - 1) if 0 <= e < self.num_experts})
        for layer in self.layers:
            prefix = self.prefix.replace("{N}", str(layer))
            for path in inner:
                ends = [_END_OF[word]] if (word := path.rpartition(".")[2]) in _END_OF else ENDS
                held = prefix + _holder(path) if role == "experts" else ""
                for e in experts:
                    yield from (Module(layer, e, end, prefix + path.replace("{e}", str(e)), held) for end in ends)

    def of_all_layers(self) -> Iterator[Module]:
        """Of both roles, in all layers of the model, of `SAMPLED` experts."""
        whole = replace(self, layers=self.of_model or self.layers, every=False)
        for role in ("experts", "shared_experts"):
            yield from whole.modules(role)

    def names_experts(self, name: str) -> bool:
        """Whether a name is that of routed experts, or of some or one of their modules, in any layer."""
        paths = (re.escape(self.prefix + _holder(path)).replace(r"\{N\}", r"\d+") for path in self.experts)
        return any(re.match(f"{path}(?:\\.|$)", name) for path in paths)

    def names_a_module(self, name: str) -> bool:
        """Whether a name is the whole one of a linear map of routed or shared experts, in any layer."""
        paths = (re.escape(self.prefix + path) for path in (*self.experts, *self.shared))
        return any(re.fullmatch(each.replace(r"\{N\}", r"\d+").replace(r"\{e\}", r"\d+"), name) for each in paths)


def _holder(path: str) -> str:
    """The module that holds all experts, from the path of a projection of one of them."""
    return path.partition(".{e}")[0] if "{e}" in path else path.rpartition(".")[0] or path


def of_family(row: Mapping[str, Any], outer: str | None, *, is_mlx: bool = False) -> Block:
    """The template of a family. row: of `families.json`; outer: the type of a model around the text model, if any."""
    prefix = str(row.get("prefix", Block.prefix))
    if outer is not None:
        roots = row.get("roots", {})
        root = "language_model.model." if is_mlx else roots.get(outer, roots.get("", "language_model.model."))
        prefix = prefix if prefix.startswith(root) else root + prefix.removeprefix("model.")
    inner = [
        str(row.get(key, default))
        for key, default in (("experts", "experts.{e}.{p}"), ("shared", "shared_experts.{p}"))
    ]
    if is_mlx:  # stacks, and none of the words of Mixtral
        stack = "experts.{p}" if inner[0] == "experts" else "switch_mlp.{p}"
        inner = [stack, inner[1].replace("{w}", "{p}")]
    gated = row.get("gated", True)
    words = [(p, w) for p, w in _WORDS.items() if gated or p != "gate_proj"]
    experts, shared = (
        tuple(dict.fromkeys(path.replace("{p}", p).replace("{w}", w) for p, w in words)) for path in inner
    )
    return Block(prefix, experts, shared)


def of_equation(names: TensorNames) -> Block:
    """The modules that an equation names; a tensor of all experts is a module of its own."""
    found: dict[str, dict[str, None]] = {"experts": {}, "shared_experts": {}}
    for key, part in names.parts.items():
        role, _, word = key.partition(".")
        word = word.removeprefix("{e}.")
        if role in found and word in _WORDS:
            path = part if isinstance(part, str) else part.tensor.removesuffix(".weight")
            ends = {path: None} if path.rpartition(".")[2] in _END_OF else {path.rpartition(".")[0] or path: None}
            found[role] |= ends
    experts, shared = (tuple(each) for each in found.values())
    return Block(names.prefix, experts or Block.experts, shared)


_OF_EXPERTS = re.compile(
    r"(?P<prefix>(?:.*?\.)?\d+\.(?:[^.]+\.)*?)"
    r"(?P<path>(?:experts\.0|experts|switch_mlp|moe)\.(?:gate_proj|up_proj|down_proj|w[123])(?=\.)|experts(?=[._]))"
)
_OF_SHARED = r"(?P<path>(?:shared_experts?|share_expert|shared_mlp)\.(?:gate_proj|up_proj|down_proj|w[123]))\."
_SPLIT = re.compile(r"(.*?)(\d+)\.((?:[^.\d][^.]*\.)*)")


def of_checkpoint(folder: Path) -> Block | None:
    """The names of the tensors in a folder, and the layers that have experts; None where there are none.

    What is not readable as an index or a header is the loader's to report.
    """
    files = [folder / INDEX] if (folder / INDEX).is_file() else sorted(folder.glob("*.safetensors"))
    try:
        stamps = tuple((str(each), (s := each.stat()).st_mtime_ns, s.st_size, s.st_ino) for each in files)
        return _of_files(stamps)
    except unless_signalled(OSError, ValueError, TypeError, AttributeError):
        return None


@lru_cache(maxsize=16)
def _of_files(stamps: tuple[tuple[str, int, int, int], ...]) -> Block | None:
    names: list[str] = []
    for path, *_ in stamps:
        if path.endswith(".json"):
            names += read_json(Path(path), INDEX_BYTES)["weight_map"]
        else:
            with open(path, "rb") as file:
                names += parse_json(file.read(min(int.from_bytes(file.read(8), "little"), HEADER_BYTES)))
    return of_names(names)


def of_names(names: Iterable[str]) -> Block | None:
    """The block that tensors of these names are of; blocks of multi-token prediction do not count."""
    held = [name for name in names if _may_show(name) and "mtp" not in name.split(".")]
    found: dict[str, dict[int, dict[str, None]]] = {}
    for name in held:
        if (match := _OF_EXPERTS.match(name)) is not None:
            start, number, rest = _SPLIT.fullmatch(match["prefix"]).groups()  # type: ignore[union-attr]
            path = match["path"].replace("experts.0.", "experts.{e}.")
            found.setdefault(f"{start}{{N}}.{rest}", {}).setdefault(int(number), {})[path] = None
    if not found:
        return None
    prefix, layers = max(found.items(), key=lambda each: len(each[1]))
    paths = layers[min(layers)]
    one = next(each for each in (*(p for p in paths if "{e}" in p), *(p for p in paths if "." in p), *paths))
    experts = sorted(
        (path for path in paths if _holder(path) == _holder(one) and ("." in path) == ("." in one)), key=_order
    )
    shared, pattern = dict[str, None](), re.compile(re.escape(prefix).replace(r"\{N\}", r"\d+") + _OF_SHARED)
    for name in held:
        shared |= {match["path"]: None} if (match := pattern.match(name)) else {}
    ordered = tuple(sorted(shared, key=_order))
    return Block(prefix, tuple(experts), ordered, tuple(sorted(layers)), tensors=frozenset(held))


def _may_show(name: str) -> bool:
    """Whether a tensor is of the first expert, of a stack or of shared experts."""
    if (at := name.find(".experts.")) >= 0:
        return not name[at + 9 : at + 10].isdigit() or name.startswith("0.", at + 9)
    return any(word in name for word in ("switch_mlp.", ".moe.", "share", "experts_"))


def _order(path: str) -> int:
    word = path.rpartition(".")[2]
    return ENDS.index(_END_OF[word]) if word in _END_OF else 0


def layers_with_experts(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that a configuration gives experts to; (0,) where it states no number of layers."""
    names = ("hybrid_override_pattern", "layers_block_type", "mlp_layer_types", "moe_layer_freq")
    kinds = next((hf[name] for name in names[: 2 if hf.get("first_k_dense_replace") else 4] if hf.get(name)), None)
    if isinstance(kinds, str | list):
        return tuple(number for number, kind in enumerate(kinds) if kind in ("E", "moe", "sparse", 1)) or (0,)
    if (listed := _numbers(hf.get("moe_layers_enum"), hf.get("moe_layers"))) is not None:
        return listed
    count, first = (hf.get(key) for key in ("num_hidden_layers", "first_k_dense_replace"))
    first = first if type(first) is int else 0
    if type(count) is not int or not first < count <= MOST_LAYERS:
        return (first,)
    steps = {key: hf.get(key) for key in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")}
    step = next((each for each in steps.values() if type(each) is int and each > 1), 1)
    dense = hf.get("mlp_only_layers")
    dense = dense if isinstance(dense, list) else []
    # Every step-th layer of DeepSeek counts from 0, of the others from 1.
    shift = 0 if step == steps["moe_layer_freq"] else 1
    return tuple(n for n in range(first, count) if (n + shift) % step == 0 and n not in dense) or (first,)


MOST_EXPERTS, MOST_LAYERS = 2**16, 10_000
"""What names are made of at most."""


def _numbers(*stated: object) -> tuple[int, ...] | None:
    """The layers of a list, or of a text with commas; None where neither is stated."""
    for each in stated:
        parts = each.split(",") if isinstance(each, str) else each
        if isinstance(parts, list) and parts and all(str(part).strip().isdigit() for part in parts):
            return tuple(sorted({int(part) for part in parts}))
    return None


Match = Callable[[Module], bool]
_LITERAL = re.compile(r"[\w.\-]+")
CLASSES = ("Linear", "Module")
"""What `torch.nn.Linear` is called in lists of classes."""


def matcher(style: str, patterns: Collection[str]) -> Match:
    """Whether a list names a module. style: the writer, "part" for AutoAWQ. Raises re.error."""
    made: Mapping[str, Callable[[Sequence[str]], Match]] = {
        "transformers": _of_transformers, "compressed-tensors": _of_compressed_tensors,
        "modelopt": _of_modelopt, "quark": _of_quark,
        "part": lambda parts: lambda module: any(part in module.name for part in parts),
    }  # fmt: skip
    return made[style](tuple(dict.fromkeys(patterns))) if patterns else lambda module: False


def _of_transformers(patterns: Sequence[str]) -> Match:
    literal = [each for each in patterns if _LITERAL.fullmatch(each)]
    rest = [each for each in patterns if not _LITERAL.fullmatch(each)]
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    compiled = [re.compile(f"(?:{each}){boundary}") for each in ("|".join(literal), *rest) if each]

    def named(name: str) -> bool:
        return name.endswith(tuple(patterns)) or any(each.match(name) for each in compiled)

    # Routed experts are one module of transformers 5, and modules of their own in checkpoints.
    return lambda module: named(module.name) or (module.holder != "" and named(module.holder))


def _of_compressed_tensors(patterns: Sequence[str]) -> Match:
    names = {each for each in patterns if not each.startswith("re:")}
    compiled = [re.compile(each[3:]) for each in patterns if each.startswith("re:")]
    of_class = any(each in names for each in CLASSES)
    return lambda module: of_class or module.name in names or any(each.match(module.name) for each in compiled)


def _globs(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether one of some globs is a name; most of them are a name, or the start of one."""
    names, starts, others = set[str](), list[str](), list[re.Pattern[str]]()
    for each in patterns:
        if not set(each) & set("*?["):
            names.add(each)
        elif each.endswith("*") and not set(each[:-1]) & set("*?["):
            starts.append(each[:-1])
        else:
            others.append(re.compile(translate(each)))
    begin = tuple(starts)
    return lambda name: name in names or name.startswith(begin) or any(each.match(name) for each in others)


def _of_modelopt(patterns: Sequence[str]) -> Match:
    names, fits = {each for each in patterns if not set(each) & set("*?[")}, _globs(patterns)

    def named(module: Module) -> bool:
        return fits(module.name) or fits(module.holder) or not names.isdisjoint(module.above())

    return named


def _of_quark(patterns: Sequence[str]) -> Match:
    compiled = [re.compile(each[3:]) for each in patterns if each.startswith("re:")]
    fits = _globs(each for each in patterns if not each.startswith("re:"))
    return lambda module: fits(module.name) or any(each.match(module.name) for each in compiled)


def with_layers(block: Block, hf: Mapping[str, Any], layer: int | None) -> Block:
    """The block with the layers that are described: one, or all that have experts."""
    if layer is not None:
        found = layers_with_experts(hf) if block.tensors is None else block.layers
        return replace(block, layers=(layer,), of_model=found)
    if block.tensors is None:
        return replace(block, every=False, layers=layers_with_experts(hf))
    count = hf.get("num_hidden_layers")  # what follows are layers of multi-token prediction
    inside = tuple(n for n in block.layers if type(count) is not int or n < count)
    return replace(block, every=False, layers=inside or block.layers)
