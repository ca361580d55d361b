"""What goes into a run: its settings, and the hidden states of each rank, random and RMS-normed or from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError, ShapeError
from moe_mk.registry import did_you_mean
from moe_mk.shapes import expect

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULT_TOKENS = (64,)


@dataclass(frozen=True)
class RunSettings:
    """Everything `moe-mk run` was asked for; travels to every rank."""

    checkpoint: Path
    layer: int
    config: MoEConfig
    tokens: tuple[int, ...] | None = None
    """One number for every batch, or one each; None is 64 a batch, or an even share of the file."""
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 0
    repeats: int = 3
    hidden_states: Path | None = None
    inject: str | None = None
    verify: bool = True
    json: Path | None = None
    plot: Path | None = None
    trace: Path | None = None
    """A file for the spans of one prefill of all ranks, to look at."""
    record_trace: Path | None = None
    """A file for the routing of the verified prefill and decode, by all ranks."""
    threads: int = 1
    """Of one rank."""
    ranks_per_node: int | None = None
    """As if so many neighbouring ranks shared a node; None is as they do."""


def dtype_of(name: str) -> torch.dtype:
    """The dtype that --dtype names; raises ConfigError for an unknown one."""
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name!r} is unknown{did_you_mean(name, list(DTYPES))}")
    return DTYPES[name]


def tokens_of(text: str) -> tuple[int, ...]:
    """Parse "64" or "0,0,7,1"; raises ConfigError for anything else."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--tokens {text!r} is not a number or a list of numbers such as 0,0,7,1") from None
    if min(numbers) < 0:
        raise ConfigError(f"--tokens {text!r} holds a negative number; an idle rank has 0")
    return numbers


def token_counts(settings: RunSettings, batches: int) -> tuple[int, ...]:
    """How many tokens each batch brings; reads the file of hidden states, if any, and checks it."""
    asked = None if settings.tokens is None else _one_each(settings.tokens, batches)
    if settings.hidden_states is None:
        return asked or DEFAULT_TOKENS * batches
    file = settings.hidden_states
    rows = read_hidden_states(file, settings.config.model.hidden_size).shape[0]
    if asked is None:
        return tuple(rows // batches + (batch < rows % batches) for batch in range(batches))
    if sum(asked) != rows:
        raise ConfigError(f"--tokens adds up to {sum(asked)}, but {file} holds {rows} rows; drop --tokens")
    return asked


def _one_each(tokens: tuple[int, ...], batches: int) -> tuple[int, ...]:
    if len(tokens) not in (1, batches):
        one = "one number" if batches == 1 else f"one number or {batches}"
        raise ConfigError(f"--tokens lists {len(tokens)} numbers for {batches} batches of tokens; give {one}")
    return tokens * batches if len(tokens) == 1 else tokens


def hidden_states(settings: RunSettings, counts: tuple[int, ...], batch: int) -> Tensor:
    """(T, H) of one batch: its share of the file, or random rows whose root mean square is 1."""
    dtype, hidden_size = DTYPES[settings.dtype], settings.config.model.hidden_size
    if settings.hidden_states is not None:
        rows, start = read_hidden_states(settings.hidden_states, hidden_size), sum(counts[:batch])
        return rows[start : start + counts[batch]].to(dtype)
    generator = torch.Generator(device="cpu").manual_seed(settings.seed * 1_000_003 + batch)
    x_TH = torch.randn((counts[batch], hidden_size), generator=generator, dtype=torch.float32, device="cpu")
    return (x_TH / x_TH.square().mean(dim=1, keepdim=True).sqrt()).to(dtype)


def read_hidden_states(file: Path, hidden_size: int) -> Tensor:
    """Rows of a .npy file, or of a .safetensors file: its only tensor, or the one called hidden_states."""
    if not file.is_file():
        raise ConfigError(f"--hidden-states {file} is not a file")
    try:
        rows = _read_npy(file) if file.suffix == ".npy" else _read_safetensors(file)
    except (OSError, TypeError, ValueError, SafetensorError) as problem:
        raise ConfigError(f"--hidden-states {file} cannot be read: {problem}") from problem
    expect(f"--hidden-states {file}", rows, "T H", (*DTYPES.values(), torch.float64), H=hidden_size)
    if not bool(torch.isfinite(rows).all()):
        raise ShapeError(f"--hidden-states {file} holds NaN or infinity; write finite rows")
    return rows


def _read_npy(file: Path) -> Tensor:
    return torch.from_numpy(np.load(file, allow_pickle=False))


def _read_safetensors(file: Path) -> Tensor:
    with safe_open(str(file), framework="pt", device="cpu") as opened:
        names = list(opened.keys())
        if len(names) != 1 and "hidden_states" not in names:
            raise ConfigError(f"--hidden-states {file} holds {len(names)} tensors, none of them called hidden_states")
        rows: Tensor = opened.get_tensor("hidden_states" if "hidden_states" in names else names[0])
    return rows
