"""The tensors of a MoE block, recognised by their shapes whatever their names, and where a checkpoint holds them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_mk.config.equation import MODULES, VECTORS, TensorNames, TensorPart
from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.modules import Act
from moe_mk.kernels.reference.activation import activation
from moe_mk.weights.names import Part, Role, block_prefixes, layer_of, recognise


@dataclass
class Mlp:
    """The matrices of one MLP as views of its tensors, (out, in) each."""

    gate: Tensor | None
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor, act: Act) -> Tensor:
        """What the MLP computes of x."""
        gate = None if self.gate is None else x @ self.gate.T
        h: Tensor = activation(act.name, gate, x @ self.up.T, alpha=act.alpha, limit=act.limit)
        return h @ self.down.T


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


def is_block(module: nn.Module) -> bool:
    """Whether a module has experts and their router, and none of its children has both."""
    return sizes_of(module) is not None and all(sizes_of(child) is None for child in module.children())


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Experts and hidden size of a block; None for a module without experts or without their router."""
    tensors = dict(module.named_parameters())
    stacks = [t.shape[0] for t in tensors.values() if t.ndim == 3 and min(t.shape) > 1]
    listed: dict[tuple[str, str], int] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and (found := re.fullmatch(r"(.*?)(?:^|\.)(\d+)\.(.*)", name)):
            listed[found[1], found[3]] = listed.get((found[1], found[3]), 0) + 1
    for num_experts in {*stacks, *listed.values()}:
        gates = [
            t
            for name, t in tensors.items()
            if t.ndim == 2
            and t.shape[0] == num_experts
            and "bias" not in name
            and not re.search(r"(?:^|\.)\d+\.", name)
        ]
        if num_experts > 1 and gates and (stacks or 2 <= list(listed.values()).count(num_experts) <= 3):
            return num_experts, gates[0].shape[1]
    return None


def tensors_of_block(block: nn.Module, num_experts: int, hidden: int) -> Iterator[Tensors]:
    """Every way to read the tensors of a block, which differ in the order of gate and up."""
    named = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    named = {name: tensor.detach() for name, tensor in named.items()}
    stacks = {
        name: t for name, t in named.items() if t.ndim == 3 and t.shape[0] == num_experts and hidden in t.shape[1:]
    }
    lists: dict[str, dict[int, Tensor]] = {}
    for name, tensor in named.items():
        if tensor.ndim <= 2 and (found := re.fullmatch(r"(.*?(?:^|\.))(\d+)(\..*)", name)):
            lists.setdefault(f"{found[1]}{{e}}{found[3]}", {})[int(found[2])] = tensor
    lists = {name: each for name, each in lists.items() if len(each) == num_experts}
    matrices = {name: list(t) for name, t in stacks.items()}
    matrices |= {name: [each[e] for e in range(num_experts)] for name, each in lists.items() if each[0].ndim == 2}
    used = {*stacks, *(name.replace("{e}", str(e)) for name in lists for e in range(num_experts))}
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
    gates = [name for name, t in named.items() if name not in used and t.shape == (num_experts, hidden)]
    if not gates:
        raise UnsupportedError("its router is not found", [f"none of its matrices is ({num_experts}, {hidden})"])
    vectors = {
        name: t
        for name, t in named.items()
        if name not in used and t.numel() == num_experts and t.is_floating_point() and t.ndim <= 2
    }
    shared_gates = [name for name, t in named.items() if name not in used and t.shape == (1, hidden)]
    used |= {*vectors, *shared_gates}
    routed = _readings(matrices, hidden, "experts")
    for gate in gates:
        others = {name: t for name, t in named.items() if name not in used | {gate} and t.numel() > 1}
        odd = [name for name, t in others.items() if t.ndim != 2 or hidden not in t.shape]
        if odd:
            listed = [f"{name} of {tuple(others[name].shape)}" for name in odd]
            raise UnsupportedError("it has tensors of no known purpose", listed)
        both = {name: [t] for name, t in others.items()}
        common: list[Any] = _readings(both, hidden, "shared experts") if both else [[None]]
        shared_gate = named[shared_gates[0]] if shared_gates else None
        for experts, shared in itertools.product(routed, common):
            yield Tensors(named[gate], vectors, experts, shared[0], shared_gate, zeroed)


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


def parts_of(tensors: Tensors, use: Mapping[str, str]) -> dict[str, list[Tensor]]:
    """The tensors of each of `equation.MODULES` and `VECTORS`. use: the vectors that are biases, by what they bias."""
    parts = {"gate": [tensors.router_EH]}
    parts |= {
        key: [tensors.vectors[use[which]]]
        for which, key in (("correction", VECTORS[0]), ("logit", VECTORS[1]))
        if which in use
    }
    for kind, mlps in (
        ("experts.{e}", tensors.experts),
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
                    return TensorPart(tensor=name, rows=rows, transposed=transposed)  # type: ignore[arg-type]
    return None


def template_of(first: str, last: str, number: int) -> str:
    """A name with {e} in place of the expert, from those of expert 0 and of the last one."""
    for found in re.finditer(r"(?<=\.)0(?=\.)", first):
        if first[: found.start()] + str(number) + first[found.end() :] == last and first != last:
            return first[: found.start()] + "{e}" + first[found.end() :]
    return first


def names_of(parts: dict[str, str | TensorPart], path: str) -> TensorNames | None:
    """The names below their common prefix; None if a known family has them."""
    number = layer_of(f"{path}.")
    spelled = {key: part if isinstance(part, str) else part.tensor for key, part in parts.items()}
    common = zip(*(name.split(".") for name in spelled.values()), strict=False)
    prefix = "".join(f"{words[0]}." for words in itertools.takewhile(lambda words: len(set(words)) == 1, common))
    local: dict[str, str | TensorPart] = {
        key: part.removeprefix(prefix)
        if isinstance(part, str)
        else part.model_copy(update={"tensor": part.tensor.removeprefix(prefix)})
        for key, part in parts.items()
    }
    if all(isinstance(part, str) for part in local.values()) and block_prefixes(
        [f"{prefix}{part}.weight".replace("{e}", "0") for part in local.values()]
    ) == [prefix]:
        names = {key: f"{part}.weight" if key in MODULES else str(part) for key, part in local.items()}
        known = recognise([name.replace("{e}", "0") for name in names.values()])
        if all(known.parse(name.replace("{e}", "0")) == OFFICIAL_PARTS[key] for key, name in names.items()):
            return None
    at = f".{number}."
    if at not in prefix:
        raise UnsupportedError(
            f"the tensors of layer {number} have no common prefix with its number", sorted(spelled.values())[:8]
        )
    head, _, tail = prefix.rpartition(at)
    return TensorNames(prefix=f"{head}.{{N}}.{tail}", parts=local)


OFFICIAL_PARTS = {
    "gate": Part(Role.ROUTER), VECTORS[0]: Part(Role.BIAS), VECTORS[1]: Part(Role.LOGIT_BIAS),
    "shared_expert_gate": Part(Role.SHARED_GATE),
    **{f"experts.{{e}}.{projection}_proj": Part(Role.EXPERT, projection, 0) for projection in ("gate", "up", "down")},
    **{f"shared_experts.{projection}_proj": Part(Role.SHARED, projection) for projection in ("gate", "up", "down")},
}  # fmt: skip
"""What the names of an equation mean to conventions."""


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a module, by name."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
