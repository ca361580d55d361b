"""Compares the names and headers of a checkpoint with the tensors a layer requires; reads no weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.errors import ShapeError, WeightError
from moe_mk.text import shortened
from moe_mk.weights.layer_spec import Expected
from moe_mk.weights.names import Convention, Role, recognise
from moe_mk.weights.safetensors_header import TensorEntry
from moe_mk.weights.source import TensorSource

EXAMPLES = 5


def some(examples: Iterable[object]) -> str:
    """Up to five examples and the number of further ones."""
    texts = [str(each) for each in examples]
    more = f" and {len(texts) - EXAMPLES} more" if len(texts) > EXAMPLES else ""
    return ", ".join(map(shortened, texts[:EXAMPLES])) + more


def name_problems(present: Iterable[str], expected: Mapping[str, Expected], convention: Convention) -> list[str]:
    """Missing experts, half-filled experts, other missing tensors, unexpected tensors: one line each, with counts."""
    have = set(present)
    missing = [name for name, each in expected.items() if name not in have and not each.optional]
    unexpected = sorted(have - expected.keys())
    lacks: dict[int, list[str]] = defaultdict(list)
    for name in missing:
        if (expert := expected[name].part.expert) is not None:
            lacks[expert].append(name)
    num_of: dict[int, int] = defaultdict(int)
    for each in expected.values():
        if each.part.expert is not None and not each.optional:
            num_of[each.part.expert] += 1
    absent = [e for e, names in lacks.items() if len(names) == num_of[e]]
    half = {e: names for e, names in lacks.items() if len(names) < num_of[e]}
    others = [name for name in missing if expected[name].part.expert is None]
    lines = []
    if absent:
        lines.append(f"{len(absent)} of {len(num_of)} experts are missing: {some(absent)}")
    if half:
        examples = [f"expert {e} lacks {', '.join(names)}" for e, names in half.items()]
        lacking = {part.projection for names in half.values() for name in names if (part := convention.parse(name))}
        ungated = "; experts without a gate are model.gated = false" if lacking == {"gate"} else ""
        lines.append(f"{len(half)} experts are half filled: {'; '.join(examples[:EXAMPLES])}{ungated}")
    if others:
        lines.append(f"{len(others)} tensors are missing: {some(others)}")
    if unexpected:
        hint = _surplus(unexpected, len(num_of), convention)
        lines.append(f"{len(unexpected)} tensors are unexpected: {some(unexpected)}{hint}")
    return lines


def _surplus(unexpected: Sequence[str], num_experts: int, convention: Convention) -> str:
    parts = [part for name in unexpected if (part := convention.parse(name)) is not None]
    hints = []
    experts = [part.expert for part in parts if part.role is Role.EXPERT and part.expert is not None]
    if num_experts and experts and max(experts) >= num_experts:
        hints.append(f"experts up to {max(experts)} where {num_experts} are expected")
    if any(part.role is Role.SHARED for part in parts):
        hints.append("shared experts where fewer or none are expected")
    if {part.projection for part in parts if part.projection} == {"gate"}:
        hints.append("gates of experts, which model.gated = false excludes")
    if any(part.role is Role.SHARED_GATE for part in parts):
        hints.append("a gate of the shared experts; set model.shared_gate = true")
    if any(part.role is Role.BIAS for part in parts):
        hints.append("a gate bias where none is expected")
    if any(part.role is Role.TABLE for part in parts):
        hints.append("a table of experts by token id; set router.hash_vocabulary to its rows")
    if any(part.extra == "scale" for part in parts):
        hints.append("scales where plain weights are expected")
    return f" ({'; '.join(hints)})" if hints else ""


def read_entries(source: TensorSource, prefix: str, names: Iterable[str]) -> tuple[dict[str, TensorEntry], list[str]]:
    """Headers by local name, and one line for each missing or damaged file."""
    entries: dict[str, TensorEntry] = {}
    unreadable: Counter[str] = Counter()
    for name in names:
        try:
            entries[name] = source.entry(prefix + name)
        except WeightError as problem:
            unreadable[str(problem)] += 1
    return entries, [f"{problem} ({count} tensors of this layer)" for problem, count in unreadable.items()]


def recognise_block(
    source: TensorSource, prefix: str, local: Collection[str], fits: Callable[[Convention], bool] = lambda _: True
) -> Convention:
    """The convention of a block, as of `recognise`; of packings with the same names the one that the shapes have.

    fits: as of `recognise`. Reads the headers of one matrix.
    """
    present = set(local)
    return recognise(local, fits=lambda names: fits(names) and _has_its_words(source, prefix, names, present))


def _has_its_words(source: TensorSource, prefix: str, convention: Convention, local: set[str]) -> bool:
    """Whether the words of the first packed matrix are those of the convention's packing, as far as headers state it.

    AWQ packs the axis that scales do not have as words, GPTQ the other one. Integers of compressed-tensors have the
    names of its four-bit floats.
    """
    packing = convention.packing
    if packing not in ("gptq", "awq") and not convention.expert[""].endswith("weight_packed"):
        return True
    parts = (part for name in local if (part := convention.parse(name)) and part.role is Role.EXPERT)
    first = next((part for part in parts if part.projection == "down" and not part.extra), None)
    names = [] if first is None else [convention.spell(each) for each in (first, replace(first, extra="scale"))]
    entries, problems = read_entries(source, prefix, [name for name in names if name in local])
    if len(entries) < 2 or problems:
        return True
    words, scales = (entries[name] for name in names)
    if packing in ("gptq", "awq"):
        return words.shape[-1:] == scales.shape[-1:] if packing == "gptq" else words.shape[-1:] != scales.shape[-1:]
    return (words.dtype is torch.int32) == (packing == "compressed_tensors")


def entry_problems(entries: Mapping[str, TensorEntry], expected: Mapping[str, Expected]) -> list[str]:
    """Wrong shapes, wrong dtypes and truncated files among those of the expected tensors that have a header."""
    held = {name: entry for name, entry in entries.items() if name in expected}
    found = {
        "of a wrong shape": [wrong_shape(name, entry, expected[name]) for name, entry in held.items()],
        "of a wrong dtype": [wrong_dtype(name, entry, expected[name]) for name, entry in held.items()],
        "cut off, their file is truncated": [
            f"{name} lacks {entry.missing_bytes} of {entry.num_bytes} bytes" if entry.missing_bytes else ""
            for name, entry in held.items()
        ],
    }
    lines = [
        f"{len(bad)} tensors are {what}: {some(bad)}" for what, each in found.items() if (bad := [*filter(None, each)])
    ]
    return [*lines, *filter(None, [transposed(held, {name: expected[name] for name in held})])]


def wrong_shape(name: str, entry: TensorEntry, want: Expected) -> str:
    """Describe a wrong shape of a tensor; "" for a right one."""
    if entry.shape in (want.shape, *want.also):
        return ""
    return f"{name} is {list(entry.shape)}, expected {list(want.shape)}"


def wrong_dtype(name: str, entry: TensorEntry, want: Expected) -> str:
    """Describe a wrong dtype of a tensor; "" for a right one."""
    if entry.dtype in want.dtypes:
        return ""
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in want.dtypes)
    return f"{name} is {entry.dtype_name}, expected {names}"


def transposed(entries: Mapping[str, TensorEntry], expected: Mapping[str, Expected]) -> str:
    """A line that names tensors stored as (in, out), and square ones, whose shapes cannot show it; "" without any."""
    swapped = [
        name
        for name, entry in entries.items()
        if (shape := expected[name].shape) != entry.shape == (*shape[:-2], *shape[-2:][::-1])
        and entry.shape not in expected[name].also
    ]
    roles = {expected[name].part.role for name in swapped}
    square = [
        name
        for name, each in expected.items()
        if each.part.role in roles and each.part.extra != "scale" and each.shape[-2:] == each.shape[-2:][::-1]
        if len(each.shape) > 1
    ]
    if not swapped:
        return ""
    doubt = f"; shapes of square ones do not show whether they are as well: {some(square)}" if square else ""
    return f"{len(swapped)} tensors are stored transposed, as (in, out): {some(swapped)}{doubt}"


def expect_not_transposed(
    w13: Tensor,
    w2: Tensor,
    halves: int,
    logical_columns: Callable[[int], int] = int,
    names: tuple[str, str] = ("w13", "w2"),
) -> None:
    """Raise ShapeError, naming both stacks, where either has the axes of (L, in, out)."""
    if w13.dim() != 3 or w2.dim() != 3:
        return

    def sides(tensor: Tensor, swapped: bool) -> tuple[int, int]:  # values that share a byte are inputs
        a, b = tensor.shape[1:]
        return (b, logical_columns(a)) if swapped else (a, logical_columns(b))

    def fits(swaps: tuple[bool, bool]) -> bool:
        (rows, hidden), (outputs, inner) = map(sides, (w13, w2), swaps)
        return rows == halves * inner and hidden == outputs

    readings = (False, False), (True, False), (False, True), (True, True)
    found = [name for name, swapped in zip(names, next(filter(fits, readings), ()), strict=False) if swapped]
    if not found:
        return
    shown = " and ".join(f"{name} {list(t.shape)}" for name, t in zip(names, (w13, w2), strict=True))
    square = [name for name, t in zip(names, (w13, w2), strict=True) if t.shape[1] == logical_columns(t.shape[2])]
    doubt = f"; {square[0]} is square, so that its shape does not show whether it is as well" if square else ""
    raise ShapeError(
        f"{shown}: stored transposed, as (experts, in, out): {' and '.join(found)}{doubt}; pass both as "
        f"(experts, out, in), for instance {found[0]}.transpose(1, 2)"
    )


def raise_if(what: str, problems: Sequence[str]) -> None:
    """Raise one WeightError with all problems, if there are any."""
    if problems:
        raise WeightError(f"{what}:" + "".join(f"\n  - {line}" for line in problems))
