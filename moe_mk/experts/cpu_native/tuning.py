"""Tuning of the native CPU experts: the parameters that `moe-mk tune cpu_native` tries, and those measured here.

`configs/tuned/<processor>/cpu_native/<case>.json` holds the fastest parameters by tokens, one file for each top_k. They
are used by mean rows per expert. Where there is no file, the number of rows per expert from which another kernel is
faster (a *cut-over*) is measured when experts are loaded that are too large for the caches, once per process and case.
No choice changes a bit of a result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median
from typing import Any

from moe_mk.config.tuned import ACTIVATIONS, WEIGHTS, Case, Tuned, tune_command, tuned_path
from moe_mk.errors import ConfigError
from moe_mk.experts.base import ExpertsContext
from moe_mk.external.device import processor
from moe_mk.kernels.native.build import processor_has
from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding, Tuning
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.library import Isa
from moe_mk.quant.int8 import Int8Block
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme

BUILT_IN: tuple[tuple[float, Tuning], ...] = ((math.inf, Tuning()),)
FEW = 6.0
"""Mean rows per expert up to which some experts have few enough rows to be multiplied straight from memory."""
CHOICES = 8
"""The assumed number of experts per token where only the number of tokens is known."""
FROM_MEMORY: tuple[Tuning, ...] = (
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
AMX_ROWS: tuple[Tuning, ...] = tuple(Tuning(streamed_rows=rows) for rows in (32, 128, 256))
AMX_INTEGERS: tuple[Tuning, ...] = tuple(Tuning(tile_rows=rows) for rows in (1, 5, 17, 33))
"""Candidates on processors with AMX; `panel_rows` has no effect there."""
MEASURED_BYTES = 64 << 20
"""Bytes of a rank's packed experts from which cut-overs are measured: fewer may stay in the caches between calls."""
ROUNDS = 5
MARGIN = 0.02
"""The smallest gain for which the built-in cut-over is replaced."""
_MEASURING = threading.Lock()


@dataclass(frozen=True)
class CutOver:
    """Two kernels with the same bits, of which the second is faster from some number of rows per expert on."""

    parameter: str
    """The parameter of Tuning that moves it."""
    built_in: int
    """The rows from which the second kernel is used without tuning."""
    rows: tuple[int, ...]
    """Where the kernels are compared, ascending."""
    kernels: str
    """What it separates, for people."""
    last_of_first: bool = False
    """Whether the parameter is the last number of rows of the first kernel instead of the first of the second."""

    def at(self, rows: int) -> Tuning:
        """The second kernel from this number of rows on."""
        return Tuning(**{self.parameter: rows - self.last_of_first})


PANELS = CutOver("panel_rows", 5, (1, 2, 3, 4), "panels of weights instead of registers")
STREAMED = CutOver("streamed_rows", 65, (33, 65, 129), "panels of weights in L2 instead of L1", last_of_first=True)
INTEGER_TILES = CutOver("tile_rows", 9, (3, 5, 9, 17), "AMX tiles instead of vpdpbusd")


def cut_over_of(isa: Isa, format: Format, mode: ExpertsMode) -> CutOver | None:
    """The cut-over that tuning can move; None: one kernel serves any number of rows, or bits would differ."""
    integers = mode.quantize in (Rounding.INT8, Rounding.INT8_PARTS)
    if isa is Isa.AMX_BF16:
        tiles = replace(INTEGER_TILES, built_in=5) if mode.quantize is Rounding.INT8_PARTS else INTEGER_TILES
        return tiles if integers else STREAMED
    if isa in (Isa.AVX2, Isa.AVX512_VNNI):
        through_panels = integers or format in (Format.Q5_K, Format.Q6_K)
        return None if through_panels else PANELS
    if isa is not Isa.AVX512_BF16 or integers or format.group or format.has_parts:
        return None
    return replace(PANELS, built_in=1) if format is Format.BF16 else PANELS


