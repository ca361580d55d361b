"""Places between measured points, and what stands in the names of tuned files and in the files."""

import json
import math
from pathlib import Path

import pytest

from moe_mk.config.tuned import Case, Tuned, TunedPoint, between, load_measured, nearest, top_k_in, tuned_path
from moe_mk.errors import ConfigError
from moe_mk.lab.tuning import save_measured


@pytest.mark.parametrize(("at", "index"), [(1, 0), (3, 0), (4, 0), (5, 1), (16, 1), (0.5, None), (17, None)])
def test_the_nearest_place_is_so_on_a_logarithmic_scale(at: float, index: int | None) -> None:
    # Between 1 and 16 the middle is 4, not 8.5; of two as near it is the first.
    assert nearest([1, 16], at) == index


def test_heights_follow_a_straight_line_on_logarithmic_scales() -> None:
    # From (1, 10) to (16, 160) the line is 10 x; behind it, the height stays.
    points = [(1.0, 10.0), (16.0, 160.0), (64.0, 160.0)]
    assert between(points, 4.0) == pytest.approx(40.0) and between(points, 32.0) == pytest.approx(160.0)
    assert [between(points, place) for place, _ in points] == [height for _, height in points]
    assert between(points, 0.9) is None and between(points, 65.0) is None


def test_one_point_serves_itself_alone_and_none_serves_nobody() -> None:
    assert nearest([8], 8) == 0 and between([(8.0, 3.0)], 8.0) == 3.0 and nearest([8], 9) is None
    assert nearest([], 1) is None and between([], 1.0) is None


def test_a_name_gives_back_its_top_k_and_others_give_none() -> None:
    case, wide = (Case(256, 128, slots, "fp8_128x128", "fp8_1x128") for slots in (8, 80))
    pattern = case.name("*")
    assert top_k_in(case.name(12), pattern) == 12 and top_k_in(wide.name(12), pattern) is None
    assert top_k_in(pattern, pattern) is None and top_k_in(pattern.replace("*", "2x"), pattern) is None


def test_points_of_every_top_k_count_by_rows_and_beyond_them_the_built_in_parameters(tmp_path: Path) -> None:
    case = Case(256, 128, 8, "bf16", "bf16")
    for top_k, tokens in ((1, (16, 64)), (4, (8, 32))):  # 2, 8 and 4, 16 rows an expert
        points = [TunedPoint(each, {"of": f"{top_k} {each}"}, float(each)) for each in tokens]
        save_measured(tmp_path / f"{case.name(top_k)}.json", points, {})
    save_measured(tmp_path / f"{Case(256, 128, 4, 'bf16', 'bf16').name(1)}.json", points, {})
    tuned = Tuned.load(tmp_path, case, lambda each: each["of"], ((1.0, "few"), (20.0, "some"), (math.inf, "many")), "")
    assert [(p.rows_an_expert, p.parameters) for p in tuned.points] == [
        (2, "1 16"), (4, "4 8"), (8, "1 64"), (16, "4 32"),
    ]  # fmt: skip
    rows = (0.5, 1, 1.5, 2, 5, 6, 16, 17, 20, 21)
    assert " ".join(tuned.at(each) for each in rows) == "few few some 1 16 4 8 1 64 4 32 some some many"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    points = TunedPoint(4, {"threads": 1}, 10.0), TunedPoint(64, {"threads": 2}, 160.0)
    path = tuned_path("AMD EPYC 9654, 96 cores", "cpu_native", "H64", tmp_path)
    assert path == tmp_path / "AMD_EPYC_9654_96_cores" / "cpu_native" / "H64.json"
    save_measured(path, points[::-1], {"torch": "x"})
    assert load_measured(path, "moe-mk tune x") == points
    assert json.loads(path.with_suffix(".meta.json").read_text()) == {"torch": "x"}
    assert sorted(file.name for file in path.parent.iterdir()) == ["H64.json", "H64.meta.json"]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"points": [{"tokens": 1e400, "parameters": {}, "microseconds": 1}]}',
        '{"points": [{"tokens": 1, "parameters": {}, "microseconds": 1e400}]}',
        f'{{"points": [{{"tokens": 1{"0" * 400}, "parameters": {{}}, "microseconds": 1}}]}}',
        '{"points": {"a": 1}}',
        "{}",
        "[]",
        "nothing",
        '{"points": [{"tokens": 0, "parameters": {}, "microseconds": 1}]}',
        '{"points": [{"tokens": 1, "parameters": {}, "microseconds": -1}]}',
        '{"points": [' + ", ".join(['{"tokens": 1, "parameters": {}, "microseconds": 1}'] * 2) + "]}",
    ],
    ids=["brackets", "endless", "endless time", "400 digits", "no list", "empty", "list", "text", "0", "-1", "twice"],
)
def test_a_file_without_points_that_can_be_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "case.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"case.json holds no tuned points: .*; run the command"):
        load_measured(tmp_path / "case.json", "the command")
