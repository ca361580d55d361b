"""Inputs of a run: its settings, and the tokens of each rank, random and RMS-normalised or from files.

Files of hidden states and token ids are .npy and .safetensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_mk.config.moe import MoEConfig
from moe_mk.config.router import RouterConfig
from moe_mk.errors import ConfigError, ShapeError
from moe_mk.files import named_in_utf8
from moe_mk.lab.cli.options import LARGEST
from moe_mk.lab.files import expect_small_header
from moe_mk.lab.trace.foreign import read_npy
from moe_mk.lab.verify import OwnBlock
from moe_mk.registry import did_you_mean
from moe_mk.router.topk import IDS
from moe_mk.shapes import expect
from moe_mk.weights.inspect import inspect_checkpoint

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    expect(f"--token-ids {file}", ids, "T", IDS)
    return ids.to(torch.int64)


def _read(option: str, file: Path, name: str) -> Tensor:
    if not file.is_file():
        raise ConfigError(f"{option} {file} is not a file")
    try:
        return torch.from_numpy(read_npy(file)) if file.suffix == ".npy" else _read_safetensors(option, file, name)
    except (OSError, TypeError, ValueError, SafetensorError) as problem:
        raise ConfigError(f"{option} {file} cannot be read: {problem}") from problem


def _read_safetensors(option: str, file: Path, name: str) -> Tensor:
    expect_small_header(file)
    with named_in_utf8(file) as path, safe_open(path, framework="pt", device="cpu") as opened:
        names = list(opened.keys())
        if len(names) != 1 and name not in names:
            raise ConfigError(f"{option} {file} holds {len(names)} tensors, none of them called {name}")
        rows: Tensor = opened.get_tensor(name if name in names else names[0])
    return rows


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULT_TOKENS = (64,)


@dataclass(frozen=True)
class RunSettings:
    """The options of `moe-mk run`; sent to every rank."""

    checkpoint: Path
    layer: int
    config: MoEConfig
    tokens: tuple[int, ...] | None = None
    """One number for every batch, or one each; None: 64 per batch, or an even share of the file."""
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 0
    repeats: int = 3
    hidden_states: Path | None = None
    token_ids: Path | None = None
    """For the rows of all batches; None: random, if the layer routes by token id."""
    inject: str | None = None
    verify: bool = True
    against: OwnBlock | None = None
    """The model's own block, whose settings the reference has; None: those of the layer."""
    out: Path | None = None
    as_json: bool = False
    plot: Path | None = None
    trace: Path | None = None
    """File for the spans of one prefill of all ranks."""
    record_trace: Path | None = None
    """File for the routing of the verified prefill and decode of all ranks."""
    threads: int = 1
    """Of one rank."""
    ranks_per_node: int | None = None
    """Number of neighbouring ranks to treat as a node; None: those of this host."""
    prefix: str | None = None
    """The part of names before "experts.0..."; None: the only block of the layer."""
    memory: str | None = None
    """For the experts of all ranks; None: all are resident, or as the configuration states."""


@dataclass(frozen=True)
class Batch:
    """The tokens of one rank."""

    x_TH: Tensor
    token_ids_T: Tensor | None = None
    """int64, tokens of the vocabulary; None if not needed."""

    @property
    def first(self) -> Batch:
        """One token, or none."""
        return self.token(0)

    def token(self, index: int) -> Batch:
        """One token, or none behind the last."""
        one = slice(index, index + 1)
        return Batch(self.x_TH[one], None if self.token_ids_T is None else self.token_ids_T[one])

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(self.x_TH.to(device), None if self.token_ids_T is None else self.token_ids_T.to(device))


def dtype_of(name: str) -> torch.dtype:
    """The dtype that --dtype names; raises ConfigError for an unknown one."""
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name!r} is unknown{did_you_mean(name, list(DTYPES))}")
    return DTYPES[name]


def draws(seed: int) -> torch.Generator:
    """A random generator on the CPU. seed: any integer, taken modulo 2^64."""
    return torch.Generator(device="cpu").manual_seed(seed % 2**64)


def expect_checkpoint(path: Path) -> None:
    """Raise ConfigError, with the command to write one, if the checkpoint does not exist."""
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; name a checkpoint folder, or write one: moe-mk make-checkpoint {path}"
        )


def layers_of(path: Path) -> list[int]:
    """The layers of a checkpoint that have experts; reads headers only. Raises ConfigError if there is none."""
    expect_checkpoint(path)
    numbers = sorted({each.layer for each in inspect_checkpoint(path).layers if each.layer is not None})
    if not numbers:
        raise ConfigError(f"{path} has no MoE layer; moe-mk inspect-checkpoint {path} lists its contents")
    return numbers


