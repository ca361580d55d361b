"""Every experts class of the installed transformers, and a tiny random module of each."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

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
