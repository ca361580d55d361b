"""Naming conventions of the tensors of MoE blocks in checkpoints, and the search for blocks among all names.

A name is a prefix, "model.layers.3.mlp.", and a local name, "experts.0.gate_proj.weight". Prefixes are found by looking
for ".experts."; the local names decide the convention. Sources: files of deepseek-ai/DeepSeek-V3 and its `convert.py`,
transformers 5 (fused experts, gpt-oss, DeepSeek-V4's table), Mixtral-8x7B, MiniMax-M2 (bias beside the gate),
compressed-tensors and modelopt (`weight_scale`), GPTQ and AWQ (`qweight`), llama.cpp (`blk.3.ffn_up_exps.weight`), MLX
(`switch_mlp.up_proj.scales`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from itertools import product
from typing import Any

_PREFIX = re.compile(
    r"^((?:.*?\.)??)(?:experts\.|switch_mlp\.|ffn_(?:gate|up|down)(?:_exps|\.\d{1,9})\.|moe\.(?:gate|up|down)_proj\.)"
)
_IN_LAYER = re.compile(r"(?:^|\.)\d+\.$")
_OF_BLOCK = ("experts.", "moe.", "share_expert.", "router.", "pre_feedforward_layernorm_2.")
"""How local names of a block start whose prefix is that of its whole decoder layer."""
_NUMBERED = re.compile(r"^(experts|ffn_(?:gate|up|down))\.(\d{1,9})\.")
_NUMBER = re.compile(r"(?:^|\.)(\d{1,9})(?=\.)")


class Role(Enum):
    """The purpose of a tensor."""

    ROUTER = "router"
    BIAS = "bias"
    LOGIT_BIAS = "logit bias"
    TABLE = "table of experts by token id"
    EXPERT = "expert"
    SHARED = "shared"
    SHARED_GATE = "gate of the shared experts"
    LATENT = "projection to or from the width of the experts"
    INPUT_NORM = "norm of the layer's input"
    EXPERT_SCALE = "factors of the experts' routing weights"
    IMAGE_BIAS = "bias of tokens of images"


@dataclass(frozen=True)
class Part:
    """One tensor of a MoE block, independent of its name."""

    role: Role
    projection: str = ""
    """gate, up, down or gate_up; "" for router and bias."""
    expert: int | None = None
    """None: all experts in one tensor, or not a routed expert."""
    extra: str = ""
    """Which tensor of a projection: "" for the values; "scale"; "global", the global f32 scale; "input", a calibrated
    activation scale; "bias"; of packed integers "zeros" (zero points), "order" (of columns), "shape" (logical); "plain"
    in their place."""


_LATENT = {"down": "fc1_latent_proj.weight", "up": "fc2_latent_proj.weight", "norm": "latent_norm.weight"}
_INPUT_NORM = {"experts": "pre_feedforward_layernorm_2.weight", "router": "router.scale"}


@dataclass(frozen=True)
class Convention:
    """A naming convention. Templates contain {e}, the expert, and {p}, the name of the projection."""

    name: str
    prefix: str
    """Prefix of the block in written checkpoints; {N} is the layer."""
    router: str
    bias: str
    expert: Mapping[str, str]
    """Templates of the tensors of a projection of routed experts, by `Part.extra`; "" for one without a name."""
    shared: Mapping[str, str]
    expert_words: Mapping[str, str]
    shared_words: Mapping[str, str]
    logit_bias: str = ""
    """A bias of the router's logits, which affects choice and weights; "" if the convention has none."""
    table: str = "gate.tid2eid"
    """The experts of every token of the vocabulary, in layers that choose by token id."""
    shared_gate: str = "shared_expert_gate.weight"
    """The weights of one logit a token, whose sigmoid multiplies the shared experts' output."""
    latent: Mapping[str, str] = field(default_factory=lambda: _LATENT)
    """The projections of tokens to the width of the experts ("down") and back ("up"), and the "norm" before it."""
    input_norm: Mapping[str, str] = field(default_factory=lambda: _INPUT_NORM)
    """The weights of the normalised input, of the "experts" and of the "router"."""
    router_scale: str = "router.per_expert_scale"
    """The factor of each expert's routing weights."""
    order: str = "gate_up"
    """The order of gate and up in a tensor with both: "gate_up", "up_gate" or "interleaved"."""
    packing: str = ""
    """How matrices are packed, one of `packed_layouts.PACKINGS`; "" where values have the shape of their scheme."""
    divides: bool = False
    """Whether the factors above scales, of values and of inputs, are stored as what these are divided by."""
    blocks_apart: bool = False
    """Whether a row of packed values is written as (blocks, bytes of a block)."""

    @property
    def fused(self) -> bool:
        """Whether one tensor holds all experts, with gate and up in one."""
        return "gate_up" in self.expert_words

    @property
    def stacked(self) -> bool:
        """Whether one tensor holds a projection of all experts, gate and up apart."""
        return not self.fused and "{e}" not in self.expert[""]

    @cached_property
    def of_layer(self) -> dict[Part, str]:
        """The names of tensors that belong to no projection of experts; "" for those without one."""
        named = {Role.ROUTER: self.router, Role.BIAS: self.bias, Role.IMAGE_BIAS: f"{self.bias}_vl",
                 Role.LOGIT_BIAS: self.logit_bias, Role.TABLE: self.table, Role.SHARED_GATE: self.shared_gate,
                 Role.EXPERT_SCALE: self.router_scale}  # fmt: skip
        found = {Part(role): name for role, name in named.items()}
        found |= {Part(Role.LATENT, which): name for which, name in self.latent.items()}
        return found | {Part(Role.INPUT_NORM, which): name for which, name in self.input_norm.items()}

    def spell(self, part: Part) -> str:
        if part.role not in (Role.EXPERT, Role.SHARED):
            word = {"scale": "scales", "zeros": "biases"}.get(part.extra, "weight")  # of gates that MLX packs
            return self.of_layer[replace(part, extra="")].replace("weight", word)
        of_shared = part.role is Role.SHARED
        words = self.shared_words if of_shared else self.expert_words
        template = (self.shared if of_shared else self.expert)[part.extra]
        return template.format(e=part.expert, p=words[part.projection])

    def parse(self, local: str) -> Part | None:
        """The part of a local name; None if the convention does not define it."""
        part, expert = _parts(self.name).get(_template(local)), _NUMBERED.match(local)
        return part if part is None or expert is None else replace(part, expert=int(expert[2]))

    def holds(self, role: Role, extra: str) -> bool:
        """Whether the convention defines a name for an additional tensor of a projection."""
        return extra in (self.shared if role is Role.SHARED else self.expert)


_PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_FUSED_PROJ = {"gate_up": "gate_up_proj", "down": "down_proj"}
_W123 = {"gate": "w1", "up": "w3", "down": "w2"}

_EXPERT, _SHARED = "experts.{e}.{p}.", "shared_experts.{p}."


def _in(folder: str, words: Mapping[str, str]) -> dict[str, str]:
    """The templates of tensors by their last names."""
    return {extra: folder + word for extra, word in words.items()}


_INVERSE = {"": "weight", "scale": "weight_scale_inv"}
_NEXT_TO = {"": "weight", "scale": "weight_scale"}
OFFICIAL = Convention(
    name="official", prefix="model.layers.{N}.mlp.", router="gate.weight", bias="gate.e_score_correction_bias",
    expert=_in(_EXPERT, {**_INVERSE, "bias": "bias"}), shared=_in(_SHARED, _INVERSE),
    expert_words=_PROJ, shared_words=_PROJ, logit_bias="gate.bias",
)  # fmt: skip
_STACKS = {"": "experts.{p}", "scale": "experts.{p}_scale_inv"}
FUSED = replace(OFFICIAL, name="fused", expert=_STACKS, expert_words=_FUSED_PROJ, logit_bias="")
STACKED = replace(FUSED, name="stacked", expert_words=_PROJ, expert={**_STACKS, "bias": "experts.{p}_bias"})
MIXTRAL = replace(
    OFFICIAL, name="mixtral", prefix="model.layers.{N}.block_sparse_moe.", bias="e_score_correction_bias",
    expert=_in(_EXPERT, _INVERSE), expert_words=_W123, shared_words=_W123, logit_bias="",
)  # fmt: skip
_SHORT = {"": "weight", "scale": "scale"}
CONVERTED = replace(
    MIXTRAL, name="converted", prefix="layers.{N}.ffn.", bias="gate.bias", expert=_in(_EXPERT, _SHORT),
    shared=_in(_SHARED, _SHORT),
)  # fmt: skip
_CALIBRATED = {**_NEXT_TO, "global": "weight_scale_2", "input": "input_scale"}
SCALED = replace(
    OFFICIAL, name="scaled", expert=_in(_EXPERT, {**_CALIBRATED, "bias": "bias"}), shared=_in(_SHARED, _CALIBRATED)
)
GPT_OSS = replace(
    FUSED, name="gpt_oss", router="router.weight", bias="router.e_score_correction_bias",
    expert={"": "experts.{p}_blocks", "scale": "experts.{p}_scales", "bias": "experts.{p}_bias"},
    shared=_in(_SHARED, _NEXT_TO), logit_bias="router.bias", order="interleaved", blocks_apart=True,
)  # fmt: skip
GPT_OSS_PLAIN = replace(
    GPT_OSS, name="gpt_oss_plain", expert={**GPT_OSS.expert, "": "experts.{p}", "scale": ""}, blocks_apart=False
)
PACKED_WORDS: Mapping[str, Mapping[str, str]] = {
    "compressed_tensors": {"": "weight_packed", "scale": "weight_scale", "zeros": "weight_zero_point",
                           "shape": "weight_shape", "order": "weight_g_idx", "bias": "bias"},
    "gptq": {"": "qweight", "scale": "scales", "zeros": "qzeros", "order": "g_idx", "bias": "bias"},
    "awq": {"": "qweight", "scale": "scales", "zeros": "qzeros", "bias": "bias"},
    "mlx": {"": "weight", "scale": "scales", "zeros": "biases", "bias": "bias"},
}  # fmt: skip
"""The tensors of a packed matrix, which have a folder of their own, as of a linear module."""