def first_moe_layer(path: Path) -> int:
    """The first layer of a checkpoint that has experts; reads headers only. Raises ConfigError if there is none."""
    return layers_of(path)[0]


def tokens_of(text: str) -> tuple[int, ...]:
    """Parse "64" or "0,0,7,1"; raises ConfigError for anything else."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--tokens {text!r} is not a number or a list of numbers such as 0,0,7,1") from None
    if not 0 <= min(numbers) <= max(numbers) <= LARGEST:
        raise ConfigError(f"--tokens {text!r} holds a number outside [0, {LARGEST}]; an idle rank has 0")
    return numbers


def token_counts(settings: RunSettings, batches: int) -> tuple[int, ...]:
    """Number of tokens per batch; reads and checks the file of hidden states, if any."""
    asked = settings.tokens
    if asked is not None and len(asked) not in (1, batches):
        one = "one number" if batches == 1 else f"one number or {batches}"
        raise ConfigError(f"--tokens lists {len(asked)} numbers for {batches} batches of tokens; give {one}")
    asked = asked * batches if asked is not None and len(asked) == 1 else asked
    if settings.hidden_states is None:
        return asked or DEFAULT_TOKENS * batches
    file = settings.hidden_states
    rows = read_hidden_states(file, settings.config.model.hidden_size).shape[0]
    if asked is None:
        return tuple(rows // batches + (batch < rows % batches) for batch in range(batches))
    if sum(asked) != rows:
        raise ConfigError(f"--tokens adds up to {sum(asked)}, but {file} holds {rows} rows; drop --tokens")
    return asked


def hidden_states(settings: RunSettings, counts: tuple[int, ...], batch: int) -> Tensor:
    """(T, H) of one batch: its share of the file, or random rows whose root mean square is 1."""
    dtype, hidden_size = DTYPES[settings.dtype], settings.config.model.hidden_size
    if settings.hidden_states is not None:
        rows, start = read_hidden_states(settings.hidden_states, hidden_size), sum(counts[:batch])
        return rows[start : start + counts[batch]].to(dtype)
    generator = draws(settings.seed * 1_000_003 + batch)
    x_TH = torch.randn((counts[batch], hidden_size), generator=generator, dtype=torch.float32, device="cpu")
    return (x_TH / x_TH.square().mean(dim=1, keepdim=True).sqrt()).to(dtype)


def num_token_ids(router: RouterConfig) -> int | None:
    """How many token ids to draw from, a fifth of them those of images where these differ; None if no id matters."""
    first = router.first_image_token
    return router.hash_vocabulary if first is None else first + first // 4 + 1


def token_ids(settings: RunSettings, counts: tuple[int, ...], batch: int) -> Tensor | None:
    """(T,) of one batch: its share of the file; random if the layer routes by token id; otherwise None."""
    vocabulary = num_token_ids(settings.config.router)
    if settings.token_ids is not None:
        ids, start = read_token_ids(settings.token_ids), sum(counts[:batch])
        return ids[start : start + counts[batch]]
    if vocabulary is None:
        return None
    draw = draws(settings.seed * 1_000_003 + batch)
    return torch.randint(vocabulary, (counts[batch],), generator=draw, dtype=torch.int64, device="cpu")


def batch_of(settings: RunSettings, counts: tuple[int, ...], batch: int) -> Batch:
    """The tokens of one batch."""
    return Batch(hidden_states(settings, counts, batch), token_ids(settings, counts, batch))


def check_token_ids(settings: RunSettings, counts: tuple[int, ...]) -> None:
    """Raise ConfigError if --token-ids does not have one id per token, or is missing for rows of a file."""
    router, file = settings.config.router, settings.token_ids
    vocabulary = None if router.first_image_token is not None else router.hash_vocabulary
    if file is None:
        if num_token_ids(router) is not None and settings.hidden_states is not None:
            raise ConfigError(
                f"layer {settings.layer} routes by token id, so rows of --hidden-states need "
                f"--token-ids FILE: an integer of [0, {num_token_ids(router)}) for each of the {sum(counts)} rows"
            )
        return
    ids = read_token_ids(file)
    if len(ids) != sum(counts):
        raise ConfigError(f"--token-ids {file} holds {len(ids)} ids for {sum(counts)} tokens; give one id a token")
    least, most = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    if least < 0 or (vocabulary is not None and most >= vocabulary):
        known = (
            "at least 0"
            if vocabulary is None
            else f"in [0, {vocabulary}), the range of the table of layer {settings.layer}"
        )
        raise ConfigError(f"--token-ids {file} holds ids from {least} to {most}; they must be {known}")
