"""The benchmark of AMX: states of samples worked by hand, a refusal without AMX, a whole run."""

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


def sample(bench: ModuleType, wall_ms: float, before: float, after: float) -> object:
    return bench.Sample(wall_ms, 2 * wall_ms, bench.Rates(before, 5e9), bench.Rates(after, 7e9))


def test_a_processor_without_amx_is_refused_with_the_reason(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    native = load()
    if Isa.AMX_BF16 in native.isas:
        pytest.skip("this processor has AMX")
    monkeypatch.setattr(bench, "Weights", None)  # refused before anything is made
    assert bench.main(["--json", str(tmp_path / "out.json")], native) == 1
    printed = capsys.readouterr().out
    assert "cannot use AMX_BF16" in printed and native.refused[Isa.AMX_BF16] in printed
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_a_run_writes_the_result_file_and_prints_the_tables(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # AMX in software: whatever the states are, every sample is counted once in "all".
    monkeypatch.setattr(bench, "PROBED_PRODUCTS", 1)
    monkeypatch.setattr(bench, "PAUSE", 0.0)
    out = tmp_path / "out.json"
    sizes = ["--experts", "2", "--hidden", "128", "--inter", "128", "--rows", "1", "20", "--threads", "2"]
    arguments = [*sizes, "--minutes", "0", "--json", str(out)]
    assert bench.main(arguments, load(emulate_amx=True)) == 0
    results = json.loads(out.read_text())
    assert [case["rows"] for case in results["cases"]] == [1, 20]
    for case in results["cases"]:
        own = next(line for line in case["lines"] if line["candidate"] == "ours")
        assert own["states"]["all"]["samples"] == bench.LEAST_ROUNDS
        assert own["error_l2"] < 4e-3
    assert [case["rows"] for case in results["formats"]] == [1, 16]
    for case in results["formats"]:
        errors = {line["candidate"]: line.get("error_l2") for line in case["lines"]}
        assert {f"ours {name.replace('_', ' ')}" for name in bench.FORMATS} < errors.keys()
        for name, error in errors.items():  # tokens or, in bf16, weights are rounded, unlike those of the reference
            rounds = name.endswith(("w8a8", "fp8 rows", "bf16"))
            assert name.startswith("read") or error < (4e-2 if rounds else 4e-3), name
    text = capsys.readouterr().out
    assert "M=20: 3 rounds" in text and "ours mxfp4" in text and "ms, median (minimum): " in text
