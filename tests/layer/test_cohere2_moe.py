"""Cohere2 MoE, whose routed and shared experts may be averaged, against transformers' own block in f64."""

import pytest
import torch

from moe_mk import MoELayer
from moe_mk.integrations.transformers import config_from_hf

modeling = pytest.importorskip("transformers.models.cohere2_moe.modeling_cohere2_moe", reason="needs transformers")
CHANGES = {
    "mean": {}, "sum": {"shared_expert_combination_strategy": "sum"}, "no shared experts": {"num_shared_experts": 0},
    "sigmoid": {"expert_selection_fn": "sigmoid"}, "softmax": {"norm_topk_prob": False},
    "as scored": {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
}  # fmt: skip


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_equals_the_block_of_transformers(name: str, dtype: torch.dtype, limit: float) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "dtype": dtype}
    stated = modeling.Cohere2MoeConfig(**{**sizes, "num_shared_experts": 2, **CHANGES[name]})
    block = modeling.Cohere2MoeSparseMoeBlock(stated).to(dtype)
    draw = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=draw)
    layer = MoELayer(config_from_hf(stated), dtype=dtype).load_weights(block.state_dict())
    x_TH = torch.randn((9, 64), generator=draw).to(dtype)
    with torch.no_grad():
        expected = block.double()(x_TH[None].double())[0]
    assert float((layer(x_TH) - expected).norm() / expected.norm()) < limit
