"""Tuning of the Triton experts: the tiles that `moe-mk tune triton` tries, built-in tiles, and measured ones.

`configs/tuned/NVIDIA_<device>/triton/<case>.json` holds points by tokens, one file for each top_k, as `moe-mk tune
triton` writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_mk.config.shipped import config_folder
from moe_mk.config.tuned import Case, Tuned
from moe_mk.errors import ConfigError
from moe_mk.kernels.triton.tile import ENGINES, Tile

BUILT_IN: tuple[tuple[float, Tile], ...] = (
    (8.0, Tile(rows=16, swap=True, warps=4, stages=5)),
    (20.0, Tile(rows=32, swap=True, warps=4, stages=4)),
    (80.0, Tile(rows=64, swap=False, warps=8, stages=4)),
    (math.inf, Tile(rows=128, swap=False, warps=8, stages=3)),
)
"""The largest mean number of rows per expert for a tile, which holds 1.6 times as many: few experts need two tiles."""
DECODED: tuple[tuple[float, Tile], ...] = (
    *BUILT_IN[:2],
    (80.0, Tile(rows=64, swap=True, warps=8, stages=4)),
    BUILT_IN[-1],
)
"""The same for weights decoded in registers: as the left operand they need not go through shared memory."""
INTEGERS: tuple[tuple[float, Tile], ...] = (
    BUILT_IN[0],
    (20.0, Tile(rows=32, swap=True, warps=8, stages=4)),
    *DECODED[2:],
)
"""The same for integers with scales of groups, which spill with four warps and 32 rows."""
DECODED_TO_FP8: tuple[tuple[float, Tile], ...] = (*INTEGERS[:2], *BUILT_IN[2:])
"""The same for MXFP4 decoded to FP8, which also spills with 64 rows and the weights left."""
CANDIDATES: tuple[Tile, ...] = (
    *(Tile(16, True, 4, stages) for stages in (4, 5)),
    *(Tile(32, True, warps, stages) for warps in (4, 8) for stages in (3, 4)),
    *(Tile(64, False, warps, stages) for warps in (4, 8) for stages in (3, 4)),
    Tile(64, True, 8, 4),
    *(Tile(128, False, 8, stages) for stages in (2, 3)),
)
"""Candidates of tuning; those of other engines are `of_engines`."""
CHOICES = 8
"""The assumed number of experts per token where only the number of tokens is known."""


def of_engines() -> tuple[Tile, ...]:
    """Candidates of engines of other distributions."""
    return tuple(Tile(*tile, name) for name, engine in ENGINES.items() for tile in engine.tried)


def sensible(tile: Tile, rows_an_expert: float) -> bool:
    """Whether to try a tile: it is not eight times too small and, above 32 rows, not mostly empty."""
    rows = rows_an_expert
    return tile.rows >= min(rows / 8, 128) and (tile.rows <= 32 or tile.rows <= 8 * rows)


def tile_of(parameters: Mapping[str, Any]) -> Tile:
    """A tile by the names of its fields. Raises ConfigError if no kernel has it, or if it exceeds shared memory."""
    try:
        return Tile(**parameters)
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"{dict(parameters)} is not a tile of the Triton experts: {problem}") from None


def tuned_folder(device: str, folder: Path | None = None) -> Path:
    """The folder of the tuned files of a device. device: the name of a profile (h200), or of torch."""
    root = folder or config_folder() / "tuned"
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", device if device.lower().startswith("nvidia") else f"NVIDIA_{device}")
    there = [each.name for each in root.iterdir() if each.name.lower() == name.lower()] if root.is_dir() else []
    return root / (there[0] if there else name.upper()) / "triton"


def load_tuned(
    device: str,
    case: Case,
    folder: Path | None = None,
    *,
    log: bool = True,
    built_in: tuple[tuple[float, Tile], ...] = BUILT_IN,
) -> Tuned[Tile]:
    """Read the points of a case on a device from all its files.

    Raises ConfigError for a file without valid points, or with tiles that no kernel has.
    """
    files = tuned_folder(device, folder)
    missing = files / f"{case.name('*')}.json" if log else None
    return Tuned.load(files, case, tile_of, built_in, "moe-mk tune triton", missing)
