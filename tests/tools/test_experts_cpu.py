"""The figures of CPU experts in docs/cpu.md are those of the committed results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

from experts_cpu_report import GGML, OURS, section  # noqa: E402

FILES = ("experts_cpu_e8", "experts_cpu_formats", "experts_cpu_int4", "experts_cpu_e32", "experts_cpu_e256")


@pytest.mark.parametrize("file", FILES)
def test_the_page_shows_the_results_that_are_here(file: str) -> None:
    results = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    assert section(results) in (ROOT / "docs" / "cpu.md").read_text(encoding="utf-8")


@pytest.mark.row(171)
def test_blocks_of_four_to_eight_bits_are_faster_than_the_best_variant_of_ggml() -> None:
    results = json.loads((RESULTS / "experts_cpu_int4.json").read_text(encoding="utf-8"))
    compared = 0
    for case in results["cases"]:
        by_name = {line["candidate"]: line["cpu_ms"] for line in case["lines"]}
        for name, theirs in by_name.items():
            if name.startswith(GGML):
                ratio = theirs / by_name[f"ours {name.removeprefix(GGML).removesuffix(' repacked')}"]
                assert ratio >= (1.05 if case["rows"] == 1 else 1.9 if case["rows"] == 4 else 2.0), (case["rows"], name)
                compared += 1
    assert compared == 9 * 5 and OURS in by_name
