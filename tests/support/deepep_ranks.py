"""Questions about the DeepEP family, and its transports on two ranks of threads."""

from typing import Any

from moe_mk import MoEConfig, Problem
from moe_mk.config import device_profile, load_config
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme
from tests.support.library_ranks import ROUTINGS, Ranks, X

LIBRARIES = frozenset({"deep_ep", "nixl_ep", "uccl"})
XB = [x.bfloat16() for x in X]

__all__ = ["LIBRARIES", "ROUTINGS", "XB", "Ranks", "asked", "ranks_of", "small"]


def ranks_of(name: str, wire: QuantScheme = BF16, **more: Any) -> Ranks:
    """Two ranks with two experts each, rows of two bf16 numbers."""
    return Ranks(name, wire=wire, dtype=BF16, **more)


def asked(*, num_tokens: int = 128, dtype: Plain = BF16, device: str = "h200", **settings: Any) -> Problem:
    """DeepSeek-V3 on 8 ranks of H200 with every library there."""
    config = load_config("deepseek_v3").with_(**{"max_num_tokens": num_tokens, "ep": 8, **settings})
    return Problem(config, device_profile(device), dtype, num_tokens, LIBRARIES)


def small(*, hidden: int = 256, experts: int = 64, top_k: int = 4, quant: Any = None, **settings: Any) -> Problem:
    model = {"hidden_size": hidden, "moe_intermediate_size": 128, "num_experts": experts, "quant": quant or {}}
    config = MoEConfig.parse({"model": model, "router": {"top_k": top_k}}, "a test")
    config = config.with_(**{"ep": 8, "max_num_tokens": 64, **settings})
    return Problem(config, device_profile("h200"), BF16, 16, LIBRARIES)
