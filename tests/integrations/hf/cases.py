"""Prompts, tiny models of several families, and what tests ask of them."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from moe_mk.lab.checkpoints.tiny_models import tiny_model
from tests.integrations.hf.classes import experts_classes, tiny_experts


def prompt(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(1, 90, (batch, length), generator=torch.Generator().manual_seed(3))


def generate(model: Any, ids: Tensor, tokens: int = 8) -> list[list[int]]:
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return [list(map(int, row)) for row in made]


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(ids).logits
    return found


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).float().norm() / wanted.float().norm())


@torch.no_grad()
def difference(module: nn.Module, call: tuple[Tensor, Tensor, Tensor]) -> float:
    """The largest difference between this library and the class's own forward, relative to the largest output."""
    ours = module(*call)
    module.config._experts_implementation = "eager"
    theirs = module(*call)
    module.config._experts_implementation = "moe_mk"
    return float((ours - theirs).abs().max() / theirs.abs().max())


def experts_of(name: str) -> nn.Module:
    """A tiny module of an experts class of the installed transformers."""
    return tiny_experts(next(cls for cls in experts_classes() if cls.__name__ == name))


def deepseek() -> nn.Module:
    return experts_of("DeepseekV3Experts")


def family(name: str) -> Any:
    """A tiny random causal model of a family, in f32."""
    shape = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "initializer_range": 0.3, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 95,
    }  # fmt: skip
    if name == "deepseek_v3":
        return tiny_model()
    if name == "nemotron_h":
        shape |= {"hybrid_override_pattern": "*E", "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1}
        shape |= {"moe_shared_expert_intermediate_size": 48, "n_group": 1, "topk_group": 1}
    config = transformers.AutoConfig.for_model(name, **shape)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
