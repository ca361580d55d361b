"""`moe-mk bench` measures what was decided, and compares with an earlier result."""

import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from moe_mk.lab.cli.bench import bench_head, bench_table, differences, ratios, ratios_table, save_bench_plot, sizes_of
from moe_mk.lab.cli.measure import SHOWN
from moe_mk.lab.cli.report import save_load_plot
from tests.cli.conftest import moe_mk, printed, rows_of, usage_error

TINY = ["bench", "--num-experts", "16", "--hidden", "128", "--intermediate", "128", "--repeats", "2"]


def test_a_pinned_pair_is_measured_stage_by_stage(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = printed(*TINY, "--tokens", "4,1", "--experts-backend", "torch_cpu", "--out", out, "--json")
    facts = json.loads(out.read_text())
    assert facts == json.loads(done)
    assert facts["pair"] == "no_ep + torch_cpu" and facts["ran_as_decided"]
    assert [result["tokens"] for result in facts["results"]] == [4, 1]
    for result in facts["results"]:
        assert set(result["stages_ms"]) == set(SHOWN)
        assert 0 < result["stages_ms"]["experts"] <= result["total_ms"]


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


STAGES_MS = {stage: 0.25 * number for number, stage in enumerate(SHOWN)}


def run_of(tokens_ms: dict[int, float], pair: str = "a + b", route: float = 1.0) -> dict[str, Any]:
    stages = {"route": route, "quantise": 0.001 * route}
    results = [
        {"tokens": tokens, "total_ms": total, "stages_ms": stages | {"experts": total - 1.0}}
        for tokens, total in tokens_ms.items()
    ]
    about = {"what": "moe-mk bench", "pair": pair, "environment": {"ranks": 1}, "layer": {"top_k": 8}}
    return about | {"results": results}


def test_two_runs_are_compared_by_ratio() -> None:
    before, after = run_of({1: 2.0, 16: 4.0, 64: 9.0}), run_of({1: 2.0, 16: 6.0}, pair="a + c", route=100.0)
    after["layer"]["quant"] = "fp8"
    # forward 2/2 and 6/4, experts 1/1 and 5/3; quantise took too little, and 64 tokens are in one of them only.
    assert ratios(before, after) == {
        1: {"route": 100.0, "experts": 1.0, "forward": 1.0},
        16: {"route": 100.0, "experts": pytest.approx(5 / 3), "forward": 1.5},
    }
    assert differences(before, after) == ["pair: a + b -> a + c", "quant: None -> fp8"]
    console = Console(width=99, file=(written := io.StringIO()))
    console.print(ratios_table(ratios(before, after)))
    results = [{**each, "stages_ms": STAGES_MS} for each in before["results"]]
    console.print(bench_table({"repeats": 3, "results": results}))
    text = written.getvalue()
    assert [[*row.values()] for row in rows_of(text, "stage")][:3] == [
        ["route", "100.00x", "100.00x"], ["experts", "1.00x", "1.67x"], ["forward", "1.00x", "1.50x"],
    ]  # fmt: skip
    rows = [[stage, *[f"{STAGES_MS[stage]:.3f}"] * 3] for stage in SHOWN] + [["forward", "2.000", "4.000", "9.000"]]
    assert [[*row.values()] for row in rows_of(text.partition("milliseconds")[2], "stage")] == rows


def test_an_earlier_result_is_compared_with_and_a_slower_forward_is_a_code(tmp_path: Path) -> None:
    out, words = tmp_path / "out.json", (*TINY, "--tokens", "1")
    assert moe_mk(*words, "--out", out).exit_code == 0
    done = moe_mk(*words, "--against", out, "--limit", "1e-9")
    assert done.exit_code == 1 and "slower" in done.output and "forward" in done.output
    for text in ("{}", '{"what": "moe-mk bench"}', "[3]"):
        out.write_text(text)
        assert "has no results of moe-mk bench" in usage_error(*words, "--against", out)


def test_a_picture_of_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'moe-mk[lab]'")
    facts = run_of({1: 2.0, 4: 3.0})
    for result in facts["results"]:
        result["stages_ms"] = dict.fromkeys(SHOWN, 0.25)
    save_bench_plot(facts, tmp_path / "stages.png")
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("moe_mk.lab.cli.bench.save_picture", drawn := Mock())
    save_bench_plot(facts, tmp_path / "stages.png")
    bars = [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in drawn.call_args.args[0].axes[0].patches]
    assert bars == [(at - 0.4, 0.25 * stage, 0.25) for stage in range(len(SHOWN)) for at in range(2)]
    monkeypatch.setattr("moe_mk.lab.cli.report.save_picture", drawn)
    save_load_plot([3, 1, 4, 2], [(0, 2), (1, 3)], tmp_path / "load.png")
    assert [bar.get_height() for bar in drawn.call_args.args[0].axes[0].patches] == [3, 4, 1, 2]
