"""Tuned files: what is written is read, and what holds no points is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.tuning import TunedPoint, load_measured, save_measured, tuned_path

POINTS = (TunedPoint(4, {"threads": 1}, 10.0), TunedPoint(64, {"threads": 2}, 160.0))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tuned_path("AMD EPYC 9654, 96 cores", "cpu_native", "H64", tmp_path)
    assert path == tmp_path / "AMD_EPYC_9654_96_cores" / "cpu_native" / "H64.json"
    save_measured(path, POINTS[::-1], {"torch": "x"})
    assert load_measured(path, "moe-mk tune x") == POINTS
    assert json.loads(path.with_suffix(".meta.json").read_text()) == {"torch": "x"}
    assert sorted(file.name for file in path.parent.iterdir()) == ["H64.json", "H64.meta.json"]


POINT = {"tokens": 1, "parameters": {}, "microseconds": 1.0}
BAD = ("{}", "[]", "nothing", [POINT | {"tokens": 0}], [POINT | {"microseconds": -1}], [POINT, POINT])


@pytest.mark.parametrize("content", BAD, ids=["empty", "list", "text", "no tokens", "no time", "twice"])
def test_a_file_without_points_is_refused(tmp_path: Path, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps({"points": content})
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"bad.json holds no tuned points.*run moe-mk tune x"):
        load_measured(tmp_path / "bad.json", "moe-mk tune x")
