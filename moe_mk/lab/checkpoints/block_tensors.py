"""The tensors of a MoE block, recognised by their shapes whatever their names, and where a checkpoint holds them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_mk.config.equation import FUSED_SHARED_BIAS, MODULES, VECTORS, TensorNames, TensorPart
from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.modules import Act
from moe_mk.kernels.reference.activation import activation
from moe_mk.router.router import Router
from moe_mk.router.topk import SCORING_FUNCS
from moe_mk.shapes import divisors_of
from moe_mk.weights.names import CONVENTIONS, Part, Role


@dataclass
class Mlp:
    """The matrices of one MLP as views of its tensors, (out, in) each."""

    gate: Tensor | None
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor, act: Act) -> Tensor:
        """Compute the MLP of x with an activation."""
        gate = None if self.gate is None else x @ self.gate.T
        h: Tensor = activation(act.name, gate, x @ self.up.T, alpha=act.alpha, limit=act.limit)
        return h @ self.down.T


class Sizes(NamedTuple):
    """Numbers of experts and the hidden size of a block."""

    experts: int
    """With weights, routed ones."""
    hidden: int
    fused: int = 0
    """Shared experts that the router scores like the others, and every token has."""
    zero: int = 0
    """Experts without weights."""


@dataclass
class Tensors:
    """The tensors of a block by purpose."""

    router_EH: Tensor
    vectors: dict[str, Tensor]
    """Of one value an expert, by name."""
    experts: list[Mlp]
    shared: Mlp | None
    shared_gate: Tensor | None
    zeroed: list[Tensor]
    """Biases of experts, which no routing depends on."""
    sizes: Sizes
    latent: tuple[Tensor, Tensor] | None = None
    """The projections of tokens to the width of the experts, and back."""
    scales: dict[str, Tensor] = field(default_factory=dict)
    """Of one value, by name."""

    @property
    def width(self) -> int:
        """The intermediate size of an expert."""
        return self.experts[0].down.shape[1]

    @property
    def shared_width(self) -> int:
        """That of the shared experts; 0 without any."""
        return 0 if self.shared is None else self.shared.down.shape[1]

    @property
    def reach(self) -> int:
        """The width that experts read."""
        return self.sizes.hidden if self.latent is None else self.latent[0].shape[0]

    def bias(self, name: str | None, padding: float) -> Tensor:
        """A vector by name, or zeros, with a value for each of the fused shared experts that it lacks."""
        scored = len(self.router_EH)
        found = self.router_EH.new_zeros(scored - self.sizes.fused) if name is None else self.vectors[name].reshape(-1)
        return functional.pad(found, (0, scored - found.numel()), value=padding)


def is_block(module: nn.Module) -> bool:
    """Whether a module has experts and their router, and none of its children has both."""
    return sizes_of(module) is not None and all(sizes_of(child) is None for child in module.children())


def sizes_of(module: nn.Module) -> Sizes | None:
    """The sizes of a block; None for a module without experts or without their router."""
    tensors = dict(module.named_parameters())
    stacks = Counter(t.shape[0] for t in tensors.values() if t.ndim == 3 and min(t.shape) > 1)
    listed: dict[tuple[str, str], int] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and (found := re.fullmatch(r"(.*?)(?:^|\.)(\d+)\.(.*)", name)):
            listed[found[1], found[3]] = listed.get((found[1], found[3]), 0) + 1
    gates = [
        t for name, t in tensors.items() if t.ndim == 2 and "bias" not in name and not re.search(r"(?:^|\.)\d+\.", name)
    ]
    for num_experts in {*stacks, *listed.values()}:
        if num_experts == 1 or not (stacks or 2 <= list(listed.values()).count(num_experts) <= 3):
            continue
        for gate in gates:
            fused = gate.shape[0] - num_experts
            if fused == 0 and stacks[num_experts] == 1 and (smaller := [n for n in stacks if n < num_experts]):
                return Sizes(max(smaller), gate.shape[1], zero=num_experts - max(smaller))
            if fused == 0 or (0 < fused < num_experts and stacks[fused] > 1):
                return Sizes(num_experts, gate.shape[1], max(fused, 0))
    return None


def tensors_of_block(block: nn.Module, sizes: Sizes) -> Iterator[Tensors]:
    """Every way to read the tensors of a block, which differ in the order of gate and up."""
    num_experts, hidden, fused, zero = sizes
    named = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    named = {name: tensor.detach() for name, tensor in named.items()}
    stacks = {name: t for name, t in named.items() if t.ndim == 3 and t.shape[0] in (num_experts, num_experts + zero)}
    always = {name: t for name, t in named.items() if t.ndim == 3 and t.shape[0] == fused}
    lists: dict[str, dict[int, Tensor]] = {}
    for name, tensor in named.items():
        if tensor.ndim <= 2 and (found := re.fullmatch(r"(.*?(?:^|\.))(\d+)(\..*)", name)):
            lists.setdefault(f"{found[1]}{{e}}{found[3]}", {})[int(found[2])] = tensor
    lists = {name: each for name, each in lists.items() if len(each) == num_experts}
    matrices = {name: list(t[:num_experts]) for name, t in stacks.items()}
    matrices |= {name: [each[e] for e in range(num_experts)] for name, each in lists.items() if each[0].ndim == 2}
    used = {*stacks, *always, *(name.replace("{e}", str(e)) for name in lists for e in range(num_experts))}
    zeroed = [t for name, each in lists.items() if each[0].ndim == 1 for t in each.values()]
    folders = {name.rpartition(".")[0] for name in stacks}
    for name, tensor in named.items():
        if (
            name not in used
            and tensor.ndim == 2
            and tensor.shape[0] == num_experts
            and name.rpartition(".")[0] in folders
        ):
            zeroed.append(tensor)
            used.add(name)
    scored = num_experts + fused + zero
    gates = [name for name, t in named.items() if name not in used and t.shape == (scored, hidden)]
    if not gates:
        raise UnsupportedError("its router is not found", [f"none of its matrices is ({scored}, {hidden})"])
    vectors = {
        name: t
        for name, t in named.items()
        if name not in used and max(t.shape, default=1) == t.numel() in (num_experts, scored) and t.is_floating_point()
    }
    shared_gates = [name for name, t in named.items() if name not in used and t.shape == (1, hidden)]
    scales = {n: t for n, t in named.items() if n not in used and t.numel() == 1 and t.is_floating_point()}
    used |= {*vectors, *shared_gates, *scales}
    left = {name: tensor for name, tensor in named.items() if name not in used}
    for gate, (reach, latent) in itertools.product(gates, _widths(left, matrices, hidden)):
        routed = _readings(matrices, reach, "experts")
        if always:
            own = _readings({n: list(t) for n, t in always.items()}, reach, "shared experts")
            routed = [one + other for one, other in zip(routed, own, strict=False)]
        others = {name: t for name, t in left.items() if name not in (gate, *latent) and t.numel() > 1}
        odd = [name for name, t in others.items() if t.ndim != 2 or hidden not in t.shape]
        if odd:
            listed = [f"{name} of {tuple(others[name].shape)}" for name in odd]
            raise UnsupportedError("it has tensors of no known purpose", listed)
        both_shared = {name: [t] for name, t in others.items()}
        common: list[Any] = _readings(both_shared, hidden, "shared experts") if both_shared else [[None]]
        shared_gate = named[shared_gates[0]] if shared_gates else None
        projections = (named[latent[0]], named[latent[1]]) if latent else None
        for experts, shared in itertools.product(routed, common):
            yield Tensors(named[gate], vectors, experts, shared[0], shared_gate, zeroed, sizes, projections, scales)


def _widths(
    others: Mapping[str, Tensor], matrices: Mapping[str, list[Tensor]], hidden: int
) -> list[tuple[int, tuple[str, ...]]]:
    """The widths that experts can read, and the names of projections to it and back where it is not the hidden size."""
    shapes, found = [each[0].shape for each in matrices.values()], list[tuple[int, tuple[str, ...]]]()
    if not all(hidden in shape for shape in shapes):
        for down, t in others.items():
            fits = t.ndim == 2 and t.shape[1] == hidden and all(t.shape[0] in shape for shape in shapes)
            back = [name for name, other in others.items() if fits and name != down and other.shape == t.shape[::-1]]
            found += [(t.shape[0], (down, name)) for name in back]
    return found or [(hidden, ())]


def _readings(matrices: Mapping[str, list[Tensor]], hidden: int, what: str) -> list[list[Mlp]]:
    """The MLPs that two or three matrices can be."""
    shapes = {name: tuple(each[0].shape) for name, each in matrices.items()}
    if not (found := list(_mlps(matrices, hidden))):
        listed = [f"{name}: {shape}" for name, shape in shapes.items()]
        raise UnsupportedError(f"the {len(matrices)} matrices of its {what} are no MLP of {hidden} values", listed)
    return found


def _mlps(matrices: Mapping[str, list[Tensor]], hidden: int) -> Iterator[list[Mlp]]:
    shapes = {name: tuple(each[0].shape) for name, each in matrices.items()}
    widths = {name: (shape[1] if shape[0] == hidden else shape[0]) for name, shape in shapes.items()}
    if len(matrices) == 3:
        for down in matrices:
            wide = [name for name in matrices if name != down]
            if shapes[wide[0]] != shapes[wide[1]] or shapes[wide[0]] == shapes[down] != (hidden, hidden):
                continue
            turned = shapes[down][0] != hidden
            for names in (wide, wide[::-1]):
                each = zip(*(matrices[name] for name in (*names, down)), strict=True)
                yield [Mlp(*(_turned(tensor, turned) for tensor in parts)) for parts in each]
        return
    if len(matrices) != 2:
        return
    first, second = sorted(matrices, key=lambda name: -widths[name])
    if widths[first] == 2 * widths[second]:
        for order in ("halves", "swapped", "interleaved"):
            mlps = []
            for stored, last in zip(matrices[first], matrices[second], strict=True):
                both, back = _turned(stored, stored.shape[0] == hidden), _turned(last, last.shape[0] != hidden)
                half = both.shape[0] // 2
                one, other = (both[0::2], both[1::2]) if order == "interleaved" else (both[:half], both[half:])
                mlps.append(Mlp(other, one, back) if order == "swapped" else Mlp(one, other, back))
            yield mlps
        return
    for up, down in ((first, second), (second, first)):
        if shapes[up] != shapes[down]:
            yield [
                Mlp(None, _turned(u, u.shape[0] == hidden), _turned(d, d.shape[0] != hidden))
                for u, d in zip(matrices[up], matrices[down], strict=True)
            ]


def _turned(tensor: Tensor, is_turned: bool) -> Tensor:
    return tensor.T if is_turned else tensor


def routings(
    x_TH: Tensor, tensors: Tensors, top_k: int, got_TE: Tensor | None, hints: set[int]
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Every routing of a layer without its scale, simple ones first.

    got_TE: leaves out groups that cannot be. hints: numbers of the configuration. Where as many groups as experts are
    kept, groups show in their scores alone, and are tried if the configuration has their numbers.
    """
    num_experts = len(tensors.router_EH)
    logits_TE, vectors = x_TH @ tensors.router_EH.T, tensors.vectors
    uses: list[dict[str, str]] = [{}, *({"correction": v} for v in vectors), *({"logit": v} for v in vectors)]
    uses += [{"correction": a, "logit": b} for a in vectors for b in vectors if a != b]
    uses += [*({"scale": v} for v in vectors), *({"correction": a, "scale": b} for a in vectors for b in vectors)]
    groups = [(1, 1)]
    for size in divisors_of(num_experts):
        count = num_experts // size
        if 1 < count and size > 1 and not tensors.sizes.zero:
            touched = (
                1 if got_TE is None else int(((got_TE.abs() > 1e-9).view(len(got_TE), count, size).any(2)).sum(1).max())
            )
            groups += [
                (count, kept)
                for kept in range(touched, count)
                if kept * size >= top_k and (kept == touched < min(top_k, count) or {count, kept} <= hints)
            ]
    others = [name for name in sorted(SCORING_FUNCS, key="softmax".__ne__) if name != "masked_softmax"]
    for (count, kept), use, scoring, renormalize, two_best in itertools.chain(
        itertools.product(groups, uses, others, (True, False), (False, True)),
        # Last, as it takes E squared operations; no model has it with groups or vectors.
        itertools.product([(1, 1)], [{}], ["masked_softmax"], (True, False), [False]),
    ):
        if two_best and (count == 1 or "correction" in use):
            continue
        if scoring.startswith("logit_") and "correction" not in use:  # the same as without
            continue
        biased = "correction" in use or two_best or tensors.sizes.fused
        bias = tensors.bias(use.get("correction"), FUSED_SHARED_BIAS).float() if biased else None
        logits = (logits_TE + tensors.bias(use["logit"], 0.0) if "logit" in use else logits_TE).float()
        router = Router(top_k, count, kept, scoring, renormalize)
        found = router(logits, bias)
        weights_TE = torch.zeros_like(logits_TE).scatter_(1, found.ids_TK.long(), found.weights_TK.double())
        if "scale" in use:
            weights_TE = weights_TE * tensors.bias(use["scale"], 1.0)
        settings: dict[str, Any] = {
            "top_k": top_k,
            "scoring_func": scoring,
            "renormalize": renormalize,
            "has_correction_bias": "correction" in use,
            "has_logit_bias": "logit" in use,
            "num_expert_group": count,
            "topk_group": kept,
        }
        more = {"group_score": "two_best"} if two_best else {}
        yield settings | more | ({"has_expert_scale": True} if "scale" in use else {}) | {"vectors": use}, weights_TE


