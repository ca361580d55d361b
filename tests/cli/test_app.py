"""Every verb in this process: what it prints, what it writes, and its exit code."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from moe_mk.experts.base import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.lab.cli.report import versions
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from moe_mk.registry import Registry
from moe_mk.text import amount
from tests.cli.conftest import TINY, Invoke, printed, usage_error
from tests.support.tiers import quick_where


def test_a_second_writing_changes_nothing(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in tiny.iterdir()}
    assert "is already complete; --force overwrites it" in printed("make-checkpoint", tiny, *TINY)
    assert {file.name: file.stat().st_mtime_ns for file in tiny.iterdir()} == before
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    forced = invoke("make-checkpoint", copy, *TINY, "--force")
    assert forced.exit_code == 0 and "complete already" not in forced.stdout
    assert all((copy / name).read_bytes() == (tiny / name).read_bytes() for name in before)
    for changed in (("--experts", "16", *TINY[2:]), (*TINY, "--seed", "7")):
        assert "holds another checkpoint" in usage_error("make-checkpoint", copy, *changed)
    assert all((copy / name).read_bytes() == (tiny / name).read_bytes() for name in before)
    assert invoke("make-checkpoint", copy, *TINY, "--seed", "7", "--force").exit_code == 0
    assert any((copy / name).read_bytes() != (tiny / name).read_bytes() for name in before)


@pytest.mark.parametrize(
    "words,complaint",
    [("--experts 0", "num_experts=0"), ("--quant fp4", "quant='fp4'"), ("--experts many", "--experts")],
)
def test_a_checkpoint_that_cannot_be_is_refused(tmp_path: Path, words: str, complaint: str) -> None:
    assert complaint in usage_error("make-checkpoint", tmp_path / "new", *words.split())
    assert not (tmp_path / "new").exists()


def test_a_sound_checkpoint_is_described(invoke: Invoke, tiny: Path) -> None:
    result = invoke("inspect-checkpoint", tiny)
    assert result.exit_code == 0 and "verdict     sound" in result.stdout
    assert "32 experts, hidden 256, intermediate 128, shared 128, F8_E4M3 with F32 scales" in result.stdout
    facts = json.loads(invoke("inspect-checkpoint", tiny, "--json").stdout)
    assert facts["sound"] is True and facts["layers"][0]["num_experts"] == 32


def test_a_damaged_checkpoint_ends_with_1(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    result = invoke("inspect-checkpoint", broken)
    assert result.exit_code == 1 and "problem" in result.stdout and "not usable" in result.stdout
    assert json.loads(invoke("inspect-checkpoint", broken, "--json").stdout)["sound"] is False


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [("2.11.0", False), ("2.15.1+cpu", False), ("2.16.0+cu130", True), ("3.0.0.dev20270101", True)],
)
def test_a_torch_newer_than_those_tested_is_named(
    version: str, is_newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert versions()["torch"] == version + ", newer than 2.15, the newest that is tested" * is_newer


def test_the_doctor_knows_every_backend(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.loads(invoke("doctor", "--json").stdout)
    names = {backend["name"] for backend in facts["backends"]}
    assert names >= {*PREPARE_FINALIZE, *EXPERTS, *MONOLITHIC}
    assert facts["versions"]["torch"] == torch.__version__ and "cpu" in facts["devices"]
    lines = invoke("doctor").stdout.splitlines()
    for name, library in facts["libraries"].items():
        line = next(line for line in lines if line.startswith(name))
        assert re.match(rf"{re.escape(name)}  +\S", line), line
        assert (library["version"] or library["install"]) in line
    ours = [module for name, module in sys.modules.items() if name.startswith("moe_mk.")]
    held = {id(value): value for module in ours for value in vars(module).values() if isinstance(value, Registry)}
    with_plugins = [each for each in held.values() if each.group]
    for each in with_plugins:
        monkeypatch.setattr(each, "broken", {f"a broken {each.kind}": "no such module"})
    facts = json.loads(invoke("doctor", "--set", "ep=8", "--json").stdout)
    broken = {backend["name"] for backend in facts["backends"] if backend["broken"]}
    assert len(with_plugins) > 5 and broken == {f"a broken {each.kind}" for each in with_plugins}
    (alone,) = (backend for backend in facts["backends"] if backend["name"] == "no_ep")
    assert "serves 1 rank, the group has 8" in alone["reasons"][0]


def test_an_explanation_holds_a_verdict_for_every_pair(invoke: Invoke) -> None:
    words = "explain configs/models/deepseek_v3.yaml --device h200 --ranks 32 --nodes 4 --tokens 128 --json"
    found = json.loads(invoke(*words.split()).stdout)
    pairs = {(verdict["prepare_finalize"], verdict["experts"]) for verdict in found["verdicts"]}
    assert pairs == {(t, e) for t in PREPARE_FINALIZE for e in EXPERTS} | {("inside", e) for e in MONOLITHIC}
    assert len(found["verdicts"]) == len(pairs)
    assert [verdict["chosen"] for verdict in found["verdicts"]].count(True) == 1
    for verdict in found["verdicts"]:
        assert {"prepare_finalize", "experts", "chosen", "cost_us", "reasons"} <= verdict.keys()
        assert (verdict["cost_us"] is None) == bool(verdict["reasons"])
    no_ep = next(v for v in found["verdicts"] if (v["prepare_finalize"], v["experts"]) == ("no_ep", "torch_cpu"))
    assert len(no_ep["reasons"]) == 2 and found["problem"]["nodes"] == 4


def test_an_explanation_for_a_person_has_the_same_reasons(invoke: Invoke) -> None:
    result = invoke("explain", "deepseek_v3", "--device", "h200", "--ranks", 32)
    assert result.exit_code == 0 and "5.51 % of parameters active" in result.stdout
    shown = " ".join(result.stdout.split())
    assert "refused no_ep + any: serves 1 rank, the group has 32" in shown
    assert re.search(r"refused for other devices: .*cpu_native.* \(runs on cpu, this device is cuda\)", shown)


@pytest.mark.row(50)
def test_an_explanation_shows_what_a_transport_keeps_for_itself(invoke: Invoke) -> None:
    words = "explain deepseek_v3 --device h200 --ranks 8 --installed deep_ep --prepare-finalize deepep_ht".split()
    assert "budget      deepep_ht keeps 20 SMs: the library's default [kernel.comm_units]" in invoke(*words).stdout
    assert "budget      deepep_ht keeps 12 SMs: kernel.comm_units\n" in invoke(*words, "--comm-units", 12).stdout
    found = json.loads(invoke(*words, "--comm-units", 12, "--json").stdout)
    assert found["budget"] == {"unit": "SMs", "count": 12, "source": "kernel.comm_units"}
    assert found["problem"]["config"]["kernel"]["comm_units"] == 12
    refused = invoke(*words, "--comm-units", 13)
    assert refused.exit_code == 3 and "takes an even number of SMs" in refused.stderr
    alone = invoke("explain", "deepseek_v3", "--device", "h200", "--comm-units", 12).stdout
    assert "kernel.comm_units = 12 changes nothing: a single rank has no transport" in alone


@pytest.mark.parametrize("words,code,complaint", [
    ("deepseek_v4", 2, "did you mean 'deepseek_v3'"), ("deepseek_v3 --device h300", 2, "shipped device"),
    ("deepseek_v3 --ranks 32 --nodes 5", 2, "32 ranks do not divide over --nodes 5"),
    ("deepseek_v3 --installed tritn", 2, "did you mean 'triton'"),
    ("deepseek_v3 --dtype int8", 2, "--dtype 'int8' is unknown"), ("deepseek_v3 --ranks 0", 2, "--ranks"),
    ("deepseek_v3 --ranks 32 --prepare-finalize no_ep", 3, "serves 1 rank, the group has 32"),
    ("deepseek_v3 --set kernel.timout_s=5", 2, "did you mean 'kernel.timeout_s'"),
    ("deepseek_v3 --set router.timeout_s=5", 2, "unknown setting 'router.timeout_s'"),
    ("deepseek_v3 --set experts", 2, "is not KEY=VALUE"),
    ("deepseek_v3 --set kernel.timeout_s=[", 2, "has a value that is not YAML"),
    ("deepseek_v3 --set kernel.timeout_s=none", 2, "kernel.timeout_s"),
    ("deepseek_v3 --device h200 --experts torch_cpu", 3, "runs on cpu, this device is cuda"),
    ("deepseek_v3 --device h200 --experts-backend torch_cpu", 3, "runs on cpu, this device is cuda"),
])  # fmt: skip
def test_what_cannot_be_explained_has_a_code(invoke: Invoke, words: str, code: int, complaint: str) -> None:
    result = invoke("explain", *words.split())
    assert result.exit_code == code and complaint in result.stderr and result.stdout == ""


def test_a_run_of_one_rank_reports_plan_times_and_verdict(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    report, picture = tmp_path / "run.json", tmp_path / "load.png"
    result = invoke("run", tiny, "--tokens", 9, "--seed", 5, "--repeats", 1, "--out", report, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    order = ["checkpoint ", "subset ", "plan ", "rank 0 ", "decision ", "load ", "milliseconds", "verify ", "PASS"]
    places = [result.stdout.index(word) for word in order]
    assert places == sorted(places)
    found = json.loads(report.read_text())
    assert found["verification"]["passed"] is True and found["verification"]["num_tokens"] == 10
    assert (found["seed"], found["tokens"], found["injected"]) == (5, [9], None)
    assert {"torch", "python", "moe_mk"} <= found["versions"].keys() and found["device"] and found["command"]
    assert sum(found["expert_load"]) == 9 * 8
    parts = (f"{part} {amount(found['memory'][0][part])}" for part in ("experts", "shared", "gate"))
    assert ", ".join(parts) in " ".join(result.stdout.split())
    assert found["prefill"]["tokens"] == [9] and found["decode"]["tokens"] == [1]
    assert found["decision"]["verdicts"] and found["memory"][0]["num_slots"] == 32
    assert found["ranks"][0]["experts"] == list(range(32)) and found["checkpoint"]["sound"] is True
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_prints_its_results_as_json_and_nothing_else(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    result = invoke("run", tiny, "--tokens", 2, "--repeats", 1, "--json", "--out", tmp_path / "run.json")
    assert result.exit_code == 0 and json.loads(result.stdout) == json.loads((tmp_path / "run.json").read_text())


@pytest.mark.parametrize("fault", quick_where("swap-halves".__eq__, ["swap-halves", "drop-scale", "double-scale"]))
def test_an_injected_fault_ends_with_1(invoke: Invoke, tiny: Path, tmp_path: Path, fault: str) -> None:
    report = tmp_path / "run.json"
    result = invoke("run", tiny, "--tokens", 4, "--repeats", 1, "--inject", fault, "--out", report)
    assert result.exit_code == 1 and "FAIL" in result.stdout
    found = json.loads(report.read_text())
    assert found["injected"] == fault and found["verification"]["passed"] is False


def test_no_tokens_at_all_run_and_say_that_nothing_was_compared(tiny: Path, tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    result = printed("run", tiny, "--tokens", 0, "--repeats", 1, "--plot", picture)
    assert "no tokens, nothing was compared" in result and "PASS" not in result
    assert "no assignments" in result and picture.exists()


@pytest.mark.parametrize(
    "words",
    quick_where(
        "--activations checkpoint".__eq__,
        ["--dtype float32", "--dtype float16", "--router-dtype model", "--activations checkpoint",
         "--experts-backend reference_monolithic", "--placement round_robin"],
    ),
)  # fmt: skip
def test_settings_reach_the_layer_and_verify(invoke: Invoke, tiny: Path, words: str) -> None:
    result = invoke("run", tiny, "--tokens", 5, "--repeats", 1, "--prefix", "model.layers.{N}.mlp.", *words.split())
    assert result.exit_code == 0 and "PASS" in result.stdout, result.output
    printed = " ".join(result.stdout.split())
    assert "not verified, since the reference shares it: scores sigmoid (scoring_func), groups 8 (n_group)" in printed


def test_verification_can_be_left_out(invoke: Invoke, tiny: Path) -> None:
    result = invoke("run", tiny, "--tokens", 2, "--repeats", 1, "--no-verify", "--inject", "double-scale")
    assert result.exit_code == 0 and "verify" not in result.stdout
