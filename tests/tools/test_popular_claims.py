"""Every popular claim is measured, and its ratio held to nothing; so is every method of overlap."""

import math
import re
from dataclasses import replace

import pytest

from moe_mk.lab.testing.on_ranks import RankWorld

TINY = {"tokens": 8, "hidden": 128, "inter": 64, "experts": 8, "top_k": 2, "rounds": 2}


@pytest.mark.row(112)
def test_every_claim_is_measured_and_prints_its_ratio(
    world: RankWorld, capsys: pytest.CaptureFixture[str], benchmarks: str
) -> None:
    from popular_claims import CLAIMS, measured
    from small_layers import Size, native_experts

    small = tuple(replace(claim, size=Size(**TINY)) for claim in CLAIMS)
    rows = measured(small, world, native_experts())
    printed = capsys.readouterr().out.splitlines()
    reported = {
        "2x compute", "3-5x all-to-all", "-50 % routing time", "-30 % memory", "15-30 % faster", "20-30 % faster",
    }  # fmt: skip
    assert {claim.reported for claim in CLAIMS} == reported and len(rows) == len(printed) == len(reported)
    for row, line in zip(rows, printed, strict=True):
        assert math.isfinite(row["ratio"]) and row["ratio"] > 0
        assert row["ratio"] == pytest.approx(row["before"] / row["after"], rel=0.05)
        shown = re.search(r"here +([0-9.]+)x", line)
        assert shown is not None and float(shown[1]) == pytest.approx(row["ratio"], abs=0.006)
        assert row["reported"] in line


@pytest.mark.row(42)
def test_overlap_is_measured_with_a_ratio_for_every_way(world: RankWorld, benchmarks: str) -> None:
    from overlap import measure, row
    from small_layers import Size, native_experts

    found = row(world.call(measure, Size(**TINY), "one_sided", native_experts(), timeout_s=100.0), "one_sided", 8)
    ways = {f"{tiles} {carrier}" for tiles in (1, 2, 4, 8) for carrier in ("turns", "thread")}
    assert set(found["ratio"]) == {"dual", *ways} and all(0 < ratio < math.inf for ratio in found["ratio"].values())
    assert set(found["hidden"]) == ways and all(0 <= share <= 1 for share in found["hidden"].values())
    # Three tiles or more: in one thread M1 is between C0 and D2 in every round, whatever the clock states.
    assert found["overlapping_pairs"]["4 turns"] >= 7 and found["overlapping_pairs"]["1 turns"] == 0
