"""Prompts, tiny models of several families, and a tiny random module of every experts class of transformers."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from moe_mk.lab.checkpoints.tiny_models import tiny_model

HIDDEN, INNER, EXPERTS, TOP_K = 32, 24, 5, 3
DECORATED = re.compile(r"^@use_experts_implementation.*\n(?:@.*\n)*class (\w+)", re.MULTILINE)


def experts_classes() -> list[type[nn.Module]]:
    """All classes that transformers dispatches by `experts_implementation`, in order of their files."""
    found: list[type[nn.Module]] = []
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        names = DECORATED.findall(file.read_text(encoding="utf-8"))
        if names:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            found += [getattr(module, name) for name in names]
    return found


def tiny_config(**changes: Any) -> SimpleNamespace:
    """The settings that experts classes read, by all the names they have for them."""
    names = {
        **dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN), "moe_latent_size": None,
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INNER), "num_experts_per_tok": TOP_K,
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
        "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh", "mlp_hidden_act": "relu2",
        "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "mlp_gate_softcap": 5.0, "mlp_up_softcap": 4.0,
        "post_norm_eps": 1e-6, "rms_norm_eps": 1e-6, "mlp_bias": False, "_experts_implementation": "moe_mk",
    }  # fmt: skip
    return SimpleNamespace(**(names | changes))


def tiny_experts(cls: type[nn.Module], **changes: Any) -> nn.Module:
    """A module with random f32 weights of spread 0.3; biases and norms as well."""
    torch.manual_seed(0)
    module = cls(tiny_config(**changes)).to(torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)
    return module.eval()


def tiny_call(num_tokens: int = 7, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids without repeats, and weights that do not add up to one."""
    draw = torch.Generator().manual_seed(seed)
    x_TH = torch.randn((num_tokens, HIDDEN), generator=draw)
    ids_TK = torch.rand((num_tokens, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K]
    return x_TH, ids_TK, torch.rand((num_tokens, TOP_K), generator=draw) + 0.1


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


@use_experts_implementation
class _Normed(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn = config.num_experts, nn.functional.silu
        self.gate_up_proj = nn.Parameter(torch.empty((EXPERTS, 2 * INNER, HIDDEN), dtype=torch.float32, device="cpu"))
        self.down_proj = nn.Parameter(torch.empty((EXPERTS, HIDDEN, INNER), dtype=torch.float32, device="cpu"))
        self.post_expert_norm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y_TH = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            rows, ranks = torch.where(top_k_index == expert)
            gate, up = (hidden_states[rows] @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
            out = self.post_expert_norm((self.act_fn(gate) * up) @ self.down_proj[expert].T)
            y_TH.index_add_(0, rows, out * top_k_weights[rows, ranks, None])
        return y_TH


class NormedExperts(_Normed):
    """Experts with a norm behind each, which no backend computes: MuseSparkExperts of transformers 5.23, in short."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.has_post_expert_norm = True  # an argument of the decorator in the versions that have such a class


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