def parts_of(tensors: Tensors, use: Mapping[str, str]) -> dict[str, list[Tensor]]:
    """The tensors of each of `equation.MODULES` and `VECTORS`. use: the vectors that are biases, by what they bias."""
    parts = {"gate": [tensors.router_EH]}
    parts |= {
        key: [tensors.vectors[use[which]]]
        for which, key in (("correction", VECTORS[0]), ("logit", VECTORS[1]))
        if which in use
    }
    if "scale" in use:
        parts[VECTORS[2]] = [{**tensors.vectors, **tensors.scales}[use["scale"]]]
    if tensors.latent is not None:
        parts |= {"fc1_latent_proj": [tensors.latent[0]], "fc2_latent_proj": [tensors.latent[1]]}
    for kind, mlps in (
        ("experts.{e}", tensors.experts[: tensors.sizes.experts]),
        ("shared_experts.{e}", tensors.experts[tensors.sizes.experts :]),
        ("shared_experts", [tensors.shared] if tensors.shared else []),
    ):
        for projection in ("gate", "up", "down"):
            if getattr(mlps[0], projection, None) is not None if mlps else False:
                parts[f"{kind}.{projection}_proj"] = [getattr(mlp, projection) for mlp in mlps]
    return parts | ({} if tensors.shared_gate is None else {"shared_expert_gate": [tensors.shared_gate]})


