"""The benchmark of all instruction sets: batches counted by hand, a whole run of a small layer, its page."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_mk.kernels.native.library import Isa
from moe_mk.kernels.native.selfcheck import load
from tools.results import cells_table, chosen_well


@pytest.fixture(scope="module")
def bench(benchmarks: str) -> ModuleType:
    return import_module("processor")


@pytest.mark.parametrize(("rows", "experts"), [(1, 32), (4, 32), (16, 16), (64, 8), (70, 8)])
def test_every_expert_of_a_batch_gets_the_rows(bench: ModuleType, rows: int, experts: int) -> None:
    x, ids, weights = bench.batch_of(rows, 16, 32 if rows < 16 else 16)
    assert ids.unique(return_counts=True)[1].tolist() == [rows] * experts
    assert all(len(set(each)) == 8 for each in ids.tolist()), "a token has distinct experts"
    assert x.shape == (len(ids), 16) and weights.shape == ids.shape


def run_of(*cells: tuple[str, int, Mapping[str, float], str]) -> dict[str, Any]:
    return {
        "cells": [
            {
                "format": name, "rows": rows, "wall_ms": ms, "chosen": chosen,
                "of_best": min(ms.values()) / ms[chosen], "of_read": 0.5, "of_peak": 0.9 - rows / 100,
            }
            for name, rows, ms, chosen in cells
        ]
    }  # fmt: skip


def test_a_slow_choice_is_named_with_its_share_of_the_best() -> None:
    good, near = ("fp8", 1, {"A": 4.0, "B": 2.0}, "B"), ("fp8", 4, {"A": 2.08, "B": 2.0}, "A")
    run = run_of(good, near, ("int4", 64, {"A": 3.0, "B": 2.0}, "A"))
    assert chosen_well(run) == "Chosen within 5% of the best in 2 of 3 cells: int4 at 64 rows 0.67."
    assert chosen_well(run_of(good)) == "Chosen within 5% of the best in 1 of 1 cells."
    head, _, first, second = cells_table(run).splitlines()
    assert head == "| rows of an expert | 1 | 4 | 64 |"
    assert first == (
        "| fp8 | A 4, B 2; B chosen, 1.00 of best: 0.89 of peak "
        "| A 2.08, B 2; A chosen, 0.96 of best: 0.86 of peak |  |"
    )
    assert second == "| int4 |  |  | A 3, B 2; A chosen, 0.67 of best: 0.50 of read |"


@pytest.mark.slow
def test_a_run_has_every_cell_and_every_instruction_set(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--hidden", "256", "--inter", "256", "--experts", "8", "--minutes", "0.01", "--threads", "1"]
    out = tmp_path / "run.json"
    assert (
        bench.main([*small, "--quant", "fp8", "int4_g128_w4a8", "q4_k", "--rows", "1", "64", "--json", str(out)]) == 0
    )
    run = json.loads(out.read_text(encoding="utf-8"))
    usable = {isa.name for isa in load().isas if isa is not Isa.SCALAR}
    assert [(cell["format"], cell["rows"]) for cell in run["cells"]] == [
        (name, rows) for name in ("fp8", "int4_g128_w4a8", "q4_k") for rows in (1, 64)
    ]
    assert all(cell["wall_ms"].keys() == usable and cell["rounds"] >= bench.ROUNDS for cell in run["cells"])
    assert all(0 < cell["of_best"] <= 1 and cell["chosen"] in usable for cell in run["cells"])
    assert chosen_well(run) in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main([*small[:4], "--experts", "12"])


def test_a_wrong_result_ends_the_run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ours", lambda *_: lambda x, ids, weights: x * 2)
    with pytest.raises(AssertionError, match="fp8 by .*: relative error"):
        bench.main(["--hidden", "256", "--inter", "128", "--experts", "8", "--quant", "fp8", "--threads", "1"])


def test_the_file_is_that_of_this_processor(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--file"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.parent == bench.FOLDER and path.suffix == ".json" and len(path.stem.split("-")) >= 3
