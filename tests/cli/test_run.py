"""`moe-mk run` as a person starts it: several processes, torchrun, and a rank that is killed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

from moe_mk.lab.trace.routing import RoutingTrace
from moe_mk.text import amount

BIN = Path(sys.executable).parent
Invoke = Callable[..., Result]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
ROOT = Path(__file__).parents[2]


def command(*words: object) -> subprocess.CompletedProcess[str]:
    words_ = [str(word) for word in words]
    return subprocess.run(words_, capture_output=True, text=True, timeout=100, cwd=ROOT, env=ENVIRONMENT)


@pytest.mark.slow
def test_two_ranks_run_without_a_word_on_standard_error(tiny: Path, tmp_path: Path) -> None:
    report, traced = tmp_path / "run.json", tmp_path / "trace.safetensors"
    words = ("run", tiny, "--ranks", 2, "--tokens", "6", "--repeats", 1, "--out", report, "--record-trace", traced)
    done = command(BIN / "moe-mk", *words)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("decision ") == 1 and done.stdout.count("PASS") == 1
    assert re.search(r"^rank 0 +experts 0-15: ", done.stdout, re.M)
    assert re.search(r"^rank 1 +experts 16-31: ", done.stdout, re.M)
    assert done.stdout.index("rank 1 ") < done.stdout.index("load ")
    found = json.loads(report.read_text())
    assert found["verification"]["num_tokens"] == 14 and found["tokens"] == [6, 6]
    assert [rank["experts"] for rank in found["ranks"]] == [[*range(16)], [*range(16, 32)]]
    assert (found["prefill"]["tokens"], found["decode"]["tokens"]) == ([6, 6], [1, 1])
    assert 0 < found["read_seconds"] < found["load_seconds"]
    assert sum(found["expert_load"]) == 12 * 8
    assert found["command"][1:3] == ["run", str(tiny)] and found["sent_bytes"]["dispatch"] > 0
    # The trace has what both ranks routed, prefill and decode, and adds up to the load that was reported.
    trace = RoutingTrace.read(traced)
    reported = [(f.step, f.phase, f.rank, len(f.ids_TK)) for f in trace.forwards()]
    assert reported == [(0, "prefill", 0, 6), (0, "prefill", 1, 6), (1, "decode", 0, 1), (1, "decode", 1, 1)]
    assert trace.filter(phase="prefill").loads()[0].tolist() == found["expert_load"]
    assert trace.facts.num_ranks == 2 and trace.weights_RK is not None


@pytest.mark.slow
@pytest.mark.row(39)
def test_ranks_that_shall_lie_on_two_nodes_relay_between_them(
    tiny: Path, tmp_path: Path, invoke: Invoke, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("run", tiny, "--ranks", 4, "--ranks-per-node", 2, "--prepare-finalize", "hierarchical", "--repeats", 1)
    words += ("--experts-backend", "torch_cpu")
    done = invoke(*words, "--tokens", "5,0,7,1", "--out", tmp_path / "run.json")
    by_ranks, complaints = capfd.readouterr()
    printed = done.stdout + by_ranks
    assert (done.exit_code, done.stderr, complaints) == (0, "", ""), printed
    assert "ep=4 tp=1 on 2 nodes of 2 ranks, cpu" in printed and "PASS" in printed
    assert "5+0+7+1 tokens" in printed and "decode 1+0+1+1 tok" in printed
    assert "16 of 16 tokens routed as in the reference" in printed
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["nodes"] == 2 and found["verification"]["num_tokens"] == 5 + 7 + 1 + 3
    near, far = (found["sent_bytes_by_link"][link] for link in ("intra_node", "inter_node"))
    assert near > 0 and far > 0 and near + far == sum(found["sent_bytes"].values())
    assert f"{amount(near)} inside the node and {amount(far)} between nodes" in printed


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tiny: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((3, 256)))
    words = ("run", tiny, "--hidden-states", tmp_path / "rows.npy", "--repeats", 1)
    done = command(BIN / "torchrun", "--standalone", "--nproc-per-node", 2, "-m", "moe_mk", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("decision ") == 1 and done.stdout.count("PASS") == 1
    assert "ep=2" in done.stdout and "2+1 tokens" in done.stdout


@pytest.mark.slow
def test_torchrun_of_the_script_reports_an_error_once(tiny: Path) -> None:
    torchrun = (BIN / "torchrun", "--standalone", "--nproc-per-node", 2)
    done = command(*torchrun, BIN / "moe-mk", "run", tiny, "--tokens", "1,2,3")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count("moe-mk: --tokens lists 3 numbers for 2 batches") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "code"), [(None, 0), ("routed_scaling_factor=1.5", 1), ("renormalize=false", 1)])
def test_what_is_read_otherwise_than_the_models_own_class_computes_fails(
    setting: str | None, code: int, tiny: Path, invoke: Invoke
) -> None:
    words = ["run", str(tiny), "--tokens", "16", "--repeats", "1", "--against", "transformers"]
    done = invoke(*words, *([] if setting is None else ["--set", setting]))
    assert done.exit_code == code and "DeepseekV3MoE of transformers" in done.output
    named = [line.split()[0] for line in done.output.splitlines() if line.endswith(" in the block")]
    assert named == ([] if setting is None else [setting.partition("=")[0]])
    # The reference that reads the same configuration does not notice.
    assert invoke(*words[:-2], *([] if setting is None else ["--set", setting])).exit_code == 0


def test_only_transformers_can_be_compared_with(tiny: Path, invoke: Invoke) -> None:
    done = invoke("run", str(tiny), "--against", "transformer")
    assert done.exit_code == 2 and "did you mean 'transformers'" in done.output
