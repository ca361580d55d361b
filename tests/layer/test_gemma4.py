"""The experts of Gemma 4, with the norm and the scales around them, against transformers' own modules in f64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import MoEConfig, MoELayer
from moe_mk.lab.verify import Answer, verify
from moe_mk.weights import SlotWeights, inspect_checkpoint, load_layer
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.layer_weights import LayerWeights
from tests.support.layers import small_checkpoint

modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4", reason="needs transformers")
TEXT = {
    "model_type": "gemma4_text", "enable_moe_block": True, "hidden_size": 256, "moe_intermediate_size": 256,
    "num_experts": 6, "top_k_experts": 3, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-4,
    "num_hidden_layers": 1, "layer_types": ["full_attention"], "num_attention_heads": 2, "vocab_size": 64,
    "dtype": "bfloat16",
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}},
}  # fmt: skip
THOROUGH = pytest.mark.slow
FORMATS = {"bf16": None, "fp8": FP8, "nvfp4": NVFP4, "int4": INT4}


def written(folder: Path, quantization: dict[str, Any] | None = None) -> Path:
    stated = {} if quantization is None else {"quantization_config": quantization}
    return small_checkpoint(folder, {"model_type": "gemma4", "text_config": TEXT, **stated})


def theirs(weights: LayerWeights, x_TH: Tensor) -> Tensor:
    """What the decoder layer computes between its residual stream and the norm of the experts' output, in f64."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    config = Gemma4TextConfig(**{key: value for key, value in TEXT.items() if key != "model_type"})
    config._experts_implementation = "eager"
    router, experts = modeling.Gemma4TextRouter(config).double(), modeling.Gemma4TextExperts(config).double()
    norm = modeling.Gemma4RMSNorm(256, eps=config.rms_norm_eps).double()

    def both(slot: SlotWeights) -> Tensor:
        assert slot.gate_IH is not None
        return torch.cat([slot.gate_IH.dequantize(torch.float32), slot.up_IH.dequantize(torch.float32)])

    assert weights.input_norm is not None and weights.expert_scale_E is not None
    values = {
        norm.weight: weights.input_norm[0], router.scale: weights.input_norm[1], router.proj.weight: weights.gate_EH,
        router.per_expert_scale: weights.expert_scale_E,
        experts.gate_up_proj: torch.stack([both(slot) for slot in weights.experts.slots]),
        experts.down_proj: torch.stack([slot.down_HI.dequantize(torch.float32) for slot in weights.experts.slots]),
    }  # fmt: skip
    with torch.no_grad():
        for parameter, value in values.items():
            parameter.copy_(value)
        _, weights_TK, ids_TK = router(x_TH.double())
        out: Tensor = experts(norm(x_TH.double()), ids_TK, weights_TK)
    return out


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    """A residual stream: neither centred nor of size 1."""
    return (3 * torch.randn((12, 256), generator=torch.Generator().manual_seed(5)) + 0.5).to(dtype)


@pytest.mark.parametrize("format_name", ["bf16", "fp8", *(pytest.param(n, marks=THOROUGH) for n in ("nvfp4", "int4"))])
def test_a_layer_equals_the_modules_of_transformers(format_name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, FORMATS[format_name])
    facts = inspect_checkpoint(folder).layers[0]
    assert not facts.problems and facts.has_input_norm and facts.has_expert_scale
    expected = None
    for experts in ("auto", "reference", "torch_cpu"):
        layer = MoELayer.from_checkpoint(folder, 0, dtype=torch.float32, activations="plain", experts=experts)
        expected = theirs(layer.weights, tokens()) if expected is None else expected
        y_TH = layer(tokens())
        assert float((y_TH.double() - expected).norm() / expected.norm()) < 2e-6, experts


def test_every_stage_matters(tmp_path: Path) -> None:
    """Leaving out the norm's weight, the router's scale or the experts' factors changes the output by percents."""
    layer = MoELayer.from_checkpoint(written(tmp_path), 0, dtype=torch.float32, experts="reference")
    weights, expected = layer.weights, layer(tokens())
    assert weights.input_norm is not None and weights.expert_scale_E is not None
    for change in (
        {"input_norm": (torch.ones_like(weights.input_norm[0]), weights.input_norm[1])},
        {"input_norm": (weights.input_norm[0], torch.full_like(weights.input_norm[1], 16.0))},
        {"expert_scale_E": torch.ones_like(weights.expert_scale_E)},
    ):
        layer.take(LayerWeights(**{**vars(weights), **change}))
        assert float((layer(tokens()) - expected).norm() / expected.norm()) > 0.01, change


@pytest.mark.parametrize("format_name", ["bf16", "fp8", "nvfp4"])
def test_a_layer_stays_within_its_limit_on_native_experts(format_name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, FORMATS[format_name])
    layer = MoELayer.from_checkpoint(folder, 0)
    x_TH = tokens(torch.bfloat16)
    whole = load_layer(open_source(folder), 0, layer.spec, owned=range(6))
    y_TH, routing = layer(x_TH), layer.route(x_TH)
    assert verify(Answer(x_TH, y_TH, routing.ids_TK), layer.decision, whole).passed
    assert torch.equal(layer.forward_routed(x_TH, routing.weights_TK, routing.ids_TK), y_TH)
    assert int(layer.expert_load.sum()) == 2 * 12 * 3 and not layer.unrouted


def test_shared_experts_of_a_normalised_input_are_refused() -> None:
    model = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "input_norm": 1e-6}
    with pytest.raises(Exception, match=r"input_norm=1e-06 but num_shared_experts=1"):
        MoEConfig.parse({"model": {**model, "num_shared_experts": 1}, "router": {"top_k": 2}}, "a test")
