"""The layer on native CPU kernels: one call routes, one call multiplies routed and shared experts, and it states so."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk import DeepseekV3MoE, MoEConfig
from moe_mk.experts.cpu_native import experts as cpu_native_experts
from moe_mk.experts.cpu_native.weights import PackedExpertWeights, native_kernels
from moe_mk.kernels.native.library import Isa
from moe_mk.lab.checkpoints import write_checkpoint
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Recorder
from tests.layer.native import NEEDS_COMPILER, SHAPE, built, written

pytestmark = NEEDS_COMPILER


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("native"))


@pytest.fixture
def x_TH() -> Tensor:
    return torch.randn(24, 256, generator=torch.Generator().manual_seed(3)).bfloat16()


def as_sets(routing: Routing) -> list[dict[int, float]]:
    return [
        dict(zip(ids, ws, strict=True))
        for ids, ws in zip(routing.ids_TK.tolist(), routing.weights_TK.tolist(), strict=True)
    ]


def test_the_router_runs_natively_and_chooses_what_torch_chooses(checkpoint: Path, x_TH: Tensor) -> None:
    fused, plain = built(checkpoint), built(checkpoint, fused_router=False)
    assert fused.decision.gate.tier == "native" and "gate native" in repr(fused)
    assert plain.decision.gate.tier == "plain" and "gate plain" in repr(plain)
    assert plain.decision.gate.reasons["native"][0].endswith("unless kernel.fused_router = false")
    for mine, theirs in zip(as_sets(fused.route(x_TH)), as_sets(plain.route(x_TH)), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_the_decision_records_how_kernel_parameters_were_chosen(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "kernel parameters: built in" in str(built(checkpoint).explain())
    monkeypatch.setattr(cpu_native_experts.tunings, "MEASURED_BYTES", 0)
    decision = built(checkpoint).explain()
    assert decision.as_dict()["parameters"] == decision.parameters and decision.parameters in decision.text(None)
    if native_kernels().best in (Isa.AVX512_BF16, Isa.AMX_BF16):
        assert decision.parameters.startswith("measured at load: from ")
    assert built(checkpoint, experts="torch_cpu").explain().parameters == ""


def test_other_experts_and_other_precisions_keep_the_torch_router(checkpoint: Path) -> None:
    assert built(checkpoint, experts="torch_cpu").decision.gate.tier == "plain"
    assert built(checkpoint, router_dtype="model").decision.gate.tier == "plain"


def test_a_gate_stored_in_f32_is_not_rounded(checkpoint: Path) -> None:
    layer = built(checkpoint)
    gate_EH = torch.full((16, 256), 1 + 2**-12)
    layer.state.backends.gate.load(gate_EH, None)
    held = layer.state.backends.gate.weight_EH
    assert held is not None and torch.equal(held, gate_EH)


@pytest.mark.row(6, 65)
def test_shared_experts_ride_in_the_same_pass_on_one_rank(checkpoint: Path, x_TH: Tensor) -> None:
    layer = built(checkpoint)
    assert "shared experts fused" in repr(layer)
    routing = layer.route(x_TH)
    routed = layer.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)
    assert layer.state.backends.shared is not None
    apart = routed.float() + layer.state.backends.shared(x_TH).float()
    # Apart, both halves are rounded to bf16 before they are added; together once.
    assert (layer(x_TH).float() - apart).abs().max() <= 3 * 2**-8 * apart.abs().max()
    assert not torch.equal(layer(x_TH), routed)


def test_shared_experts_run_apart_where_tokens_travel(checkpoint: Path) -> None:
    config = MoEConfig.from_hf(checkpoint, experts="cpu_native", activations="plain", max_num_tokens=64)
    for groups in virtual_groups(2, 1):
        assert "same pass" not in repr(DeepseekV3MoE(config, groups=groups).load_from_safetensors(checkpoint, 3))


def test_a_compiled_layer_and_an_eager_one_agree(checkpoint: Path, x_TH: Tensor) -> None:
    # Compiled, the layer is one operator; in eager mode it is called past the operator.
    layer = built(checkpoint)
    eager = layer(x_TH)
    loads = layer.expert_load.clone()
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x_TH), eager)
    assert torch.equal(layer.expert_load, 2 * loads) and not eager.requires_grad


def test_packing_reports_how_far_it_is(checkpoint: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    config = MoEConfig.from_hf(checkpoint, experts="cpu_native", activations="plain", max_num_tokens=64)
    layer = DeepseekV3MoE(config).load_from_safetensors(
        checkpoint, 3, on_progress=lambda *event: reported.append(event)
    )
    packed = [event for event in reported if event[0] == "pack"]
    assert [done for _, done, _ in packed] == sorted(done for _, done, _ in packed) and len(packed) == 16
    assert packed[-1][1] == packed[-1][2] == layer.state.laid_out.num_bytes


def test_a_deep_copy_reads_its_own_weights(checkpoint: Path, x_TH: Tensor) -> None:
    layer = built(checkpoint)
    layer.spans.recorder = Recorder()  # stages run apart, and their prepared calls are kept with the weights
    before = layer(x_TH)
    twin = copy.deepcopy(layer)
    weights = layer.state.laid_out
    assert isinstance(weights, PackedExpertWeights)
    weights.w2.values_LB.zero_()
    assert not torch.equal(layer(x_TH), before)
    assert torch.equal(twin(x_TH), before)


def test_int8_tokens_of_packed_experts_next_to_shared_ones_in_bf16(tmp_path: Path) -> None:
    # As in Kimi-K2-Thinking only routed experts are packed; tokens of the shared ones are not rounded. h of the
    # reference may take the neighbouring code.
    write_checkpoint(tmp_path / "int4", replace(SHAPE, quant="int4_g32"), threads=1)
    quant = {"weights": "int4_g32", "shared": "bf16", "activations": "int8"}
    x_TH = torch.randn(9, SHAPE.hidden_size, generator=torch.Generator("cpu").manual_seed(0)).bfloat16()
    outputs = {}
    for experts in ("cpu_native", "reference"):
        layer = built(tmp_path / "int4", quant=quant, experts=experts, activations="checkpoint")
        assert layer.decision.compute.name == "int8_1x32" and layer.decision.oracle == "int_wna16"
        outputs[experts] = layer(x_TH).float()
    wanted = outputs["reference"]
    assert ((outputs["cpu_native"] - wanted).norm() / wanted.norm()).item() < 9e-3
