"""Tuned files: what serves between and outside the points, and what is stated where there are none."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.tuning import Measured, TunedPoint, load_measured, save_measured, tuned_path

POINTS = (TunedPoint(4, {"threads": 1}, 10.0), TunedPoint(64, {"threads": 2}, 160.0))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(3, None), (4, 1), (15, 1), (17, 2), (64, 2), (65, None)],  # the middle of 4 and 64 on a log scale is 16
)
def test_the_nearest_point_serves_inside_the_range_only(tokens: int, expected: int | None) -> None:
    point = Measured(POINTS).at(tokens)
    assert (None if point is None else point.parameters["threads"]) == expected


def test_times_are_interpolated_on_logarithmic_scales() -> None:
    # 16 tokens are halfway: sqrt(10 * 160) = 40.
    assert Measured(POINTS).microseconds(16) == pytest.approx(40.0)
    assert Measured(POINTS).microseconds(4) == 10.0 and Measured(POINTS).microseconds(64) == 160.0
    assert Measured(POINTS).microseconds(3) is None and Measured(()).microseconds(4) is None
    assert Measured(POINTS[:1]).microseconds(4) == 10.0


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tuned_path("AMD EPYC 9654, 96 cores", "cpu_native", "H64", tmp_path)
    assert path == tmp_path / "AMD_EPYC_9654_96_cores" / "cpu_native" / "H64.json"
    save_measured(path, POINTS[::-1], {"torch": "x"})
    assert load_measured(path, "moe-mk tune x").points == POINTS
    assert json.loads(path.with_suffix(".meta.json").read_text()) == {"torch": "x"}
    assert sorted(file.name for file in path.parent.iterdir()) == ["H64.json", "H64.meta.json"]


def test_a_missing_file_is_one_line_with_the_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moe_mk"):
        assert load_measured(tmp_path / "no.json", "moe-mk tune torch_cpu --hidden 64").points == ()
    (record,) = caplog.records
    assert record.getMessage().endswith("To measure: moe-mk tune torch_cpu --hidden 64") and "\n" not in record.message


POINT = {"tokens": 1, "parameters": {}, "microseconds": 1.0}
BAD = ("{}", "[]", "nothing", [POINT | {"tokens": 0}], [POINT | {"microseconds": -1}], [POINT, POINT])


@pytest.mark.parametrize("content", BAD, ids=["empty", "list", "text", "no tokens", "no time", "twice"])
def test_a_file_without_points_is_refused(tmp_path: Path, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps({"points": content})
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"bad.json holds no tuned points.*run moe-mk tune x"):
        load_measured(tmp_path / "bad.json", "moe-mk tune x")
