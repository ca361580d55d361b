"""`moe-mk demo hf`: transformers generates with an FP8 model on a CPU, in one command. And `moe-mk convert`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.conftest import Invoke

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

from moe_mk.integrations.transformers import register
from moe_mk.lab.cli import app

runner = CliRunner()


@pytest.fixture(autouse=True)
def registered_as_before() -> None:
    register()


def test_the_experts_stay_fp8_and_say_the_same_tokens(tmp_path: Path) -> None:
    done = runner.invoke(app, ["demo", "hf", "--tokens", "6", "--dtype", "float32", "--keep", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["experts_stored_as"] == ["torch.float8_e4m3fn"]
    assert facts["tokens_equal"] == facts["tokens_total"] == 12 and facts["passed"]
    assert {module["backend"] for module in facts["modules"]} == {"reference"}
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


def test_it_runs_what_the_oracle_selects_and_explains_why_the_others_do_not_serve() -> None:
    done = runner.invoke(app, ["demo", "hf", "--tokens", "2"])
    assert done.exit_code == 0, done.output
    assert "stored as torch.float8_e4m3fn" in done.stdout and "PASS  relative difference of logits" in done.stdout
    assert "backend     cpu_native (lowest cost of 2 eligible), tokens in bfloat16" in done.stdout
    assert "not torch_cpu: multiplies with plain activations only" in done.stdout


def test_what_cannot_be_shown_is_refused() -> None:
    done = runner.invoke(app, ["demo", "vllm"])
    assert done.exit_code == 2 and "unknown demonstration 'vllm'" in done.stderr
    done = runner.invoke(app, ["demo", "hf", "--experts-backend", "torch_cpu"])
    assert done.exit_code == 3 and "multiplies with PLAIN activations only" in done.stderr.replace("plain", "PLAIN")


def test_a_conversion_reports_sizes_and_errors(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    done = invoke("convert", tiny, tmp_path / "out", "--to", "nvfp4")
    assert done.exit_code == 0, done.stderr
    assert (
        "experts in nvfp4" in done.stdout
        and "relative change of 33 experts: mean" in done.stdout
        and "maximum" in done.stdout
    )
    looked = invoke("inspect-checkpoint", tmp_path / "out")
    assert looked.exit_code == 0 and "sound" in looked.stdout


def test_a_type_that_does_not_exist_is_refused(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    refused = invoke("convert", tiny, tmp_path / "out", "--to", "int5")
    assert refused.exit_code == 2 and "'int5'" in refused.stderr and not (tmp_path / "out").exists()
