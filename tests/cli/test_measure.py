"""Stages of a forward: all of them, and they add up."""

from pathlib import Path

import pytest
import torch

from moe_mk.comm.single import SingleRank
from moe_mk.lab.cli.inputs import Batch
from moe_mk.lab.cli.measure import SHOWN, time_stages
from moe_mk.layer import DeepseekV3MoE


@pytest.mark.row(25)
def test_stages_add_up_to_the_forward(tiny: Path) -> None:
    # Native experts would compute the shared ones in the same pass, and leave nothing for the stage of that name.
    layer = DeepseekV3MoE.from_checkpoint(tiny, 3, experts="torch_cpu")
    x_TH = torch.randn(5, 256).bfloat16()
    times = time_stages(layer, Batch(x_TH), SingleRank(), repeats=1).for_tokens([5])
    assert tuple(times.stages) == SHOWN and times.tokens == (5,)
    assert sum(times.stages.values()) == pytest.approx(times.total, rel=1e-6)
    assert times.stages["experts"] > 0 and times.stages["route"] > 0 and times.stages["shared"] > 0
    assert layer.spans.recorder is None
    # One warm-up and one timed forward of 5 tokens that choose 8 experts each.
    assert int(layer.expert_load.sum()) == 2 * 5 * 8
