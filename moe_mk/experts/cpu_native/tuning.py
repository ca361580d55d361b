"""Parameters of the native CPU experts as data: what `moe-mk tune cpu_native` tries, and what it found on this machine.

`configs/tuned/<processor>/cpu_native/<case>.json` holds the fastest parameters by tokens, one file for each top_k; they
serve by mean rows an expert, the nearest point on a logarithmic scale, inside the measured range only. Whatever is
chosen, every bit of a result is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moe_mk.config.tuned import (
    ACTIVATIONS,
    WEIGHTS,
    TunedPoint,
    case_name,
    load_measured,
    nearest,
    top_k_in,
    tune_command,
    tuned_path,
)
from moe_mk.errors import ConfigError
from moe_mk.experts.base import ExpertsContext
from moe_mk.external.device import describe
from moe_mk.kernels.native import Tuning
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme

LOGGER = logging.getLogger(__name__)

FEW = 6.0
"""Mean rows an expert up to which some experts have few enough to be multiplied straight from memory."""
CHOICES = 8
"""Experts a token is taken to visit where only the number of tokens is known."""
STREAMED: tuple[Tuning, ...] = (
    Tuning(),
    *(Tuning(prefetch_bytes=ahead) for ahead in (1024, 2048, 3072, 4096, 6144)),
    *(Tuning(task_pairs=pairs) for pairs in (2, 4, 8)),
    *(Tuning(panel_rows=rows) for rows in (1, 3, 4)),
)
"""What is tried where weights are read once and hardly more is done."""
GATHERED: tuple[Tuning, ...] = (
    Tuning(),
    *(Tuning(gather_kib=size) for size in (192, 320, 640, 896, 1536)),
    *(Tuning(task_pairs=pairs) for pairs in (4, 8)),
)
"""What is tried where each weight meets many rows."""


@dataclass(frozen=True)
class Tuned:
    """What was measured, by mean rows an expert; empty: nothing was, and the built-in parameters serve."""

    points: tuple[tuple[float, Tuning], ...] = ()

    def at(self, rows_an_expert: float) -> Tuning:
        """The point nearest on a logarithmic scale inside the measured range, the built-in parameters outside."""
        found = nearest([place for place, _ in self.points], rows_an_expert)
        return Tuning() if found is None else self.points[found][1]


def only(tuning: Tuning) -> Tuned:
    """The same parameters for every number of rows."""
    return Tuned(((2.0**-30, tuning), (2.0**30, tuning)))


def tuning_of(parameters: Mapping[str, Any]) -> Tuning:
    """Parameters by their names; those not named are built in. Raises ConfigError for what the kernels do not have."""
    try:
        return Tuning(**parameters)
    except TypeError:
        known = ", ".join(asdict(Tuning()))
        raise ConfigError(f"{dict(parameters)} is no tuning of cpu_native: it has {known}") from None


def candidates(context: ExpertsContext, rows: int) -> list[dict[str, int | bool | str]]:
    """What is worth trying for so many tokens, each of up to eight choices: one parameter after the other."""
    an_expert = rows * min(CHOICES, context.num_slots) / context.num_slots
    tried = STREAMED if an_expert <= FEW / 2 else GATHERED if an_expert > FEW else (*STREAMED, *GATHERED[1:])
    named = [{name: value for name, value in asdict(tuning).items() if value} for tuning in tried]
    return [dict(each) for each in {tuple(one.items()): one for one in named}.values()]


def load_tuned(context: ExpertsContext, weights: QuantScheme, top_k: int, folder: Path | None = None) -> Tuned:
    """The points of a case from the files of every top_k, measured on this processor.

    Without any, one line in the log names the command that measures it, where there is one.
    Raises ConfigError for a file that holds no points, or parameters that the kernels do not have.
    """
    device = _processor()
    shape = (context.hidden_size, context.intermediate_size, context.num_slots)
    mine = tuned_path(device, "cpu_native", case_name((*shape, top_k), weights, context.compute), folder)
    command = tune_command("cpu_native", (*shape, top_k), weights, context.compute)
    pattern = f"{case_name((*shape, '*'), weights, context.compute)}.json"
    points: list[tuple[float, Tuning]] = []
    for file in sorted(mine.parent.glob(pattern)):
        choices = top_k_in(file.name, pattern)
        if choices is not None:
            share = choices / context.num_slots
            points += [_point(point, share, file) for point in load_measured(file, command).points]
    if not points and _can_be_asked_for(weights, context.compute):
        _say_missing(mine, command)
    return Tuned(tuple(sorted(points, key=lambda point: point[0])))


def _point(point: TunedPoint, share: float, file: Path) -> tuple[float, Tuning]:
    try:
        return point.tokens * share, tuning_of(point.parameters)
    except ConfigError as problem:
        raise ConfigError(f"{file}, {point.tokens} tokens: {problem}") from None


def _can_be_asked_for(weights: QuantScheme, compute: QuantScheme) -> bool:
    """Whether `moe-mk tune` has options for these formats."""
    stored = isinstance(weights, Plain) or weights in WEIGHTS.values()
    return stored and (isinstance(compute, Plain) or compute in ACTIVATIONS.values())


@cache
def _processor() -> str:
    """What a person calls the processor."""
    return describe(torch.device("cpu")).split(",")[0]


@cache
def _say_missing(file: Path, command: str) -> None:
    """Once a process: every layer of a model asks for the same file."""
    LOGGER.info("no tuned parameters in %s; built-in ones serve. To measure: %s", file, command)
