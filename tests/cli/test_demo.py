"""`moe-mk demo hf`: transformers generates with an FP8 model on a CPU, in one command. And `moe-mk convert`."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import moe_mk, printed, usage_error

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

from moe_mk.integrations.transformers import register
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.checkpoints.convert import REPORT


@pytest.fixture(autouse=True)
def registered_as_before() -> None:
    register()


def test_the_experts_stay_fp8_and_say_the_same_tokens(tmp_path: Path) -> None:
    done = printed("demo", "hf", "--tokens", 6, "--dtype", "float32", "--keep", tmp_path, "--json")
    facts = json.loads(done)
    assert facts["experts_stored_as"] == ["torch.float8_e4m3fn"]
    assert facts["tokens_equal"] == facts["tokens_total"] == 12 and facts["passed"]
    assert {module["backend"] for module in facts["modules"]} == {"reference"}
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


def test_it_runs_what_the_oracle_selects_and_explains_why_the_others_do_not_serve() -> None:
    done = printed("demo", "hf", "--tokens", 2)
    assert "stored as torch.float8_e4m3fn" in done and "PASS  relative difference of logits" in done
    assert "backend     cpu_native (lowest cost of 2 eligible), tokens in bfloat16" in done
    assert "not torch_cpu: multiplies with plain activations only" in done


def test_what_cannot_be_shown_is_refused() -> None:
    assert "unknown demonstration 'vllm'" in usage_error("demo", "vllm")
    done = moe_mk("demo", "hf", "--experts-backend", "torch_cpu")
    assert done.exit_code == 3 and "multiplies with PLAIN activations only" in done.stderr.replace("plain", "PLAIN")


def test_a_conversion_reports_sizes_and_errors(tiny: Path, tmp_path: Path) -> None:
    shape = CheckpointShape(4, 128, 128, layers=(1, 2), top_k=2, num_groups=2, top_k_groups=1, quant="bf16")
    write_checkpoint(tmp_path / "two", shape)
    done = printed("convert", tmp_path / "two", tmp_path / "out", "--to", "nvfp4")
    errors = json.loads((tmp_path / "out" / REPORT).read_text())["experts"]
    for layer in shape.layers:
        worst = [max(one["gate"], one["up"], one["down"]) for one in errors if one["layer"] == layer]
        mean = f"relative change of 5 experts: mean {sum(worst) / len(worst):.2e}, maximum {max(worst):.2e} ("
        assert re.search(rf"layer {layer} +{re.escape(mean)}", done) and "experts in nvfp4" in done
    assert "sound" in printed("inspect-checkpoint", tmp_path / "out")
    assert "'int5'" in usage_error("convert", tiny, tmp_path / "new", "--to", "int5")
