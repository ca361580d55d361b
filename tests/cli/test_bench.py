"""`moe-mk bench` measures what was decided, and `benchmarks/compare.py` reads two of its files."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from moe_mk.lab.cli.bench import bench_head, save_bench_plot, sizes_of
from moe_mk.lab.cli.measure import SHOWN
from tests.cli.conftest import moe_mk, printed

ROOT = Path(__file__).resolve().parents[2]
TINY = ["bench", "--num-experts", "16", "--hidden", "128", "--intermediate", "128", "--repeats", "2"]


def compare() -> Any:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "benchmarks" / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_pinned_pair_is_measured_stage_by_stage(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = printed(*TINY, "--tokens", "1,4", "--experts-backend", "torch_cpu", "--out", out, "--json")
    facts = json.loads(out.read_text())
    assert facts == json.loads(done)
    assert facts["pair"] == "no_ep + torch_cpu" and facts["ran_as_decided"]
    assert [result["tokens"] for result in facts["results"]] == [1, 4]
    for result in facts["results"]:
        assert set(result["stages_ms"]) == set(SHOWN)
        assert 0 < result["stages_ms"]["experts"] <= result["total_ms"]


def test_options_are_named_like_settings() -> None:
    small = "bench --hidden 128 --intermediate 128 --tokens 1 --repeats 1 --num-experts 16 --experts torch_cpu"
    done = printed(*small.split(), "--quant", "bf16", "--json")
    facts = json.loads(done)
    assert facts["layer"]["num_experts"] == 16 and facts["pair"] == "no_ep + torch_cpu"


def test_what_was_measured_is_reported_as_it_is() -> None:
    layer = {"num_experts": 16, "hidden_size": 64, "moe_intermediate_size": 32, "top_k": 8, "dtype": "bfloat16"}
    where = {"ranks": 1, "device": "a CPU", "threads": 2, "torch": "2.13"}
    facts = {"layer": layer, "environment": where, "pair": "a + b", "because": "pinned", "ran_as_decided": True}
    head = dict(bench_head(facts))
    assert head["layer"] == "16 experts, hidden 64, intermediate 32, top-8, bfloat16"
    assert head["pair"] == "a + b: pinned; it ran as decided" and head["where"].startswith(
        "1 rank, a CPU, 2 threads per rank"
    )
    assert "ANOTHER BACKEND RAN" in dict(bench_head(facts | {"ran_as_decided": False}))["pair"]


def test_a_pin_that_cannot_serve_ends_with_its_reasons() -> None:
    done = moe_mk(*TINY, "--tokens", "1", "--prepare-finalize", "all_to_all")
    assert done.exit_code == 3
    assert moe_mk(*TINY, "--tokens", "one").exit_code == 2


def test_sizes_are_read_once_each() -> None:
    assert sizes_of("1,16,1") == (1, 16)


def run_of(tokens_ms: dict[int, float], pair: str = "a + b", route: float = 1.0) -> dict[str, Any]:
    results = [
        {"tokens": tokens, "total_ms": total, "stages_ms": {"route": route, "experts": total - 1.0, "quantise": 0.001}}
        for tokens, total in tokens_ms.items()
    ]
    about = {"what": "moe-mk bench", "pair": pair, "environment": {"ranks": 1}, "layer": {"top_k": 8}}
    return about | {"results": results}


def test_two_runs_are_compared_by_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(run_of({1: 2.0, 16: 4.0, 64: 9.0})))
    after.write_text(json.dumps(run_of({1: 2.0, 16: 6.0}, pair="a + c")))
    assert compare().main([str(before), str(after)]) == 0
    stated = capsys.readouterr().out
    assert "differs  pair: a + b -> a + c" in stated and "quantise" not in stated
    rows = {line.split()[0]: line.split()[1:] for line in stated.splitlines()}
    assert rows["forward"] == ["1.00x", "1.50x"]  # 2/2 and 6/4
    assert rows["experts"] == ["1.00x", "1.67x"]  # 1/1 and 5/3
    assert compare().main([str(before), str(after), "--limit", "1.4"]) == 1
    assert "slower than 1.4x at 16 tokens" in capsys.readouterr().out
    assert compare().main([str(after), str(before), "--limit", "1.1"]) == 0


def test_what_cannot_be_compared_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(run_of({1: 2.0})))
    other.write_text(json.dumps(run_of({2: 2.0})))
    assert compare().main([str(one), str(other)]) == 2
    other.write_text("{}")
    with pytest.raises(SystemExit) as ended:
        compare().main([str(one), str(other)])
    assert ended.value.code == 2 and "cannot be compared" in capsys.readouterr().err


def test_a_picture_of_the_stages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'moe-mk[lab]'")
    facts = run_of({1: 2.0, 4: 3.0})
    for result in facts["results"]:
        result["stages_ms"] = dict.fromkeys(SHOWN, 0.25)
    save_bench_plot(facts, tmp_path / "stages.png")
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")
