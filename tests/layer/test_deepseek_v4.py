"""A layer of DeepSeek-V4: scores by sqrtsoftplus, clamped SwiGLU, experts by token id, against transformers' block."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import MoELayer
from moe_mk.config import MoEConfig
from moe_mk.config.hf import settings_from_hf
from moe_mk.config.problem import Problem
from moe_mk.config.shipped import device_profile, load_config
from moe_mk.errors import ShapeError
from moe_mk.external.library import COMPILER
from moe_mk.lab.verify import Answer, verify
from moe_mk.oracle import select
from moe_mk.quant.plain import BF16

modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="needs transformers")


def block(number: int) -> Any:
    """A block of transformers with weights large enough that clamps bite: block 0 routes by token id, 1 by scores."""
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=32, moe_intermediate_size=16, n_routed_experts=12, num_hidden_layers=2, vocab_size=50,
        mlp_layer_types=["hash_moe", "moe"], swiglu_limit=1.5, num_experts_per_tok=3, num_attention_heads=2,
        head_dim=16,
    )  # fmt: skip
    made, draw = modeling.DeepseekV4SparseMoeBlock(config, number), torch.Generator().manual_seed(number)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 1.5 * parameter.shape[-1] ** -0.5
    if number:
        made.gate.e_score_correction_bias = torch.randn(12, generator=draw) / 4
    else:
        made.gate.tid2eid = torch.rand(50, 12, generator=draw).argsort(1)[:, :3]
    return made.eval()


def ours(theirs: Any, more: Mapping[str, Tensor] | None = None, **settings: Any) -> MoELayer:
    """The same block as a layer, by its own config and official names."""
    config = theirs.shared_experts.config
    stated = {**config.to_dict(), "torch_dtype": "float32", "quantization_config": None}
    stated["vision_n_layers"] = settings.pop("vision_n_layers", 0)
    config = MoEConfig.parse(settings_from_hf(stated, "a test"), "a test").with_(**settings)
    layer, tensors = MoELayer(config, dtype=torch.float32), {"gate.weight": theirs.gate.weight.data, **(more or {})}
    if layer.config.router.has_correction_bias:
        tensors["gate.e_score_correction_bias"] = theirs.gate.e_score_correction_bias
    for name in ("gate", "up", "down"):
        tensors[f"shared_experts.{name}_proj.weight"] = getattr(theirs.shared_experts, f"{name}_proj").weight.data
    for e, (both, down) in enumerate(zip(theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data, strict=True)):
        gate, up = both.chunk(2)
        for name, value in (("gate", gate), ("up", up), ("down", down)):
            tensors[f"experts.{e}.{name}_proj.weight"] = value.contiguous()
    return layer.load_weights(tensors)


def tokens() -> Tensor:
    return torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("experts", ["reference", "torch_cpu"])
def test_scored_layers_equal_transformers(experts: str) -> None:
    theirs = block(1)
    with torch.no_grad():
        wanted = theirs(tokens())
        layer = ours(theirs, experts=experts)
        assert layer.config.router.scoring_func == "sqrtsoftplus" and layer.config.model.swiglu_limit == 1.5
        torch.testing.assert_close(layer(tokens().flatten(0, 1)), wanted.flatten(0, 1), rtol=1e-5, atol=1e-5)
        theirs.shared_experts.limit = theirs.experts.limit = 1e9
        assert not torch.allclose(theirs(tokens()), wanted, atol=1e-2), "the clamps do nothing: a weak fixture"


@pytest.mark.parametrize("number", [0, 1])
def test_layers_that_choose_by_token_id_and_for_images_with_another_bias_equal_transformers(number: int) -> None:
    theirs, of_images, ids_T = block(number), block(1), (torch.arange(40) * 7 + 1) % 60
    of_images.experts, of_images.shared_experts = theirs.experts, theirs.shared_experts
    of_images.gate.weight, of_images.gate.e_score_correction_bias = theirs.gate.weight, torch.arange(12) / 5
    more = {"gate.e_score_correction_bias_vl": torch.arange(12) / 5}
    more |= {} if number else {"gate.tid2eid": theirs.gate.tid2eid}
    kind = {"has_correction_bias": number == 1, "hash_vocabulary": None if number else 50, "vision_n_layers": 3}
    with torch.no_grad():
        text, images = theirs(tokens(), ids_T.view(2, 20) % 50).flatten(0, 1), of_images(tokens()).flatten(0, 1)
        assert ((text - images).norm(dim=1) > 0.1).any()
        layer = ours(theirs, more, experts="reference", **kind)
        wanted = torch.where((ids_T >= 50)[:, None], images, text)
        torch.testing.assert_close(layer(tokens().flatten(0, 1), ids_T), wanted, rtol=1e-5, atol=1e-5)
        answer = Answer(tokens().flatten(0, 1), wanted, layer.route(tokens().flatten(0, 1), ids_T).ids_TK, ids_T)
        assert verify(answer, layer.decision, layer.weights).passed
        with pytest.raises(ShapeError, match="chooses experts by token id"):
            layer(tokens().flatten(0, 1))


def test_no_native_gate_is_promised_for_scores_that_it_does_not_compute() -> None:
    config = load_config("deepseek_v4_flash")
    decision = select(Problem(config, device_profile("cpu"), BF16, 4, frozenset({COMPILER})))
    assert decision.gate.tier == "plain"
    reported = next(text for text in decision.gate.reasons["native"] if "scores" in text)
    assert "sigmoid or softmax scores" in reported
