"""Tuning of the native CPU experts: the parameters that `moe-mk tune cpu_native` tries, and those measured here.

`configs/tuned/<processor>/cpu_native/<case>.json` holds the fastest parameters by tokens, one file for each top_k. They
are used by mean rows per expert. No choice changes a bit of a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moe_mk.config.tuned import ACTIVATIONS, WEIGHTS, Case, Tuned, case_name, tune_command, tuned_path
from moe_mk.errors import ConfigError
from moe_mk.experts.base import ExpertsContext
from moe_mk.external.device import describe
from moe_mk.kernels.native import Tuning
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme

BUILT_IN: tuple[tuple[float, Tuning], ...] = ((math.inf, Tuning()),)
FEW = 6.0
"""Mean rows per expert up to which some experts have few enough rows to be multiplied straight from memory."""
CHOICES = 8
"""The assumed number of experts per token where only the number of tokens is known."""
STREAMED: tuple[Tuning, ...] = (
    Tuning(),
    *(Tuning(prefetch_bytes=ahead) for ahead in (1024, 2048, 3072, 4096, 6144)),
    *(Tuning(task_pairs=pairs) for pairs in (2, 4, 8)),
    *(Tuning(panel_rows=rows) for rows in (1, 3, 4)),
)
"""Candidates where reading the weights once dominates."""
GATHERED: tuple[Tuning, ...] = (
    Tuning(),
    *(Tuning(gather_kib=size) for size in (192, 320, 640, 896, 1536)),
    *(Tuning(task_pairs=pairs) for pairs in (4, 8)),
)
"""Candidates where each weight is multiplied by many rows."""


def tuning_of(parameters: Mapping[str, Any]) -> Tuning:
    """Parameters by name; missing ones are built in. Raises ConfigError for parameters that the kernels do not have."""
    try:
        return Tuning(**parameters)
    except TypeError:
        known = ", ".join(asdict(Tuning()))
        raise ConfigError(f"{dict(parameters)} are not parameters of cpu_native, which has {known}") from None


def candidates(context: ExpertsContext, rows: int) -> list[dict[str, int | bool | str]]:
    """The parameters to try for a number of tokens with up to eight experts each: one parameter varies at a time."""
    an_expert = rows * min(CHOICES, context.num_slots) / context.num_slots
    tried = STREAMED if an_expert <= FEW / 2 else GATHERED if an_expert > FEW else (*STREAMED, *GATHERED[1:])
    named = [{name: value for name, value in asdict(tuning).items() if value} for tuning in tried]
    return [dict(each) for each in {tuple(one.items()): one for one in named}.values()]


def load_tuned(context: ExpertsContext, weights: QuantScheme, top_k: int, folder: Path | None = None) -> Tuned[Tuning]:
    """The points of a case from the files of every top_k, measured on this processor.

    Without any, one line is logged with the command that measures the case, if `moe-mk tune` supports its formats.
    Raises ConfigError for a file without valid points, or with parameters that the kernels do not have.
    """
    shape = (context.hidden_size, context.intermediate_size, context.num_slots)
    case = Case(*shape, weights.name, context.compute.name)
    measured = tuned_path(_processor(), "cpu_native", case_name((*shape, top_k), weights, context.compute), folder)
    command = tune_command("cpu_native", (*shape, top_k), weights, context.compute)
    missing = measured if _is_tunable(weights, context.compute) else None
    return Tuned.load(measured.parent, case, tuning_of, BUILT_IN, command, missing)


def _is_tunable(weights: QuantScheme, compute: QuantScheme) -> bool:
    """Whether `moe-mk tune` has options for these formats."""
    stored = isinstance(weights, Plain) or weights in WEIGHTS.values()
    return stored and (isinstance(compute, Plain) or compute in ACTIVATIONS.values())


@cache
def _processor() -> str:
    """The name of the processor."""
    return describe(torch.device("cpu")).split(",")[0]
