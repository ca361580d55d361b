"""What a layer on native CPU kernels states it will take, measured in a process of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_mk import DeepseekV3MoE, MoEConfig
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from tests.layer.native import NEEDS_COMPILER
from tests.support.alone import NEEDS_PEAKS, alone, peak_above

pytestmark = [NEEDS_COMPILER, NEEDS_PEAKS]


def measured(path: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    layer = DeepseekV3MoE(MoEConfig.from_hf(path, experts="cpu_native", activations="plain", max_num_tokens=32))

    def load_and_run() -> None:
        layer.load_from_safetensors(path, 3)
        layer(torch.ones(32, layer.config.model.hidden_size, dtype=torch.bfloat16))

    peak, after = peak_above(load_and_run)
    return layer.memory_report().as_dict() | {"measured_peak": peak, "measured": after}


@pytest.mark.thorough
def test_loading_and_serving_take_what_was_predicted_within_five_per_cent(tmp_path: Path) -> None:
    paths = []
    for name, (experts, hidden, inter) in {"small": (4, 128, 128), "large": (20, 1024, 1536)}.items():
        paths.append(tmp_path / name)
        shape = CheckpointShape(
            num_experts=experts, top_k=2, num_groups=2, top_k_groups=1, hidden_size=hidden, intermediate_size=inter,
            quant="fp8",
        )  # fmt: skip
        write_checkpoint(paths[-1], shape)
    seen = alone(measured, paths[1], first=paths[:1])
    # 20 experts and a shared one of 4.7 MB: held once, never the packed ones and the checkpoint's pages together.
    assert seen["total"] > 95e6
    assert seen["measured_peak"] == pytest.approx(seen["peak"], rel=0.05)
    assert seen["measured"] == pytest.approx(seen["total"], rel=0.05)