def part_in(saved: Mapping[str, Tensor], wanted: Tensor, expert: int | None) -> TensorPart | None:
    """The saved tensor that holds a matrix or vector, and which part of it."""
    for name, tensor in saved.items():
        each = tensor[expert] if expert is not None and tensor.ndim == wanted.ndim + 1 else tensor
        for transposed in (False, True) if each.ndim == 2 else (False,):
            turned = each.T if transposed else each
            half = turned.shape[0] // 2 if turned.ndim else 0
            for rows, part in (
                ("all", slice(None)),
                ("first", slice(half)),
                ("second", slice(half, None)),
                ("even", slice(0, None, 2)),
                ("odd", slice(1, None, 2)),
            ):
                if turned.ndim and turned[part].shape == wanted.shape and torch.equal(turned[part], wanted):
                    return TensorPart(tensor=name, rows=rows, transposed=transposed)
    return None


def template_of(first: str, last: str, number: int) -> str:
    """A name with {e} in place of the expert, from those of expert 0 and of the last one."""
    for found in re.finditer(r"(?<=\.)0(?=\.)", first):
        if first[: found.start()] + str(number) + first[found.end() :] == last and first != last:
            return first[: found.start()] + "{e}" + first[found.end() :]
    return first


def numbered(parts: Mapping[str, str | TensorPart], number: int) -> dict[str, str | TensorPart]:
    """The names of tensors with {N} in place of the number of their layer.

    Raises UnsupportedError where they have no common prefix with the number.
    """
    spelled = [part if isinstance(part, str) else part.tensor for part in parts.values()]
    prefix, at = _common(spelled), f".{number}."
    if at not in prefix:
        raise UnsupportedError(
            f"the tensors of layer {number} have no common prefix with its number", sorted(spelled)[:8]
        )
    head = prefix.rpartition(at)[0]
    return {
        key: _spelled(part, lambda name: f"{head}.{{N}}.{name[len(head) + len(at) :]}") for key, part in parts.items()
    }


