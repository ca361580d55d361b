"""The tiny twin: a DeepSeek-V3 layer of transformers, saved by transformers in the official layout."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_mk import DeepseekV3MoE, MoEConfig
from moe_mk.lab.testing.transports import virtual_groups

NUM_TOKENS = 24


@dataclass(frozen=True)
class Twin:
    """A checkpoint of layer 0, the module that wrote it, tokens, and what the module makes of them."""

    path: Path
    mlp: nn.Module
    x_TH: Tensor
    y_TH: Tensor

    def config(self, **overrides: object) -> MoEConfig:
        return MoEConfig.from_hf(self.path, **({"router_dtype": "float32"} | overrides))

    def layers(self, ep: int = 1, tp: int = 1, **overrides: object) -> list[DeepseekV3MoE]:
        made = [DeepseekV3MoE(self.config(**overrides), dtype=torch.float32, groups=g) for g in virtual_groups(ep, tp)]
        return [layer.load_from_safetensors(self.path, 0) for layer in made]

    @torch.no_grad()
    def run(self, x_TH: Tensor) -> Tensor:
        y = self.mlp(x_TH[None])
        return (y[0] if isinstance(y, tuple) else y)[0]


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """16 experts in 4 groups, top-4 of 2 groups, one shared expert, a negative correction bias; outputs of size 1."""
    transformers = pytest.importorskip("transformers", reason="needs transformers [pip install moe-mk[hf]]")
    path = tmp_path_factory.mktemp("twin")
    torch.manual_seed(1)
    config = transformers.DeepseekV3Config(
        vocab_size=32, hidden_size=64, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, n_shared_experts=1, n_routed_experts=16, n_group=4, topk_group=2,
        num_experts_per_tok=4, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, routed_scaling_factor=2.5, norm_topk_prob=True, initializer_range=0.1,
        dtype="float32",
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.gate.e_score_correction_bias.copy_(torch.randn(16) * 0.3 - 0.8)
    model.save_pretrained(path)
    made = Twin(path, mlp.requires_grad_(False), torch.randn(NUM_TOKENS, 64), torch.empty(0))
    return Twin(path, made.mlp, made.x_TH, made.run(made.x_TH))
