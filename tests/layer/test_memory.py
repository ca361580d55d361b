"""What a layer states it will take, before anything is allocated, is what it takes."""

import copy
import gc
import resource
import weakref
from pathlib import Path

import pytest
import torch

from moe_mk import DeepseekV3MoE, ExpertMap, MoEConfig
from moe_mk.experts.cpu_native import experts as cpu_native
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.layer.hot_swap import swap_backends
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.expert_weights import SlotWeights
from tests.layer.native import NEEDS_COMPILER


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
        gate, bias = layer.state.backends.gate.weight_EH, layer.state.backends.gate.bias_E
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


EXPERTS, SIDE = 4, 256
BACKENDS = [pytest.param("cpu_native", marks=NEEDS_COMPILER), "torch_cpu", "reference"]


@pytest.mark.thorough
@pytest.mark.parametrize("experts", BACKENDS)
@torch.no_grad()
def test_nothing_outlives_a_layer_that_was_used_in_every_way(
    experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_native.tunings, "MEASURED_BYTES", 0)  # layers of any size are measured when they are loaded
    shape = CheckpointShape(EXPERTS, SIDE, SIDE, top_k=2, num_groups=1, top_k_groups=1)
    write_checkpoint(tmp_path, shape, threads=1)
    x_TH = torch.randn(8, SIDE).bfloat16()
    ids_TK = torch.tensor([[0, 1]]).expand(8, 2)

    def used() -> list[weakref.ref[object]]:
        layer = DeepseekV3MoE.from_checkpoint(tmp_path, 3, experts=experts, device="cpu")
        layer(x_TH)
        held: list[object] = [layer, layer.state, layer.state.laid_out, layer.weights.experts]
        layer.load_from_safetensors(tmp_path, 3)
        layer.forward_routed(x_TH, torch.rand(8, 2), ids_TK)
        held += [layer.state.laid_out, *layer.weights.experts.slots]
        layer.live.set_placement(ExpertMap(((3, 1, 0, 2),), num_experts=EXPERTS))
        layer(x_TH)
        assert swap_backends(layer, x_TH, limit=1.0, experts="torch_cpu").swapped
        held += [layer.state.laid_out, layer.kernel.experts]
        held.append(twin := copy.deepcopy(layer))
        twin(x_TH)
        w13, w2 = torch.randn(EXPERTS, 2 * SIDE, SIDE).bfloat16(), torch.randn(EXPERTS, SIDE, SIDE).bfloat16()
        engine = EngineExperts("engine", EngineWeights(w13, w2), top_k=2, settings={"experts": experts})
        engine(x_TH, torch.rand(8, 2), ids_TK)
        held += [engine, engine.weights, w13, w2]
        return [weakref.ref(each) for each in held]

    alive = used()
    gc.collect()
    assert [kept for each in alive if (kept := each()) is not None] == []


@pytest.mark.thorough
@NEEDS_COMPILER
@torch.no_grad()
def test_resident_memory_stays_flat_where_layers_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_native.tunings, "MEASURED_BYTES", 0)
    shape = CheckpointShape(8, 512, 512, top_k=2, num_groups=1, top_k_groups=1, quant="int8")
    write_checkpoint(tmp_path, shape, threads=1)
    x_TH = torch.randn(8, 512).bfloat16()

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    after = []
    for _ in range(8):
        layer = DeepseekV3MoE.from_checkpoint(tmp_path, 3, experts="cpu_native", device="cpu")
        layer(x_TH)
        layer.load_from_safetensors(tmp_path, 3)
        num_bytes = layer.weights.num_bytes
        del layer
        after.append(resident())
    assert num_bytes > 6 << 20
    # A layer that stays would make it four layers more; the allocator keeps up to about one.
    assert min(after[4:]) - min(after[:4]) < 2 * num_bytes
