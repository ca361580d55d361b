"""LongCat-Flash, whose router also scores experts without weights, against transformers' own block in f64."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import MoEConfig, MoELayer
from moe_mk.errors import ConfigError, ShapeError
from moe_mk.lab.cli.explain import active_fraction
from moe_mk.lab.testing.transports import run_together
from moe_mk.lab.verify import Answer, verify
from moe_mk.weights import inspect_checkpoint, load_layer
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.layer_weights import LayerWeights
from tests.support.layers import config, small_checkpoint, tensors

modeling = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash", reason="needs transformers")
HF: dict[str, Any] = {
    "model_type": "longcat_flash", "hidden_size": 256, "ffn_hidden_size": 512, "expert_ffn_hidden_size": 256,
    "num_layers": 1, "n_routed_experts": 8, "zero_expert_num": 8, "zero_expert_type": "identity", "moe_topk": 4,
    "routed_scaling_factor": 6.0, "router_bias": False, "dtype": "bfloat16",
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def theirs(weights: LayerWeights, x_TH: Tensor, *, drop: bool = False) -> Tensor:
    """What the model's block computes in f64. drop: with outputs of 0 of its experts without weights."""
    from transformers import LongcatFlashConfig

    block = modeling.LongcatFlashMoE(LongcatFlashConfig(**HF)).double()
    if drop:
        block.experts.identity_expert = torch.nn.Threshold(float("inf"), 0.0)
    assert weights.bias_E is not None
    gates, ups, downs = (
        torch.stack([getattr(slot, each).dequantize(torch.float32) for slot in weights.experts.slots])
        for each in ("gate_IH", "up_IH", "down_HI")
    )
    with torch.no_grad():
        block.router.classifier.weight.copy_(weights.gate_EH)
        block.router.e_score_correction_bias.copy_(weights.bias_E)
        block.experts.gate_up_proj[:8] = torch.cat([gates, ups], dim=1)
        block.experts.down_proj.copy_(downs)
        out: Tensor = block(x_TH.double()[None])[0]
    return out


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((12, 256), generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("changes", [{}, {"quantization_config": FP8}, {"zero_expert_type": "drop"}], ids=str)
def test_a_layer_equals_the_block_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path, HF | changes)
    facts = inspect_checkpoint(folder).layers[0]
    assert not facts.problems and (facts.num_experts, facts.num_zero_experts) == (8, 8)
    expected = None
    for experts in ("auto", "reference", "torch_cpu"):
        layer = MoELayer.from_checkpoint(folder, 0, dtype=torch.float32, activations="plain", experts=experts)
        if expected is None:
            expected = theirs(layer.weights, tokens(), drop="zero_expert_type" in changes)
        zero_TK = layer.route(tokens()).ids_TK >= 8
        assert 12 <= int(zero_TK.sum()) <= 36, "both kinds of experts are chosen"
        y_TH = layer(tokens())
        assert float((y_TH.double() - expected).norm() / expected.norm()) < 2e-6, experts
        report = layer.report()
        assert report.zero_assignments == zero_TK.sum() and int(layer.expert_load.sum()) == 48 - zero_TK.sum()
        assert not report.unrouted and "without weights" in str(report)


