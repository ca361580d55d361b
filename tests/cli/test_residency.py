"""Experts larger than memory at a desk: stores ahead of time, budgets, and reads that are measured and predicted."""

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from moe_mk import DeepseekV3MoE
from moe_mk.flight import Flight
from moe_mk.lab.checkpoints import CheckpointShape, stores, write_checkpoint
from moe_mk.lab.cli import measure
from moe_mk.lab.cli.options import bytes_of
from moe_mk.lab.cli.residency import PagedSteps, _over_ranks, residency_table
from moe_mk.lab.plan.residency import Machine, Recorded, simulate
from moe_mk.trace.recorder import STAGES
from tests.cli.conftest import Invoke, moe_mk, printed, usage_error
from tests.layer.native import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER


@pytest.fixture(scope="module")
def store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the tiny checkpoint for one rank. Never write into it."""
    folder = tmp_path_factory.mktemp("stores")
    done = printed("convert", tiny, folder, "--store")
    assert "layer 3     32 experts" in done and "written in" in done
    return folder


def test_a_store_is_written_once_and_found_by_the_layer(
    tiny: Path, store: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = store.iterdir()
    before = file.stat()
    assert "there already" in printed("convert", tiny, store, "--store")
    again = json.loads(invoke("convert", tiny, store, "--store", "--json").stdout)
    assert [(each["layer"], each["rank"], each["written"]) for each in again["stores"]] == [(3, 0, False)]
    assert again["stores"][0]["num_bytes"] == before.st_size and list(store.iterdir()) == [file]

    packs = Mock(side_effect=AssertionError("the layer packs its experts again"))
    monkeypatch.setattr("moe_mk.experts.paged.write_store", packs)
    layer = DeepseekV3MoE.from_checkpoint(tiny, 3, residency={"slots": 4, "store": str(store)})
    layer(torch.ones(2, 256, dtype=torch.bfloat16))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    counts = layer.report().residency
    assert counts is not None and (counts.slots, counts.experts) == (4, 32)
    assert counts.uses == int((layer.expert_load > 0).sum()) and counts.reads == counts.uses - counts.hits
    assert layer.memory_report().experts == 4 * counts.record_bytes
    assert layer.report().as_dict()["residency"]["reads"] == counts.reads


def test_every_rank_has_a_store_that_ranks_find(tiny: Path, tmp_path: Path) -> None:
    assert "rank 1, 16 experts" in printed("convert", tiny, tmp_path, "--store", "--ranks", 2, "--layer", 3)
    assert len(list(tmp_path.glob("*.experts"))) == 2


@pytest.mark.slow
def test_two_ranks_run_from_their_stores(tiny: Path, invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("convert", tiny, tmp_path / "s", "--store", "--ranks", 2).exit_code == 0
    options = ("--memory", "1MB", "--store", tmp_path / "s", "--tokens", 8, "--repeats", 1, "--out", tmp_path / "o")
    printed("run", tiny, "--ranks", 2, *options)
    found = json.loads((tmp_path / "o").read_text())
    assert len(list((tmp_path / "s").iterdir())) == 2 and found["verification"]["passed"]
    measured, predicted = found["residency"]["rows"][:2]
    assert predicted["read_bytes_per_step"] == pytest.approx(measured["read_bytes_per_step"], rel=0.2)


def test_experts_that_are_held_in_another_format_run_from_a_store(tmp_path: Path) -> None:
    # cpu_native multiplies no blocks of 16 x 16: they are held as bf16, in stores too.
    write_checkpoint(tmp_path / "m", CheckpointShape(4, 64, 64, top_k=2, num_groups=2, top_k_groups=1, block=(16, 16)))
    printed("convert", tmp_path / "m", tmp_path / "s", "--store")
    x_TH, outputs = torch.ones(2, 64, dtype=torch.bfloat16), []
    for residency in (None, {"slots": 2, "store": str(tmp_path / "s")}):
        layer = DeepseekV3MoE.from_checkpoint(tmp_path / "m", 3, experts="cpu_native", residency=residency)
        outputs.append(layer(x_TH))
        assert layer.report().departures == () and layer.decision.problem.weights.name == "bf16"
    assert torch.equal(*outputs) and len(list((tmp_path / "s").iterdir())) == 1


def test_convert_takes_one_of_both(tiny: Path, tmp_path: Path) -> None:
    for options in ((), ("--store", "--to", "bf16")):
        assert "either --to FORMAT or --store" in usage_error("convert", tiny, tmp_path, *options)


def test_a_full_disk_is_found_before_anything_is_written(
    tiny: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda _: Mock(free=1_000_000))
    refused = usage_error("convert", tiny, tmp_path / "s", "--store")
    assert "1 MB are free" in refused and "name another folder" in refused
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda _: Mock(free=0))
    assert "there already" in printed("convert", tiny, store, "--store")


def test_wrong_stores_are_errors(tiny: Path, store: Path, invoke: Invoke, tmp_path: Path) -> None:
    (file,) = store.iterdir()
    moe_mk("make-checkpoint", tmp_path / "c", "--experts", 32, "--hidden", 256, "--intermediate", 128, "--seed", 9)
    assert moe_mk("convert", tmp_path / "c", tmp_path / "s", "--store").exit_code == 0
    (other,) = (tmp_path / "s").iterdir()
    assert other.name != file.name  # of other experts in the same layout
    shutil.copy(file, other)
    refused = invoke("convert", tmp_path / "c", tmp_path / "s", "--store")
    assert refused.exit_code == 2 and "holds other experts than its name states" in refused.stderr
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written" in usage_error("run", tiny, "--memory", "1MB", "--store", blocked / "s", "--tokens", 1)
    assert "cannot be used for stores" in usage_error("convert", tiny, blocked / "s", "--store")


def figures(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(*words))
    return found


@pytest.mark.row(173)
@pytest.mark.parametrize("policy", ["lru", "decayed"])
def test_measured_reads_are_those_that_the_simulator_predicts(tiny: Path, store: Path, policy: str) -> None:
    words = ("bench", tiny, "--memory", "1.2MB", "--store", store, "--tokens", "1,4", "--steps", 25, "--json")
    for result in figures(*words, "--set", f"kernel.residency.policy={policy}")["results"]:
        found = result["residency"]
        assert (found["policy"], found["steps"]) == (policy, 13)
        assert found["slots"] == 1_200_000 // found["record_bytes"]
        measured, predicted, optimum, _ = found["rows"]
        if result["tokens"] == 1:
            assert predicted["hit_rate_by_step"] == measured["hit_rate_by_step"]
            assert predicted["read_bytes_per_step"] == measured["read_bytes_per_step"]
        # With four tokens a step needs more experts than there are slots, and threads may finish in another order.
        assert predicted["hit_rate"] == pytest.approx(measured["hit_rate"], abs=0.08)
        assert predicted["read_bytes_per_step"] == pytest.approx(measured["read_bytes_per_step"], rel=0.15)
        assert optimum["read_bytes_per_step"] <= measured["read_bytes_per_step"]
        assert all(num_bytes % found["record_bytes"] == 0 for num_bytes in measured["read_bytes_by_step"])
        assert 0 < measured["hit_rate"] < 1 and measured["step_ms"] > 0


def test_several_layers_share_one_pool(tiny: Path, invoke: Invoke) -> None:
    sizes = "--num-experts 16 --hidden 256 --intermediate 128 --tokens 1 --steps 40 --layer 3 --layer 4".split()
    found = figures("bench", *sizes, "--memory", "2.4MB", "--json")["results"][0]["residency"]
    measured, predicted, optimum, _ = found["rows"]
    assert predicted["name"] == "predicted, decayed, pool" and len(found["shares"]) == 2
    assert min(found["shares"]) > 0 and sum(found["shares"]) == 2_400_000 // found["record_bytes"]
    assert predicted["hit_rate_by_step"] == measured["hit_rate_by_step"] and measured["step_ms"] > 0
    assert optimum["read_bytes_per_step"] < measured["read_bytes_per_step"]
    for words, problem in (
        (("bench", *sizes), "several layers need --memory"),
        (("bench", *sizes, "--memory", "120kB"), "in each of 2 layers"),
        (("run", tiny, "--layer", 3, "--layer", 4), "run verifies one layer"),
    ):
        refused = invoke(*words)
        assert refused.exit_code == 2 and problem in " ".join(refused.stderr.split())


def test_steps_are_counted_one_by_one() -> None:
    uses: list[list[tuple[int, ...]]] = [[(0,)], [(1,)], [(0, 1)], [(2,)]]
    one = simulate(Recorded(uses, 3, 1), Machine(100, 100.0, 1000.0), 2, "lru")
    assert one.by_step == [(2, 2, 0), (1, 0, 1)] and len(one.seconds) == 2


def both(row: torch.Tensor, *_: object) -> Flight[torch.Tensor]:
    """Another rank has three times as much."""
    yield from ()
    return torch.cat([row, 3 * row])


def test_counts_are_those_of_all_ranks_and_times_those_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _over_ranks("x", [(2, 1, 100, 1.0), (6, 6, 0, 2.0)], team := Mock(size=2, all_gather=both))
    assert found == PagedSteps("x", [8.0, 24.0], [4.0, 24.0], [400.0, 0.0], [3.0, 6.0])
    Console().print(table := residency_table({"steps": 2, "rows": [found.as_dict()]}, 4))
    assert [[*column.cells] for column in table.columns] == [["x"], ["87.5 %"], ["200 B"], ["4500"], ["0.8889"]]
    own = {stage: 2.0**bit for bit, stage in enumerate(STAGES)}
    monkeypatch.setattr(measure, "own_seconds", lambda _: own)
    times = measure.time_stages(layer := Mock(device=torch.device("cpu")), Mock(), team, 3)
    together = {"experts": ("permute", "experts", "reduce"), "combine": ("combine", "late_reduce"), "other": ("other",)}
    for stage, milliseconds in times.stages.items():
        assert milliseconds == 3e3 * sum(own.get(each, 0.0) for each in together.get(stage, (stage,)))
    samples = [dict.fromkeys((*measure.SHOWN, "total"), seconds) for seconds in (1.0, 9.0, 2.0)]
    assert layer.call_count == 4 and measure.stage_times(samples, team).total == 6e3


def test_run_states_hits_and_reads_beside_the_verdict(tiny: Path, store: Path) -> None:
    done = printed("run", tiny, "--memory", "1MB", "--store", store, "--tokens", 12, "--repeats", 1)
    assert "9 of 32 experts in memory; under uniform routing" in done
    assert "PASS" in done and "predicted, decayed" in done and "predicted, page cache" in done


def test_a_budget_of_less_than_one_expert_names_the_least(tiny: Path, store: Path, invoke: Invoke) -> None:
    refused = invoke("run", tiny, "--memory", "9kB", "--store", store)
    assert refused.exit_code == 2 and "is less than one expert of 102 kB" in refused.stderr
    least = refused.stderr.split("give at least ")[1].strip()
    assert invoke("run", tiny, "--memory", least, "--store", store, "--tokens", 1, "--repeats", 1).exit_code == 0
    twice = usage_error("run", tiny, "--memory", "9kB", "--store", store, "--ranks", 2).split("give at least ")[1]
    assert bytes_of("--memory", twice.strip()) == pytest.approx(2 * bytes_of("--memory", least), rel=0.02)
    less = str(bytes_of("--memory", least) - 1000)
    assert invoke("run", tiny, "--memory", less, "--store", store, "--tokens", 1).exit_code == 2
    assert "less than one expert" in usage_error("bench", tiny, "--memory", "9kB", "--store", store)
    assert "needs --memory" in usage_error("bench", tiny, "--store", store)


def test_hits_and_reads_are_drawn(tiny: Path, store: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'moe-mk[lab]'")
    options = ("--memory", "1MB", "--store", store, "--tokens", "1", "--steps", 6)
    assert "measured" in printed("bench", tiny, *options, "--plot", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert os.listdir(store) == [next(store.iterdir()).name]


@pytest.mark.slow
@pytest.mark.parametrize("quant", "bf16 fp8_channel int8_block mxfp4 nvfp4 int4_g32_zp awq q4_k_m".split())
def test_every_format_has_a_store_of_the_planned_size(quant: str, invoke: Invoke, tmp_path: Path) -> None:
    sizes = ("--experts", 16, "--hidden", 512, "--intermediate", 256, "--quant", quant)
    assert invoke("make-checkpoint", tmp_path / "c", *sizes).exit_code == 0
    assert invoke("convert", tmp_path / "c", tmp_path / "s", "--store").exit_code == 0
    options = ("--store", tmp_path / "s", "--tokens", 4, "--repeats", 1, "--out", tmp_path / "o")
    assert "PASS" in printed("run", tmp_path / "c", "--memory", "2MB", *options)
    found = json.loads((tmp_path / "o").read_text())
    assert found["memory"][0]["experts"] == found["residency"]["slots"] * found["residency"]["record_bytes"]
    assert len(list((tmp_path / "s").iterdir())) == 1
