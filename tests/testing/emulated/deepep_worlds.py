"""Emulated libraries of the DeepEP family on ranks of threads, and the signatures that they must have."""

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGE = "moe_mk.lab.testing.emulated"
Snapshot = dict[str, dict[str, list[str]]]
SNAPSHOT: Snapshot = json.loads((Path(__file__).parent / "deepep_signatures.json").read_text(encoding="utf-8"))
"""Parameters with defaults: deep_ep 2.1.0 (V1) and UCCL-EP's wrapper."""
NAMES = {"DEFAULT_TIMEOUT_MS": "30000"}
IDS = [torch.tensor([[0, 3], [2, -1], [-1, -1]]), torch.tensor([[0, 1]])]
WEIGHTS = [torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.75, 0.125]])]
"""Two ranks, four experts, two each: token 0 of rank 0 goes to 0 and 3, token 1 to 2; that of rank 1 to 0 and 1."""


def rows(rank: int, hidden: int = 2048, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Row t of rank r holds 1 + t + 4 r in every column."""
    return torch.stack([torch.full((hidden,), 1.0 + t + 4 * rank) for t in range(len(IDS[rank]))]).to(dtype)


def differences(library: str, snapshot: Snapshot = SNAPSHOT, package: str = PACKAGE) -> tuple[list[str], set[str]]:
    """Where an emulated library departs from the snapshot, and what of it is not emulated."""
    module, wrong, absent = import_module(f"{package}.{library}"), [], set()
    for name, wanted in snapshot[library].items():
        class_name, _, method = name.partition(".")
        found: Any = getattr(getattr(module, class_name, None), method, None)
        if found is None:
            absent.add(name)
        elif (seen := _parameters(found)) != [named(text) for text in wanted]:
            wrong.append(f"{name}: {seen} is not {wanted}")
    return wrong, absent


def named(text: str) -> str:
    name, _, default = text.partition(" = ")
    return f"{name} = {NAMES.get(default, default)}" if default else name


def _parameters(function: Any) -> list[str]:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return [p.name if p.default is p.empty else f"{p.name} = {p.default!r}" for p in parameters]
