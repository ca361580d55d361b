"""Compares the names and headers of a checkpoint with the tensors a layer requires; reads no weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from moe_mk.errors import WeightError
from moe_mk.weights.layer_spec import Expected
from moe_mk.weights.names import Convention, Role
from moe_mk.weights.safetensors_header import TensorEntry
from moe_mk.weights.source import TensorSource

EXAMPLES = 5


def some(examples: Iterable[object]) -> str:
    """Up to five examples and the number of further ones."""
    texts = [str(each) for each in examples]
    more = f" and {len(texts) - EXAMPLES} more" if len(texts) > EXAMPLES else ""
    return ", ".join(texts[:EXAMPLES]) + more


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
        lines.append(f"{len(half)} experts are half filled: {'; '.join(examples[:EXAMPLES])}")
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
    if any(part.role is Role.BIAS for part in parts):
        hints.append("a gate bias where none is expected")
    if any(part.role is Role.TABLE for part in parts):
        hints.append("a table of experts by token id; set router.hash_vocabulary to its rows")
    if any(part.is_scale for part in parts):
        hints.append("scales where plain weights are expected")
    return f" ({'; '.join(hints)})" if hints else ""


def entry_problems(source: TensorSource, prefix: str, wanted: Mapping[str, Expected]) -> list[str]:
    """Wrong shapes, wrong dtypes, truncated and missing files among the tensors that will be read."""
    files: dict[str, int] = defaultdict(int)
    shapes, dtypes, cut = [], [], []
    for local, want in wanted.items():
        try:
            entry = source.entry(prefix + local)
        except WeightError as problem:
            files[str(problem)] += 1
            continue
        if wrong := wrong_shape(local, entry, want):
            shapes.append(wrong)
        if wrong := wrong_dtype(local, entry, want):
            dtypes.append(wrong)
        if entry.missing_bytes:
            cut.append(f"{local} lacks {entry.missing_bytes} of {entry.num_bytes} bytes")
    lines = [f"{problem} ({count} tensors of this layer)" for problem, count in files.items()]
    for what, found in (
        ("of a wrong shape", shapes),
        ("of a wrong dtype", dtypes),
        ("cut off, their file is truncated", cut),
    ):
        if found:
            lines.append(f"{len(found)} tensors are {what}: {some(found)}")
    return lines


def wrong_shape(name: str, entry: TensorEntry, want: Expected) -> str:
    """What is wrong with the shape of a tensor; "" if nothing is."""
    if entry.shape in (want.shape, *want.also):
        return ""
    return f"{name} is {list(entry.shape)}, expected {list(want.shape)}"


def wrong_dtype(name: str, entry: TensorEntry, want: Expected) -> str:
    """What is wrong with the dtype of a tensor; "" if nothing is."""
    if entry.dtype in want.dtypes:
        return ""
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in want.dtypes)
    return f"{name} is {entry.dtype_name}, expected {names}"