@pytest.mark.parametrize("quantization", [None, FP8], ids=["bf16", "fp8"])
def test_one_native_call_computes_what_the_stages_do(quantization: dict[str, Any] | None, tmp_path: Path) -> None:
    folder, seen = small_checkpoint(tmp_path, HF | {"quantization_config": quantization}), []
    layer, x_TH = MoELayer.from_checkpoint(folder, 0), tokens(torch.bfloat16)
    whole = load_layer(open_source(folder), 0, layer.spec, owned=range(8))
    layer.on_routing = seen.append
    y_TH, routing = layer(x_TH), layer.route(x_TH)
    placed = MoELayer.from_checkpoint(folder, 0, placement=tuple(range(7, -1, -1)))
    for each_TH in (y_TH, placed(x_TH), *run_together([placed], [x_TH])):
        assert verify(Answer(x_TH, each_TH, routing.ids_TK), layer.decision, whole).passed
    assert torch.equal(layer.forward_routed(x_TH, routing.weights_TK, routing.ids_TK), y_TH)
    assert torch.equal(run_together([layer], [x_TH])[0], y_TH)
    for each in seen:
        assert torch.equal(each.ids_TK, routing.ids_TK.masked_fill(routing.ids_TK >= 8, -1))
    twin = deepcopy(layer)
    assert len(seen) == 3 and twin.report().zero_assignments == 3 * int((routing.ids_TK >= 8).sum())
    assert not twin.unrouted and torch.equal(twin(x_TH), y_TH)
    layer.warm_up([3])
    layer.reset_expert_load()
    assert layer.report().zero_assignments == layer.unrouted == 0
    with pytest.raises(ShapeError, match=r"outside \[-1, 16\)"):
        layer.forward_routed(x_TH, routing.weights_TK, routing.ids_TK.clone().fill_(16))


def test_a_token_whose_experts_all_lack_weights_is_scaled_and_is_sent_nowhere() -> None:
    layer = MoELayer(config(4, 2, num_zero_experts=2), dtype=torch.float32)
    layer.load_weights(tensors(4) | {"gate.weight": torch.randn(6, 16)})
    x_TH, weights_TK = torch.randn(3, 16), torch.tensor([[0.5, 0.25]]).expand(3, 2).contiguous()
    ids_TK = torch.tensor([[4, 5], [5, 4], [-1, 4]])
    got_TH = layer.forward_routed(x_TH, weights_TK, ids_TK)
    assert torch.equal(got_TH, x_TH * torch.tensor([[0.75], [0.75], [0.25]]))
    assert not layer.expert_load.any() and layer.report().zero_assignments == 5


def test_what_no_model_has_beside_experts_without_weights_is_refused() -> None:
    settings = {"num_expert_group": 2, "weight_on_input": True, "has_expert_scale": True, "hash_vocabulary": 9,
                "latent_size": 8, "input_norm": 1e-6}  # fmt: skip
    for key, value in settings.items():
        with pytest.raises(ConfigError, match=f"num_zero_experts=2 is not supported with (router|model).{key}"):
            config(4, 1, num_zero_experts=2, **{key: value})


def test_the_configuration_is_read_or_refused() -> None:
    """LongCat-Flash-Lite's keys of the block; sizes as published."""
    from moe_mk.config.hf import settings_from_hf

    hf = {**HF, "model_type": "longcat_flash_ngram", "hidden_size": 3072, "ffn_hidden_size": 6144, "num_layers": 14,
          "expert_ffn_hidden_size": 1024, "n_routed_experts": 256, "zero_expert_num": 128, "moe_topk": 12}  # fmt: skip
    read = MoEConfig.parse(settings_from_hf(hf, "here"), "here")
    model, router = read.model, read.router
    assert (model.num_experts, model.num_zero_experts, model.scored_experts) == (256, 128, 384)
    assert (model.moe_intermediate_size, router.top_k, router.renormalize) == (1024, 12, False)
    assert (router.scoring_func, router.has_correction_bias, router.routed_scaling_factor) == ("softmax", True, 6.0)
    assert active_fraction(read) == 12 / 384
    refused = {"router_bias": True, "norm_topk_prob": True, "zero_expert_type": "copy", "moe_group_size": 4}
    for key, value in refused.items():
        with pytest.raises(ConfigError, match=f"{key} is {value!r}"):
            settings_from_hf(hf | {key: value}, "here")
    with pytest.raises(ConfigError, match="zero_expert_num is absent"):
        settings_from_hf({key: value for key, value in hf.items() if key != "zero_expert_num"}, "here")
    assert settings_from_hf(hf | {"zero_expert_num": None}, "here")["model"]["num_zero_experts"] == 0
