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


def problems_of_rows(tensors: Mapping[str, Tensor]) -> list[str]:
    """Why the forwards of a file cannot be laid out row by row: columns that are none, and more tokens than rows."""
    columns = [name for name in (*COLUMNS, "token_ids", "token_start_X") if name in tensors]
    wrong = [f"{name} has {tensors[name].dim()} dimensions, expected 1" for name in columns if tensors[name].dim() != 1]
    if wrong or tensors["ids_RK"].dim() != 2:
        return wrong or [f"ids_RK has shape {tuple(tensors['ids_RK'].shape)}, expected rows of K"]
    tokens_X, rows = tensors["tokens_X"].to(torch.int64), len(tensors["ids_RK"])
    if len(tokens_X) and not (0 <= int(tokens_X.min()) and int(tokens_X.max()) <= rows and int(tokens_X.sum()) <= rows):
        least, most = int(tokens_X.min()), int(tokens_X.max())
        return [f"the forwards need {least} to {most} rows each, ids_RK has {rows} for all of them"]
    return []


def _dtypes(facts: TraceFacts, given: Mapping[str, Tensor]) -> list[str]:
    other = {"phase_X": torch.uint8, "ids_RK": id_dtype(facts.num_experts), "weights_RK": torch.float32}
    expected = {name: other.get(name, torch.int64) for name in given}
    return [f"{name} is {t.dtype}, expected {expected[name]}" for name, t in given.items() if t.dtype != expected[name]]


def _shapes(facts: TraceFacts, given: Mapping[str, Tensor]) -> list[str]:
    columns = {name: tuple(given[name].shape) for name in COLUMNS}
    if set(columns.values()) != {(given["tokens_X"].numel(),)}:
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
        "tokens_X": (0, len(given["ids_RK"]) + 1),
        "layer_X": (0, MOST),
    }
    wrong = []
    for name, (low, end) in limits.items():
        value = given[name]
        if value.numel() and not low <= int(value.min()) <= int(value.max()) < end:
            wrong.append(f"{name} holds {int(value.min())} to {int(value.max())}, outside [{low}, {end})")
    return wrong
