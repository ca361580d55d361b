"""What a routing trace must be before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_mk.trace.routing_forward import PHASES, TraceFacts
from moe_mk.trace.routing_pack import id_dtype

COLUMNS = ("step_X", "layer_X", "rank_X", "phase_X", "tokens_X")
MOST = 2**62


def problems_of(facts: TraceFacts, tensors: Mapping[str, Tensor | None]) -> list[str]:
    """What contradicts itself, or the facts. Dtypes first, then shapes, then values."""
    given = {name: value for name, value in tensors.items() if value is not None}
    return _dtypes(facts, given) or _shapes(facts, given) or _values(facts, given)


def _dtypes(facts: TraceFacts, given: Mapping[str, Tensor]) -> list[str]:
    other = {"phase_X": torch.uint8, "ids_RK": id_dtype(facts.num_experts), "weights_RK": torch.float32}
    expected = {name: other.get(name, torch.int64) for name in given}
    return [f"{name} is {t.dtype}, expected {expected[name]}" for name, t in given.items() if t.dtype != expected[name]]


def _shapes(facts: TraceFacts, given: Mapping[str, Tensor]) -> list[str]:
    columns = {name: tuple(given[name].shape) for name in COLUMNS}
    if set(columns.values()) != {(len(given["tokens_X"]),)}:
        return [f"columns have different shapes: {columns}"]
    rows = int(given["tokens_X"].sum())
    expected = {"ids_RK": (rows, facts.top_k), "weights_RK": (rows, facts.top_k), "token_ids_R": (rows,)}
    return [
        f"{name} has shape {tuple(given[name].shape)}, the forwards need {shape}"
        for name, shape in expected.items()
        if name in given and tuple(given[name].shape) != shape
    ]


def _values(facts: TraceFacts, given: Mapping[str, Tensor]) -> list[str]:
    limits = {
        "ids_RK": (-1, facts.num_experts),
        "rank_X": (0, facts.num_ranks),
        "phase_X": (0, len(PHASES)),
        "tokens_X": (0, MOST),
        "layer_X": (0, MOST),
    }
    wrong = []
    for name, (low, end) in limits.items():
        value = given[name]
        if value.numel() and not low <= int(value.min()) <= int(value.max()) < end:
            wrong.append(f"{name} holds {int(value.min())} to {int(value.max())}, outside [{low}, {end})")
    return wrong