def _packed(packing: str, like: Convention) -> Convention:
    """Names of packed integers. Shared experts have the names of plain weights, or those of packed ones; no biases."""
    words = PACKED_WORDS[packing]
    shared = {extra: word for extra, word in words.items() if extra != "bias"}
    return replace(
        like, name=packing if like is OFFICIAL else f"{like.name}_{packing}", expert=_in(_EXPERT, words),
        shared=_in(_SHARED, {**shared, "plain": "weight"}), packing=packing,
    )  # fmt: skip


# AWQ first: its names are a part of GPTQ's.
COMPRESSED, AWQ, GPTQ = (_packed(packing, OFFICIAL) for packing in ("compressed_tensors", "awq", "gptq"))
_PACKED = (COMPRESSED, AWQ, GPTQ, *(_packed(packing, MIXTRAL) for packing in ("compressed_tensors", "awq", "gptq")))
MLX = _packed("mlx", OFFICIAL)
_GGUF_WORDS = {"gate": "gate", "up": "up", "down": "down"}
GGUF_NAMES = Convention(
    name="gguf", prefix="blk.{N}.", router="ffn_gate_inp.weight", bias="exp_probs_b.bias",
    expert={"": "ffn_{p}_exps.weight", "scale": "", "bias": "ffn_{p}_exps.bias"},
    shared={"": "ffn_{p}_shexp.weight", "scale": ""}, expert_words=_GGUF_WORDS, shared_words=_GGUF_WORDS,
    logit_bias="ffn_gate_inp.bias", table="", shared_gate="ffn_gate_inp_shexp.weight", packing="gguf",
)  # fmt: skip


def _renamed(name: str, like: Convention, words: Mapping[str, str], **others: Any) -> Convention:
    """The convention with other words in its templates."""
    found = {"expert": dict(like.expert), "shared": dict(like.shared)}
    for templates, (word, other) in product(found.values(), words.items()):
        templates |= {extra: template.replace(word, other) for extra, template in templates.items()}
    return replace(like, **{"name": name, **found, **others})


_STACK = {"experts.{e}.": "switch_mlp."}
_MLX = (
    MLX, _renamed("mlx_stacked", MLX, _STACK),
    _renamed("mlx_stacked_one_shared", MLX, {**_STACK, "shared_experts.": "shared_expert."}),
    _renamed("mlx_stacked_mixtral", _packed("mlx", MIXTRAL), _STACK, expert_words=_PROJ, shared_words=_PROJ),
    _renamed("mlx_stacked_gpt_oss", MLX, {"experts.{e}.": "experts."},
             router=GPT_OSS.router, bias=GPT_OSS.bias, logit_bias=GPT_OSS.logit_bias),
)  # fmt: skip
_FLOATS = {".weight": ".weight_packed", "weight_packed_scale_2": "weight_global_scale",
           "weight_packed_scale": "weight_scale", "input_scale": "input_global_scale"}  # fmt: skip
