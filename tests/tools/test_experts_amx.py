"""The benchmark of AMX, of experts_cpu.py with its settings: a refusal without AMX, a whole run."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from moe_mk.kernels.native.library import Isa
from moe_mk.kernels.native.selfcheck import load


@pytest.fixture(scope="module")
def bench(benchmarks: str) -> ModuleType:
    return import_module("experts_amx")


def test_a_processor_without_amx_is_refused_with_the_reason(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    native = load()
    if Isa.AMX_BF16 in native.isas:
        pytest.skip("this processor has AMX")
    monkeypatch.setattr(bench, "experts_cpu", None)  # refused before anything is made
    assert bench.main(["--json", str(tmp_path / "out.json")], native) == 1
    printed = capsys.readouterr().out
    assert "cannot use AMX_BF16" in printed and native.refused[Isa.AMX_BF16] in printed
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_a_run_writes_the_result_file_and_prints_the_tables(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experts_cpu_clock.PEAK_ITERATIONS", 100)  # of AMX in software
    out = tmp_path / "out.json"
    sizes = ["--experts", "2", "--hidden", "128", "--inter", "128", "--rows", "1", "20", "--top-k", "2"]
    arguments = [*sizes, "--rounds", "1", "--minutes", "0", "--quant", "mxfp4", "int8_w8a8", "--json", str(out)]
    assert bench.main(arguments, load(emulate_amx=True)) == 0
    results = json.loads(out.read_text())
    assert [case["rows"] for case in results["cases"]] == [1, 20] and "AMX_BF16" in results["device"]
    for case in results["cases"]:
        errors = {line["candidate"]: line.get("error_l2") for line in case["lines"]}
        assert {"ours fp8", "ours bf16", "ours mxfp4", "ours int8 w8a8", "transformers eager bf16"} < errors.keys()
        for name, error in errors.items():  # tokens or, in bf16, weights are rounded, unlike those of the reference
            assert name in ("read", "peak") or error < (4e-2 if name.endswith(("w8a8", "bf16")) else 4e-3), name
    assert "M=20 uniform" in capsys.readouterr().out
