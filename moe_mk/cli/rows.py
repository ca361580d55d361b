"""Rows that a person brings to a run: hidden states and token ids from .npy and .safetensors files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.files import expect_small_header
from moe_mk.shapes import expect
from moe_mk.trace.foreign import read_npy

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def read_hidden_states(file: Path, hidden_size: int) -> Tensor:
    """Rows of a .npy file, or of a .safetensors file: its only tensor, or the one called hidden_states."""
    rows = _read("--hidden-states", file, "hidden_states")
    expect(f"--hidden-states {file}", rows, "T H", FLOATS, H=hidden_size)
    if not bool(torch.isfinite(rows).all()):
        raise ShapeError(f"--hidden-states {file} holds NaN or infinity; write finite rows")
    return rows


def read_token_ids(file: Path) -> Tensor:
    """int64 (T,) of a .npy file, or of a .safetensors file: its only tensor, or the one called token_ids."""
    ids = _read("--token-ids", file, "token_ids")
    expect(f"--token-ids {file}", ids, "T", INTEGERS)
    return ids.to(torch.int64)


def _read(option: str, file: Path, name: str) -> Tensor:
    if not file.is_file():
        raise ConfigError(f"{option} {file} is not a file")
    try:
        return _read_npy(file) if file.suffix == ".npy" else _read_safetensors(option, file, name)
    except (OSError, TypeError, ValueError, SafetensorError) as problem:
        raise ConfigError(f"{option} {file} cannot be read: {problem}") from problem


def _read_npy(file: Path) -> Tensor:
    return torch.from_numpy(read_npy(file))


def _read_safetensors(option: str, file: Path, name: str) -> Tensor:
    expect_small_header(file)
    with safe_open(str(file), framework="pt", device="cpu") as opened:
        names = list(opened.keys())
        if len(names) != 1 and name not in names:
            raise ConfigError(f"{option} {file} holds {len(names)} tensors, none of them called {name}")
        rows: Tensor = opened.get_tensor(name if name in names else names[0])
    return rows