PACKED = _renamed("packed", SCALED, _FLOATS, divides=True)
PACKED = replace(PACKED, shared={**PACKED.shared, "plain": SCALED.shared[""]})
_ONE_SHARED = tuple(
    _renamed(f"{like.name}_one_shared", like, {"shared_experts.": "shared_expert."})
    for like in (OFFICIAL, FUSED, STACKED, SCALED, COMPRESSED, PACKED, AWQ, GPTQ)
)
"""As the Qwen families spell their shared expert."""
_GGUF_HALVES = {"gate_up": "gate_up", "down": "down"}
GGUF_ONE_BY_ONE = replace(
    GGUF_NAMES, name="gguf_one_by_one", expert={"": "ffn_{p}.{e}.weight", "scale": "", "bias": "ffn_{p}.{e}.bias"}
)
"""One tensor an expert, as llama.cpp wrote Mixtral before April 2024."""
GGUF_FUSED = replace(
    GGUF_NAMES, name="gguf_fused", expert_words=_GGUF_HALVES, expert={"": GGUF_NAMES.expert[""], "scale": ""}
)
MINIMAX_M3 = replace(MIXTRAL, name="minimax_m3", shared_words=_PROJ)
_M3_SCALED = replace(SCALED, name="minimax_m3_scaled", prefix=MIXTRAL.prefix, bias=MIXTRAL.bias, expert_words=_W123)
KIMI_K3 = replace(
    MIXTRAL, name="kimi_k3", bias="gate.e_score_correction_bias", shared_words=_PROJ,
    expert=_in(_EXPERT, {"": "weight_packed", "scale": "weight_scale"}),
    latent={"down": "routed_expert_down_proj.weight", "up": "routed_expert_up_proj.weight",
            "norm": "routed_expert_norm.weight"},
)  # fmt: skip
KIMI_LINEAR = replace(KIMI_K3, name="kimi_linear", expert=MIXTRAL.expert)
_KIMI_PACKED = tuple(_packed(packing, KIMI_LINEAR) for packing in ("compressed_tensors", "awq", "gptq"))
LLAMA4 = replace(
    FUSED, name="llama4", prefix="language_model.model.layers.{N}.feed_forward.", router="router.weight",
    shared=_in("shared_expert.{p}.", _INVERSE),
)  # fmt: skip
_LLAMA4 = tuple(
    replace(
        _renamed(f"llama4_{like.name}", like, {"shared_experts.": "shared_expert."}), prefix=LLAMA4.prefix,
        router="router.weight",
    )
    for like in (OFFICIAL, SCALED, COMPRESSED, PACKED, AWQ, GPTQ)
)  # fmt: skip
"""Quantised experts are modules of their own."""
_GEMMA4 = tuple(
    replace(
        like, name="gemma4" if like is FUSED else f"gemma4_{like.name}", prefix="model.language_model.layers.{N}.",
        router="router.proj.weight",
    )
    for like in (FUSED, OFFICIAL, SCALED, COMPRESSED, PACKED, AWQ, GPTQ)
)  # fmt: skip
"""Experts and router are next to the dense MLP of their decoder layer."""
LLAMA4_ROWS = replace(
    LLAMA4, name="llama4_rows", expert={"": "experts.{p}", "scale": "experts.{p}_scale"},
    shared=_in("shared_expert.{p}.", _NEXT_TO),
)  # fmt: skip
"""Stacks in FP8 with a scale for each output, as fbgemm writes them."""
LLAMA4_WHOLE = replace(
    LLAMA4_ROWS, name="llama4_whole",
    expert={"": "experts.{p}", "scale": "experts.{p}_weight_scale", "input": "experts.{p}_input_scale"},
    shared=_in("shared_expert.{p}.", {**_NEXT_TO, "input": "input_scale"}),
)  # fmt: skip
"""Stacks in FP8 with one scale, as modelopt writes them."""
LING = replace(OFFICIAL, name="ling", bias="gate.expert_bias")
XVERSE = replace(OFFICIAL, name="xverse", router="router.weight", bias="router.e_score_correction_bias")
_LONGCAT = tuple(
    replace(
        like, name="longcat" if like is OFFICIAL else f"longcat_{like.name}", router="router.classifier.weight",
        bias="router.e_score_correction_bias", logit_bias="",
    )
    for like in (OFFICIAL, SCALED, COMPRESSED)
)  # fmt: skip
STEP = replace(
    FUSED, name="step", prefix="model.layers.{N}.", router="moe.gate.weight", bias="moe.router_bias",
    expert=_in("moe.{p}.", _INVERSE), shared=_in("share_expert.{p}.", _INVERSE), expert_words=_PROJ,
)  # fmt: skip
"""One tensor a projection of all experts, next to the shared expert."""
_SCALED_W123 = tuple(
    replace(SCALED, name=f"{like.name}_scaled", prefix=like.prefix, bias=like.bias, expert_words=_W123,
            shared=like.shared, shared_words=_W123)
    for like in (MIXTRAL, CONVERTED)
)  # fmt: skip
"""modelopt's scales under the names of MiniMax-M2 and of DeepSeek-V4, whose shared experts keep their own format."""
_QUARK = tuple(
    _renamed(f"{like.name}_quark", like, {"input_scale": "input_scale_2"})
    for like in (SCALED, _M3_SCALED, *_SCALED_W123, *_ONE_SHARED, *_LLAMA4, *_GEMMA4, *_LONGCAT)
    if "input" in like.expert and not like.divides
)
"""NVFP4 of Quark: `input_scale_2` is the static activation scale."""
_MIXTRAL_PACKED = replace(
    PACKED, name="mixtral_packed", prefix=MIXTRAL.prefix, bias=MIXTRAL.bias, expert_words=_W123, shared_words=_W123
)

