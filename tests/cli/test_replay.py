"""`moe-mk trace replay` on a tiny model: replayed experts bring rollout and trainer together."""

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Invoke

pytest.importorskip("transformers")


@pytest.mark.row("177")
@pytest.mark.slow
def test_replayed_experts_bring_two_formats_of_a_model_together(tmp_path: Path, invoke: Invoke) -> None:
    from moe_mk.lab.checkpoints.tiny_models import write_fp8_checkpoint

    write_fp8_checkpoint(tmp_path)
    words = ("trace", "replay", str(tmp_path), "--sequences", "4", "--tokens", "24")
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(each["rollout"], each["trainer"]) for each in found] == [
        ("fp8", "fp32"),
        ("fp8", "bf16"),
        ("bf16", "fp32"),
    ]
    for each in found:
        assert 0 < each["other_experts"] < 0.5 and 0 < each["kl_replayed"] < 0.7 * each["kl"]
    state = torch.random.get_rng_state()
    shown = invoke(*words)
    assert "KL, replayed" in shown.stdout and f"{found[2]['kl']:.2e}" in shown.stdout, (
        "the same tokens by the same seed"
    )
    assert torch.equal(state, torch.random.get_rng_state())