@dataclass(frozen=True)
class Measured:
    """A cut-over as measured here."""

    cut_over: CutOver
    rows: int
    """From this number of rows on the second kernel is used."""
    ratios: tuple[tuple[int, float], ...]
    """By rows, the time of the second kernel over that of the first."""

    @property
    def tuning(self) -> Tuning:
        """Parameters for any number of rows; those built in where the cut-over is the built-in one."""
        return Tuning() if self.rows == self.cut_over.built_in else self.cut_over.at(self.rows)

    def __str__(self) -> str:
        """Such as: from 4 rows per expert weights decoded into panels (at 3 rows 1.04 of the time, at 4 rows 0.91)."""
        by_rows = ", ".join(f"at {rows} rows {ratio:.2f} of the time" for rows, ratio in self.ratios)
        same = " as built in" if self.rows == self.cut_over.built_in else ""
        return f"from {self.rows} rows per expert{same} {self.cut_over.kernels} ({by_rows})"


_FOUND: dict[tuple[str, CutOver], Measured] = {}
"""Per process, by numbers and names alone: what was measured does not keep the weights it was measured with."""


def measured(case: str, cut_over: CutOver, seconds: Callable[[int, Tuning], float]) -> Measured:
    """Compare the kernels once per process and case.

    seconds: one call with a number of rows of one expert, which the last calls have not read.
    """
    with _MEASURING:  # ranks that are threads would disturb each other
        if (case, cut_over) not in _FOUND:
            _FOUND[case, cut_over] = _measured(cut_over, seconds)
        return _FOUND[case, cut_over]


def _measured(cut_over: CutOver, seconds: Callable[[int, Tuning], float]) -> Measured:
    """In alternating rounds, from the most rows down, until the first kernel is faster."""
    ratios = []
    chosen = max(cut_over.built_in, cut_over.rows[-1] + 1)
    for rows in reversed(cut_over.rows):
        first, second = cut_over.at(rows + 1), cut_over.at(rows)
        rounds = [(seconds(rows, first), seconds(rows, second)) for _ in range(ROUNDS + 1)]
        ratio = median(after / before for before, after in rounds[1:])
        ratios.append((rows, ratio))
        if ratio >= (1 + MARGIN if rows >= cut_over.built_in else 1 - MARGIN):
            break
        chosen = rows
    # Between two measured numbers of rows the built-in cut-over is kept.
    below = next((rows for rows in reversed(cut_over.rows) if rows < chosen), 0)
    chosen = cut_over.built_in if below < cut_over.built_in <= chosen else chosen
    return Measured(cut_over, chosen, tuple(sorted(ratios)))


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
    tried = FROM_MEMORY if an_expert <= FEW / 2 else GATHERED if an_expert > FEW else (*FROM_MEMORY, *GATHERED[1:])
    if _has_amx():
        tried = tuple(each for each in tried if not each.panel_rows)
        tried += AMX_INTEGERS if isinstance(context.compute, Int8Block) else AMX_ROWS if an_expert > FEW else ()
    named = [{name: value for name, value in asdict(tuning).items() if value} for tuning in tried]
    return [dict(each) for each in {tuple(one.items()): one for one in named}.values()]


def load_tuned(context: ExpertsContext, weights: QuantScheme, top_k: int) -> Tuned[Tuning]:
    """The points of a case from the files of every top_k, measured on this processor.

    Without any, one line is logged with the command that measures the case, if `moe-mk tune` supports its formats.
    Raises ConfigError for a file without valid points, or with parameters that the kernels do not have.
    """
    shape = (context.hidden_size, context.intermediate_size, context.num_slots)
    case = Case(*shape, weights.name, context.compute.name)
    measured = tuned_path(processor(), "cpu_native", case.name(top_k), context.tuned_dir)
    command = tune_command("cpu_native", (*shape, top_k), weights, context.compute)
    is_tunable = isinstance(weights, Plain) or weights in WEIGHTS.values()
    is_tunable &= isinstance(context.compute, Plain) or context.compute in ACTIVATIONS.values()
    return Tuned.load(measured.parent, case, tuning_of, BUILT_IN, command, measured if is_tunable else None)


@cache
def _has_amx() -> bool:
    return processor_has("amx_tile", "amx_bf16")
