"""What a layer states it will take, before anything is allocated, is what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_mk import DeepseekV3MoE, MoEConfig
from moe_mk.quant.tensor import QuantTensor
from moe_mk.testing.transports import virtual_groups
from moe_mk.weights import CheckpointShape, write_checkpoint
from moe_mk.weights.expert_weights import SlotWeights


def held(slots: tuple[SlotWeights, ...]) -> int:
    """Bytes of every matrix and its scales, counted tensor by tensor."""
    matrices: list[QuantTensor] = [q for s in slots for q in (s.gate_IH, s.up_IH, s.down_HI) if q is not None]
    parts = [t for q in matrices for t in (q.values, q.scales) if t is not None]
    return sum(t.numel() * t.element_size() for t in parts)


SHAPES = {
    "fp8 in ragged blocks": {"quant": "fp8", "block": (16, 16), "hidden_size": 40, "intermediate_size": 24},
    "fp8 with UE8M0 scales": {"quant": "fp8", "block": (16, 16), "power_of_two_scales": True},
    "bf16": {"quant": "bf16"},
    "no shared experts": {"quant": "fp8", "block": (16, 16), "num_shared_experts": 0},
}


@pytest.mark.row("N22")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ep,tp", [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_weights_are_predicted_to_the_byte(tmp_path: Path, name: str, ep: int, tp: int) -> None:
    settings = {"hidden_size": 64, "intermediate_size": 32, **SHAPES[name]}
    if settings["intermediate_size"] == 24 and tp == 2:
        pytest.skip("blocks of 16 do not cut an intermediate size of 24")
    shape = CheckpointShape(num_experts=8, top_k=2, num_groups=2, top_k_groups=1, **settings)  # type: ignore[arg-type]
    write_checkpoint(tmp_path, shape)
    config = MoEConfig.from_hf(tmp_path, experts="torch_cpu", max_num_tokens=32)
    for groups in virtual_groups(ep, tp):
        layer = DeepseekV3MoE(config, groups=groups)
        report = layer.memory_report()
        layer.load_from_safetensors(tmp_path, 3)
        weights = layer.weights
        assert report.num_slots == len(weights.experts.slots)
        assert report.experts == held(tuple(weights.experts.slots))
        assert report.shared == (held((weights.shared,)) if weights.shared else 0)
        gate, bias = layer._gate.weight_EH, layer._gate.bias_E
        assert gate is not None and bias is not None
        assert report.gate == gate.numel() * gate.element_size() + bias.numel() * 4
        assert report.total == report.experts + report.shared + report.gate + report.buffers
        assert report.as_dict()["total"] == report.total and f"rank {layer.ep.rank}: " in str(report)


def test_buffers_grow_with_the_most_tokens_and_not_with_the_routing() -> None:
    reports = [
        DeepseekV3MoE(MoEConfig.load(Path("configs/models/tiny.yaml")).with_(max_num_tokens=most), dtype=torch.float32)
        for most in (16, 32)
    ]
    small, large = (layer.memory_report() for layer in reports)
    assert 2 * small.buffers == large.buffers and small.experts == large.experts
