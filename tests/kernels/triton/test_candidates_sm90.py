"""Every tile that tuning may select is compiled for sm_90 as it is launched: no spills, and no more work than recorded.

python tests/kernels/triton/test_candidates_sm90.py     compiles all, and writes compiled.json
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from contrib.moe_mk_contrib.tests.kernels.gluon_gemms_sm90 import by_hand
from moe_mk.experts.triton.tuning import CANDIDATES as OWN
from moe_mk.experts.triton.tuning import of_engines
from moe_mk.kernels.triton.tile import SHARED_MEMORY, Tile
from tests.kernels.triton.sm90_gemms import is_after_3_6, w2_of, w13_of

FILE = Path(__file__).parent / "compiled.json"
SLACK = 1.05
"""Of the instructions of a step, for another patch release of the compiler."""
STEPS_AFTER_3_6 = {(Tile(32, True, 4, 4), "w2"): 181}
"""Those of Triton 3.8, where it needs more than 3.6, with which compiled.json is written."""
CANDIDATES = (*OWN, *of_engines())
IN_CI = (Tile(16, True, 4, 5), Tile(8, True, 4, 6, "gluon"))


def name(tile: Tile) -> str:
    engine = {"triton": "Triton", "gluon": "Gluon"}[tile.engine]
    left = ", weights left" if tile.swap and tile.engine == "triton" else ""
    return f"{engine}, {tile.rows} tokens{left}, {tile.warps} warps, {tile.stages} stages"


def found(tile: Tile) -> dict[str, Any]:
    """What the compiler made of both GEMMs of a tile."""
    made = {}
    for gemm in ("w13", "w2"):
        if tile.engine == "gluon":
            built = by_hand(tile.rows, second=gemm == "w2", gather=gemm == "w13", stages=tile.stages)
        else:
            built = (w13_of if gemm == "w13" else w2_of)("fp8", tile)
        made[gemm] = {
            "registers": built.registers, "spills": built.spills, "shared": built.shared, "step": built.step,
            "products": built.products, "store": max(built.stores),
        }  # fmt: skip
    return made


@cache
def recorded() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


@pytest.mark.sm90
@pytest.mark.parametrize(
    "tile",
    [pytest.param(t, marks=pytest.mark.slow if t in IN_CI else pytest.mark.stress, id=name(t)) for t in CANDIDATES],
)
def test_a_candidate_keeps_to_its_budget(tile: Tile) -> None:
    for gemm, built in found(tile).items():
        budget = recorded()[name(tile)][gemm]
        step = STEPS_AFTER_3_6.get((tile, gemm), budget["step"]) if is_after_3_6() else budget["step"]
        assert built["spills"] == 0 and built["shared"] < SHARED_MEMORY, gemm
        assert built["products"] == budget["products"] and built["step"] <= SLACK * step, gemm
        assert built["store"] >= budget["store"], "rows are stored at least as widely as before"


def test_every_candidate_is_recorded_without_spills() -> None:
    assert list(recorded()) == [name(tile) for tile in CANDIDATES]
    assert all(gemm["spills"] == 0 for tile in recorded().values() for gemm in tile.values())


def main() -> None:
    tiles = {name(tile): found(tile) for tile in CANDIDATES}
    lines = ",\n".join(f" {json.dumps(tile)}: {json.dumps(gemms)}" for tile, gemms in tiles.items())
    FILE.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