def names_of(parts: Mapping[str, str | TensorPart]) -> TensorNames | None:
    """Names with {N} below their common prefix; None for those that checkpoints of DeepSeek-V3 have."""
    prefix = _common(part if isinstance(part, str) else part.tensor for part in parts.values())
    local = {key: _spelled(part, lambda name: name.removeprefix(prefix)) for key, part in parts.items()}
    official = CONVENTIONS["official"]
    names = {key: str(part).replace("{e}", "0") + ".weight" * (key in MODULES) for key, part in local.items()}
    if prefix == official.prefix and all(
        key in OFFICIAL_PARTS and name == official.spell(OFFICIAL_PARTS[key]) for key, name in names.items()
    ):
        return None
    return TensorNames(prefix=prefix, parts=local)


def _common(names: Iterable[str]) -> str:
    """The words that names have in common at their beginning."""
    common = zip(*(name.split(".") for name in names), strict=False)
    return "".join(f"{words[0]}." for words in itertools.takewhile(lambda words: len(set(words)) == 1, common))


def _spelled(part: str | TensorPart, change: Callable[[str], str]) -> str | TensorPart:
    return change(part) if isinstance(part, str) else part.model_copy(update={"tensor": change(part.tensor)})


OFFICIAL_PARTS = {
    "gate": Part(Role.ROUTER), VECTORS[0]: Part(Role.BIAS), VECTORS[1]: Part(Role.LOGIT_BIAS),
    "shared_expert_gate": Part(Role.SHARED_GATE), VECTORS[2]: Part(Role.EXPERT_SCALE),
    "fc1_latent_proj": Part(Role.LATENT, "down"), "fc2_latent_proj": Part(Role.LATENT, "up"),
    **{f"experts.{{e}}.{projection}_proj": Part(Role.EXPERT, projection, 0) for projection in ("gate", "up", "down")},
    **{f"shared_experts.{projection}_proj": Part(Role.SHARED, projection) for projection in ("gate", "up", "down")},
}  # fmt: skip
"""What the names of an equation mean to a convention."""


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a module, by name."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