CONVENTIONS: dict[str, Convention] = {
    c.name: c
    for c in (
        OFFICIAL, FUSED, STACKED, MIXTRAL, CONVERTED, SCALED, GPT_OSS, GPT_OSS_PLAIN, *_PACKED, PACKED, _MIXTRAL_PACKED,
        GGUF_NAMES, GGUF_FUSED, GGUF_ONE_BY_ONE, *_ONE_SHARED, *_SCALED_W123, MINIMAX_M3, _M3_SCALED, STEP, KIMI_K3,
        KIMI_LINEAR, LLAMA4,
        LING, XVERSE, *_LLAMA4, *_GEMMA4, *_LONGCAT, LLAMA4_ROWS, LLAMA4_WHOLE, *_QUARK, *_KIMI_PACKED,
        *_MLX,
    )
}  # fmt: skip


@cache
def _parts(name: str) -> dict[str, Part]:
    """The part of each local name with {e} for the expert; of rows with the same name, the first counts."""
    it = CONVENTIONS[name]
    rows: list[tuple[str, Part, Mapping[str, str]]] = []
    for role, templates, words in (
        (Role.EXPERT, it.expert, it.expert_words),
        (Role.SHARED, it.shared, it.shared_words),
    ):
        projections = {word: projection for projection, word in words.items()}
        rows += [(template, Part(role, extra=extra), projections) for extra, template in templates.items()]
    rows += [(name, part, {}) for part, name in it.of_layer.items()]
    if it.packing == "mlx":  # which packs gates too
        gates = [Part(role, extra=extra) for role in (Role.ROUTER, Role.SHARED_GATE) for extra in ("scale", "zeros")]
        rows += [(it.spell(part), part, {}) for part in gates]
    return {
        template.replace("{p}", word): replace(like, projection=projection)
        for template, like, words in reversed(rows) if template
        for word, projection in (words.items() if "{p}" in template else [("", like.projection)])
    }  # fmt: skip


def _template(local: str) -> str:
    return _NUMBERED.sub(r"\1.{e}.", local.replace("{", "{{"))


def recognise(
    local_names: Iterable[str],
    among: Sequence[Convention] = (),
    fits: Callable[[Convention], bool] = lambda convention: True,
) -> Convention:
    """The convention that defines most of the local names of a block; in a tie one that fits, then the earlier one.

    among: () is all. GPTQ without g_idx has the names of AWQ: see `completeness.recognise_block`.
    """
    found, conventions = Counter(map(_template, local_names)), among or tuple(CONVENTIONS.values())
    defined = [sum(found[name] for name in found.keys() & _parts(each.name).keys()) for each in conventions]
    tied = [each for each, count in zip(conventions, defined, strict=True) if count == max(defined)]
    return next(filter(fits, tied), tied[0])


def block_prefixes(names: Iterable[str]) -> list[str]:
    """The prefixes of all MoE blocks among the names of a checkpoint, in order of layer."""
    # Up to "experts." few names differ: an index may have a million.
    heads = {
        name[: at + len("experts.")] if (at := name.find("experts.")) >= 0 else name
        for name in names
        if any(word in name for word in ("experts.", "switch_mlp.", "ffn_", "moe."))
    }
    found = {match[1] for head in heads if (match := _PREFIX.match(head))}
    return sorted(found, key=lambda prefix: (-1 if (layer := layer_of(prefix)) is None else layer, prefix))


def local_names(names: Iterable[str], prefix: str) -> list[str]:
    """The names below a prefix without it; of a prefix that is a decoder layer's, those of its MoE block alone."""
    local = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    if not _IN_LAYER.search(prefix) or prefix.startswith("blk."):
        return local
    return [name for name in local if name.startswith(_OF_BLOCK)]


def layer_of(prefix: str) -> int | None:
    """The layer of a block's prefix: its last number; None if it has none."""
    numbers = _NUMBER.findall(prefix)
    return int(numbers[-1]) if numbers else None
