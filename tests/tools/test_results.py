"""The figures of the README and of the pages of results are those of the result files, computed by hand here."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.pages import between
from tools.results import (
    ENGINES_PAGE,
    FIRST,
    INSTRUCTION_SETS_PAGE,
    PROCESSORS,
    PROCESSORS_PAGE,
    README,
    RESULTS,
    ROOT,
    cells_table,
    comparisons,
    engines_page,
    instruction_sets_page,
    processors_page,
    readme_table,
)  # fmt: skip

PAGES = {
    ENGINES_PAGE: engines_page,
    PROCESSORS_PAGE: processors_page,
    INSTRUCTION_SETS_PAGE: instruction_sets_page,
}
CASES = {"batch 1": (1, 16, 32), "batch 16": (16, 16, 16), "prefill 512": (1, 512, 1)}


def engines(**seconds: list[float]) -> dict[str, Any]:
    """A run in which every case takes the same seconds, by contestant and round."""
    contestants = {
        name: {"version": "engine 1", "peak_bytes": 2e9, "seconds": dict.fromkeys(CASES, each)}
        for name, each in seconds.items()
    }
    about = {
        "model": "a-model",
        "layers": 2,
        "processor": "a processor",
        "date": "2026-11-28",
        "command": "run engines",
    }
    return about | {"cases": CASES, "contestants": contestants}


def layers(shape: Mapping[str, int], *cases: dict[str, Any]) -> dict[str, Any]:
    return {"device": "a device", "versions": {"torch": "2"}, "command": "run", "shape": shape, "cases": list(cases)}


def case(rows: int, wall_ms: Mapping[str, float], skew: str = "uniform") -> dict[str, Any]:
    """Processor times are twice the wall times."""
    lines = [{"candidate": name, "wall_ms": ms, "cpu_ms": 2 * ms} for name, ms in wall_ms.items()]
    return {"rows": rows, "skew": skew, "lines": lines}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    # At equal speed in the first round, twice as fast in the second, half as fast in the third.
    pairs = {name: engines(**{alone: [2.0, 4.0, 4.0], own: [2.0, 2.0, 8.0]}) for name, own, alone in FIRST}
    pairs["engines_deepseek"] = engines(**{"vllm+zentorch": [3.0, 3.0], "vllm+moe_mk": [4.0, 4.0]})
    pairs["engines_bf16"] = engines(**{"vllm": [4.0], "vllm+zentorch": [2.0], "vllm+moe_mk": [2.0]})
    pairs["engines_formats"] = engines(**{"vllm": [4.0], "vllm+moe_mk:fp8": [2.0], "vllm+moe_mk:int4": [1.0]})
    shape = {"experts": 8, "hidden": 64, "inter": 32}
    four = {"ours fp8": 8.0, "ours q4 0": 4.0, "ggml q4 0": 16.0, "ggml q4 0 repacked": 6.0}
    files: dict[str, Any] = pairs | {
        name: layers(shape, case(1, four)) for names in PROCESSORS.values() for name in names
    }
    both = {"ours fp8": 150.0, "ours bf16": 4.0, "vllm bf16": 6.0, "vllm fp8": 450.0, "transformers eager bf16": 9.0}
    files["experts_avx2"] = layers(shape, case(4, both), case(4, {"ours fp8": 9.0}, "zipf"))
    waited = {"states": {"all": {"wall_ms": 2.0, "cpu_ms": 4.0}}}
    tiles = {"rows": 16, "lines": [{"candidate": "ours"} | waited, {"candidate": "vllm bf16"} | waited]}
    files["experts_amx"] = layers({"E": 8, "H": 64, "I": 32}, tiles)
    files["eplb_cpu"] = {"command": "plan", "goals": [{"what": "large: times vLLM", "value": 30.4}]}
    for name, found in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return tmp_path


def rows_of(page: str, *words: str) -> list[list[str]]:
    """Cells of the table rows that have all words."""
    lines = [line for line in page.splitlines() if line.startswith("|") and all(word in line for word in words)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_ratios_are_formed_in_each_round_and_their_median_is_shown(results: Path) -> None:
    (avx2,) = [each for each in comparisons(results) if each.run == "engines_avx2" and each.case == "batch 1"]
    assert avx2.ratios == (1.0, 2.0, 0.5) and avx2.ratio == 1.0
    # 32 new tokens in a median of 4 s alone and of 2 s with moe_mk.
    assert avx2.row() == ("a-model, bf16, vLLM, AVX2", "batch 1", "8.0", "16.0", "1.00 (0.50..2.00)")


def test_the_readme_shows_every_case_that_is_slower_and_compares_like_with_like_first(results: Path) -> None:
    table = readme_table(results)
    slower = rows_of(table, "0.75 (0.75..0.75)")
    assert [row[1] for row in slower] == list(CASES)
    ratios = [row[4] for row in rows_of(table, "a-model")]
    assert ratios[-4:] == ["2.00 (2.00..2.00)"] * 2 + ["4.00 (4.00..4.00)"] * 2  # FP8 and INT4 against bf16
    assert [row[0] for row in rows_of(table, "in bf16")] == [row[0] for row in rows_of(table, "a-model")[-4:]]
    assert "a processor" in table and "2026-11-28" in table and "engine 1" in table
    alike = [each.same_format for each in comparisons(results)]
    assert alike == sorted(alike, reverse=True)


def test_the_page_of_engines_has_the_command_and_all_cases_of_each_run(results: Path) -> None:
    page = engines_page(results)
    assert page.count("run engines") == len({run for run, _, _ in FIRST})
    zentorch = rows_of(page, "bf16, vLLM with zentorch")
    assert len(zentorch) == 2 and all(len(row) == 1 + len(CASES) for row in zentorch)
    # 32 new tokens in a median of 4 s alone and of 2 s with moe_mk.
    assert ["bf16, vLLM, AVX2", "8.0, 16.0: 1.00 (0.50..2.00)"] in [row[:2] for row in rows_of(page, "AVX2")]
    # Six pairs in the same format with 3 cases each: those of DeepSeek take 4 s with moe_mk and 3 alone.
    assert "In 3 of 18 comparisons" in page


def test_layers_are_compared_in_the_same_format_where_it_was_measured(results: Path) -> None:
    page = processors_page(results)
    assert rows_of(page, "E=8, 64x32")[0] == ["E=8, 64x32", "1"]
    four = rows_of(page, "ggml q4 0")
    assert four and all(row[1:] == ["1.50"] for row in four)  # its better variant, 6 ms to 4
    (bf16,), (fp8,) = rows_of(page, "| vLLM bf16 |", "1.50"), rows_of(page, "| vLLM fp8 |")
    assert bf16[1:] == ["1.50"] and fp8[1:] == ["3.00"]  # columns are the tokens of this run
    assert rows_of(page, "vLLM bf16 / fp8", "1.00") and not rows_of(page, "eager")
    assert rows_of(page, "| fp8, ms", "150") and rows_of(page, "large", "30")


def test_the_table_takes_the_place_of_an_older_one(results: Path) -> None:
    once = between(
        "before\n<!-- figures: begin -->old\n<!-- figures: end -->\nafter\n", "figures", readme_table(results)
    )
    assert once.startswith("before\n") and once.endswith("after\n") and "old" not in once
    assert between(once, "figures", readme_table(results)) == once


@pytest.mark.row("N24")
@pytest.mark.parametrize(("page", "written"), PAGES.items())
def test_a_page_shows_the_results_that_are_here(page: str, written: Callable[[Path], str]) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == written(ROOT / RESULTS), "run `make features`"


@pytest.mark.row("N24")
def test_the_readme_shows_the_results_that_are_here() -> None:
    text = (ROOT / README).read_text(encoding="utf-8")
    assert between(text, "figures", "\n" + readme_table(ROOT / RESULTS)) == text, "run `make features`"


def test_a_cell_names_instruction_sets_only_where_there_are_several() -> None:
    one = {"format": "bf16", "rows": 1, "wall_ms": {"AVX2": 10.0}, "chosen": "AVX2", "of_best": 1.0}
    limits = {"of_read": 0.5, "of_peak": 0.25}
    two = one | {"rows": 4, "wall_ms": {"AVX2": 10.0, "AMX": 8.0}, "of_best": 0.8, "of_read": 0.1}
    table = cells_table({"cells": [one | limits, limits | two]})
    assert rows_of(table, "bf16") == [["bf16, AVX2", "10 (r 0.50)", "10 (p 0.25; AMX 0.80)"]]
