"""The benchmark of all instruction sets: batches counted by hand, a whole run of a small layer, its page."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from moe_mk.kernels.native.library import Isa
from moe_mk.kernels.native.selfcheck import load
from tools.results import chosen_well


@pytest.fixture(scope="module")
def bench(benchmarks: str) -> ModuleType:
    return import_module("processor")


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
