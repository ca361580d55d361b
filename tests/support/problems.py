"""Questions to the oracle: a model on a device, with some libraries installed."""

from collections.abc import Iterable
from typing import Any

from moe_mk import MoEConfig, Problem
from moe_mk.config import device_profile, load_config
from moe_mk.quant.plain import BF16, Plain


def problem(
    model: str = "deepseek_v3", device: str = "cpu", num_tokens: int = 64, *, dtype: Plain = BF16,
    installed: Iterable[str] = (), **settings: Any,
) -> Problem:  # fmt: skip
    config = load_config(model).with_(**settings)
    return Problem(config, device_profile(device), dtype, num_tokens, frozenset(installed))


def small(
    device: str = "h200", *, top_k: int = 4, installed: Iterable[str] = (), quant: Any = None,
    hidden: int = 256, experts: int = 64, **settings: Any,
) -> Problem:  # fmt: skip
    """16 tokens of a small model of any sizes, on 8 ranks by default."""
    model = {"hidden_size": hidden, "moe_intermediate_size": 128, "num_experts": experts, "quant": quant or {}}
    config = MoEConfig.parse({"model": model, "router": {"top_k": top_k}}, "a test")
    config = config.with_(**{"ep": 8, "max_num_tokens": 64, **settings})
    return Problem(config, device_profile(device), BF16, 16, frozenset(installed))
