"""Plain top-k routing, as Mixtral and Qwen3-MoE use it, and the checks every router makes at its door."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.kernels.reference import topk as kernel
from moe_mk.registry import did_you_mean
from moe_mk.shapes import expect

SCORING_FUNCS = ("sigmoid", "softmax", "sqrtsoftplus")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def topk(
    router_logits: Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
    *,
    score_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts for every token; return topk_weights f32 [T, K] and topk_ids int32 [T, K].

    Meaning of every argument, ties and NaN: as in `grouped_topk`, with all experts in one group.
    """
    check_tensors(router_logits, e_score_correction_bias)
    problems = scoring_problems(scoring_func, routed_scaling_factor, score_dtype)
    num_experts = router_logits.shape[1]
    if not 1 <= top_k <= num_experts:
        problems.append(
            f"top_k={top_k} experts cannot be chosen among E={num_experts}; use top_k in [1, {num_experts}]"
        )
    raise_all("topk", problems)
    return kernel.topk(
        router_logits, top_k, scoring_func, renormalize, routed_scaling_factor, e_score_correction_bias, score_dtype
    )


def check_tensors(router_logits: Tensor, e_score_correction_bias: Tensor | None) -> None:
    """Check logits [T, E] and a bias [E] of the same E on the same device; raise ShapeError."""
    expect("router_logits", router_logits, "T E", FLOATS)
    if e_score_correction_bias is not None:
        num_experts = router_logits.shape[1]
        expect("e_score_correction_bias", e_score_correction_bias, "E", FLOATS, router_logits.device, E=num_experts)


def scoring_problems(scoring_func: str, routed_scaling_factor: float, score_dtype: torch.dtype) -> list[str]:
    """List what is wrong with the scoring settings."""
    problems: list[str] = []
    if scoring_func not in SCORING_FUNCS:
        problems.append(f"scoring_func={scoring_func!r} is unknown{did_you_mean(scoring_func, SCORING_FUNCS)}")
    if not abs(routed_scaling_factor) < math.inf:
        problems.append(f"routed_scaling_factor={routed_scaling_factor} is not finite; use 1.0 for no scaling")
    if score_dtype not in FLOATS:
        problems.append(f"score_dtype={score_dtype} is not one of {', '.join(map(str, FLOATS))}")
    return problems


def raise_all(what: str, problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists all problems, if there are any."""
    if problems:
        raise ConfigError(f"{what}: " + "; ".join(problems))
