"""gpt-oss: packed blocks, interleaved gate and up, biases, clamps and a router bias, against transformers itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from moe_mk import MoEConfig, MoELayer, Problem
from moe_mk.config import device_profile
from moe_mk.config.hf import settings_from_hf
from moe_mk.experts.base import reasons_of_traits
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.kernels.reference.e2m1 import unpack
from moe_mk.lab.checkpoints.safetensors_writer import Planned, SafetensorsWriter
from moe_mk.lab.verify import Answer, verify
from moe_mk.quant import FP32, MXFP4
from moe_mk.weights import LayerSpec, LayerWeights, MappingSource, inspect_checkpoint, load_layer

EXPERTS, HIDDEN, INNER, TOP_K = 4, 64, 96, 2
PREFIX = "model.layers.0.mlp."


def theirs() -> GptOssConfig:
    return GptOssConfig(
        num_local_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INNER, num_experts_per_tok=TOP_K,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """A block as its files hold it."""
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32) * gain

    made = {"router.weight": normal(EXPERTS, HIDDEN, gain=0.2), "router.bias": normal(EXPERTS)}
    for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        # Odd rows, those of up, are twice as large: exchanging gate and up cannot go unnoticed.
        w = normal(EXPERTS, rows, columns, gain=1.5 * columns**-0.5)
        w[:, 1::2] *= 2.0
        q = MXFP4.quantize(w)
        assert q.scales is not None
        made[f"experts.{name}_blocks"] = q.values.reshape(EXPERTS, rows, columns // 32, 16)
        made[f"experts.{name}_scales"] = q.scales.view(torch.uint8)
        made[f"experts.{name}_bias"] = normal(EXPERTS, rows).bfloat16()
    return made


def config() -> MoEConfig:
    data = {**theirs().to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    return MoEConfig.parse(settings_from_hf(data, "a test"), "a test")


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """By the format's table, element by element: half the code's grid value, times two to the exponent."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = grid[unpack(blocks).long()]
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def reference(tensors: dict[str, Tensor]) -> GptOssMLP:
    """transformers' own block with the same numbers, decoded and transposed as it wants them."""
    mlp = GptOssMLP(theirs()).float()
    state = {"router.weight": tensors["router.weight"], "router.bias": tensors["router.bias"]}
    for name in ("gate_up_proj", "down_proj"):
        w = decoded(tensors[f"experts.{name}_blocks"], tensors[f"experts.{name}_scales"])
        state[f"experts.{name}"] = w.transpose(1, 2).contiguous()
        state[f"experts.{name}_bias"] = tensors[f"experts.{name}_bias"].float()
    mlp.load_state_dict(state)
    return mlp


def tokens() -> Tensor:
    return torch.randn((9, HIDDEN), generator=torch.Generator().manual_seed(1), dtype=torch.float32)


@pytest.mark.row(101)
@pytest.mark.parametrize("experts", ["reference", "torch_cpu"])
@pytest.mark.parametrize("stored", ["mxfp4", "fp32"])
@torch.no_grad()
def test_a_layer_equals_transformers(tensors: dict[str, Tensor], experts: str, stored: str, tmp_path: Path) -> None:
    block, x = reference(tensors), tokens()
    if stored == "mxfp4":
        layer = MoELayer(config().with_(experts=experts), dtype=torch.float32).load_weights(tensors)
    else:  # decoded, as transformers and trainers save it
        write(tmp_path, block.state_dict())
        (tmp_path / "config.json").write_text(json.dumps(theirs().to_dict() | {"dtype": "float32"}))
        layer = MoELayer.from_checkpoint(tmp_path, 0, dtype=torch.float32, experts=experts)
        facts = inspect_checkpoint(tmp_path)
        assert facts.sound and (facts.layers[0].kind, facts.layers[0].convention) == ("fp32", "gpt_oss_plain")
    torch.testing.assert_close(layer(x), block(x[None])[0].reshape(x.shape), rtol=2e-5, atol=2e-5)


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    planned = [Planned(PREFIX + name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with SafetensorsWriter(folder / "model.safetensors", planned, {}) as file:
        for name, tensor in tensors.items():
            file.write(PREFIX + name, tensor)


@torch.no_grad()
def test_the_independent_reference_agrees_and_sees_a_missing_bias(tensors: dict[str, Tensor]) -> None:
    layer = MoELayer(config(), dtype=torch.float32).load_weights(tensors)
    x = tokens()
    answer = Answer(x, layer(x), layer.route(x).ids_TK)
    assert verify(answer, layer.decision, layer.weights).passed
    without = load(tensors | {"experts.down_proj_bias": torch.zeros(EXPERTS, HIDDEN)})
    assert not verify(answer, layer.decision, without).passed


def load(tensors: dict[str, Tensor], **slices: int) -> LayerWeights:
    return load_layer(MappingSource(tensors), 0, spec(), owned=range(EXPERTS), prefix="", **slices)


def spec() -> LayerSpec:
    return MoELayer(config(), dtype=torch.float32).spec


def test_slices_add_the_last_bias_once(tensors: dict[str, Tensor]) -> None:
    # 96 columns of down are three blocks of 32, so that three ranks can share an expert.
    parts = [load(tensors, tp_rank=rank, tp_size=3).experts.slots[1].biases for rank in range(3)]
    assert all(part is not None for part in parts)
    down = torch.stack([part.down_H.float() for part in parts if part is not None]).sum(dim=0)
    assert torch.equal(down, tensors["experts.down_proj_bias"][1].float())
    up = torch.cat([part.up_I for part in parts if part is not None])
    assert torch.equal(up, tensors["experts.gate_up_proj_bias"][1, 1::2])


def test_its_headers_report_what_it_is(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write(tmp_path, tensors)
    facts = inspect_checkpoint(tmp_path)
    assert facts.sound, facts.layers[0].problems
    layer = facts.layers[0]
    assert (layer.kind, layer.convention) == ("mxfp4", "gpt_oss") and layer.has_expert_bias and layer.has_logit_bias
    assert layer.layer_spec() == spec()


def test_a_backend_without_biases_states_so() -> None:
    problem = Problem(config(), device_profile("cpu"), FP32, 9)
    without = replace(ReferenceExperts.traits, biases=False)
    assert [str(reason) for reason in reasons_of_traits(without, problem)] == ["adds no biases, the experts have them"]
    assert not reasons_of_traits(ReferenceExperts.traits, problem)
