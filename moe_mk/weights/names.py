"""How checkpoints name the tensors of a MoE block: conventions as data, and where the blocks lie among all names.

A name is a prefix, "model.layers.3.mlp.", and a local name, "experts.0.gate_proj.weight". Prefixes are found by looking
for ".experts."; the local names decide the convention. Sources: files of deepseek-ai/DeepSeek-V3 and its `convert.py`,
transformers 5 (fused experts), Mixtral-8x7B, MiniMax-M2 (bias beside the gate).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

_PREFIX = re.compile(r"^((?:.*?\.)??)experts\.")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.)")


class Role(Enum):
    """What a tensor serves."""

    ROUTER = "router"
    BIAS = "bias"
    EXPERT = "expert"
    SHARED = "shared"


@dataclass(frozen=True)
class Part:
    """What one tensor of a MoE block is, whatever it is called."""

    role: Role
    projection: str = ""
    """gate, up, down or gate_up; "" for router and bias."""
    expert: int | None = None
    """None: all experts in one tensor, or not a routed expert."""
    is_scale: bool = False


@dataclass(frozen=True)
class Convention:
    """One way to name the tensors of a block. Templates hold {e}, the expert, and {p}, the projection's word."""

    name: str
    prefix: str
    """Where writers put the block; {N} is the layer."""
    router: str
    bias: str
    expert: str
    expert_scale: str
    shared: str
    shared_scale: str
    expert_words: Mapping[str, str]
    shared_words: Mapping[str, str]

    @property
    def fused(self) -> bool:
        """Whether one tensor holds all experts, with gate and up in one."""
        return "gate_up" in self.expert_words

    def spell(self, part: Part) -> str:
        """The local name of a part."""
        if part.role is Role.ROUTER:
            return self.router
        if part.role is Role.BIAS:
            return self.bias
        if part.role is Role.SHARED:
            template, words = (self.shared_scale if part.is_scale else self.shared), self.shared_words
        else:
            template, words = (self.expert_scale if part.is_scale else self.expert), self.expert_words
        return template.format(e=part.expert, p=words[part.projection])

    def parse(self, local: str) -> Part | None:
        """The part that a local name means, None if the convention does not know it."""
        for pattern, role, is_scale, words in _patterns(self.name):
            found = pattern.fullmatch(local)
            if found is not None:
                groups = found.groupdict()
                expert = groups.get("e")
                return Part(role, words.get(groups.get("p", ""), ""), None if expert is None else int(expert), is_scale)
        return None


_PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_FUSED_PROJ = {"gate_up": "gate_up_proj", "down": "down_proj"}
_W123 = {"gate": "w1", "up": "w3", "down": "w2"}

OFFICIAL = Convention(
    name="official", prefix="model.layers.{N}.mlp.", router="gate.weight", bias="gate.e_score_correction_bias",
    expert="experts.{e}.{p}.weight", expert_scale="experts.{e}.{p}.weight_scale_inv",
    shared="shared_experts.{p}.weight", shared_scale="shared_experts.{p}.weight_scale_inv",
    expert_words=_PROJ, shared_words=_PROJ,
)  # fmt: skip
FUSED = Convention(
    name="fused", prefix="model.layers.{N}.mlp.", router="gate.weight", bias="gate.e_score_correction_bias",
    expert="experts.{p}", expert_scale="experts.{p}_scale_inv",
    shared="shared_experts.{p}.weight", shared_scale="shared_experts.{p}.weight_scale_inv",
    expert_words=_FUSED_PROJ, shared_words=_PROJ,
)  # fmt: skip
MIXTRAL = Convention(
    name="mixtral", prefix="model.layers.{N}.block_sparse_moe.", router="gate.weight", bias="e_score_correction_bias",
    expert="experts.{e}.{p}.weight", expert_scale="experts.{e}.{p}.weight_scale_inv",
    shared="shared_experts.{p}.weight", shared_scale="shared_experts.{p}.weight_scale_inv",
    expert_words=_W123, shared_words=_W123,
)  # fmt: skip
CONVERTED = Convention(
    name="converted", prefix="layers.{N}.ffn.", router="gate.weight", bias="gate.bias",
    expert="experts.{e}.{p}.weight", expert_scale="experts.{e}.{p}.scale",
    shared="shared_experts.{p}.weight", shared_scale="shared_experts.{p}.scale",
    expert_words=_W123, shared_words=_W123,
)  # fmt: skip

CONVENTIONS: dict[str, Convention] = {c.name: c for c in (OFFICIAL, FUSED, MIXTRAL, CONVERTED)}


@cache
def _patterns(name: str) -> list[tuple[re.Pattern[str], Role, bool, Mapping[str, str]]]:
    it = CONVENTIONS[name]
    expert, shared = (
        {word: projection for projection, word in words.items()} for words in (it.expert_words, it.shared_words)
    )
    rows: tuple[tuple[str, Role, bool, Mapping[str, str]], ...] = (
        (it.expert, Role.EXPERT, False, expert),
        (it.expert_scale, Role.EXPERT, True, expert),
        (it.shared, Role.SHARED, False, shared),
        (it.shared_scale, Role.SHARED, True, shared),
        (it.router, Role.ROUTER, False, {}),
        (it.bias, Role.BIAS, False, {}),
    )
    return [(_compile(template, words), role, is_scale, words) for template, role, is_scale, words in rows]


def _compile(template: str, words: Mapping[str, str]) -> re.Pattern[str]:
    pattern = re.escape(template).replace(r"\{e\}", r"(?P<e>\d+)")
    return re.compile(pattern.replace(r"\{p\}", f"(?P<p>{'|'.join(words)})"))


def recognise(local_names: Iterable[str]) -> Convention:
    """The convention that knows most of the local names of a block; the earlier one in a tie."""
    names = list(local_names)
    return max(CONVENTIONS.values(), key=lambda c: sum(c.parse(name) is not None for name in names))


def block_prefixes(names: Iterable[str]) -> list[str]:
    """The prefixes of all MoE blocks among the names of a checkpoint, in order of layer."""
    found = {match[1] for name in names if "experts." in name and (match := _PREFIX.match(name))}
    return sorted(found, key=lambda prefix: (-1 if (layer := layer_of(prefix)) is None else layer, prefix))


def layer_of(prefix: str) -> int | None:
    """The layer that a block's prefix names: its last number; None if it has none."""
    numbers = _NUMBER.findall(prefix)
    return int(numbers[-1]) if numbers else None
