"""Group-limited top-k routing, as DeepSeek-V2/V3/R1, Kimi-K2 and GLM-4.5 use it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.kernels.reference import grouped_topk as kernel
from moe_mk.router.topk import check_tensors, fused_kernels, raise_all, scoring_problems


def grouped_topk(
    router_logits: Tensor,
    top_k: int,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "sigmoid",
    e_score_correction_bias: Tensor | None = None,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    *,
    score_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts inside the best topk_group groups; return topk_weights f32 [T, K] and topk_ids int32 [T, K].

    Scores are f32. Scores plus e_score_correction_bias choose, scores alone weigh. A group counts as the sum of its two
    best biased scores, or as its best score where there is no bias. `renormalize` divides a token's weights by their
    sum; routed_scaling_factor multiplies them afterwards, and must not be applied again.
    Ids come best first. Of equal scores, of experts or of groups, the lowest id wins, on every device and every run.
    A token with a NaN among its scores (a NaN logit; +inf under softmax) goes nowhere: ids -1, weights 0. So does a
    choice whose biased score is -inf, which makes a bias of -inf an expert that is never chosen.
    score_dtype: bf16 rounds sigmoid scores as DeepSeek's own inference code does; softmax is always taken in f32.
    Raises ShapeError for tensors, ConfigError for numbers that do not fit each other. Never synchronises.
    """
    check_tensors(router_logits, e_score_correction_bias)
    problems = scoring_problems(scoring_func, routed_scaling_factor, score_dtype)
    problems += group_problems(router_logits.shape[1], top_k, num_expert_group, topk_group)
    raise_all("grouped_topk", problems)
    given = (
        router_logits, top_k, num_expert_group, topk_group, scoring_func, e_score_correction_bias, renormalize,
        routed_scaling_factor, score_dtype,
    )  # fmt: skip
    fused = fused_kernels(router_logits, top_k, num_expert_group, scoring_func, e_score_correction_bias, score_dtype)
    return kernel.grouped_topk(*given) if fused is None else fused.grouped_topk(*given)


def group_problems(num_experts: int, top_k: int, num_expert_group: int, topk_group: int) -> list[str]:
    """List what does not fit between experts, groups and choices, with the way out."""
    problems: list[str] = []
    if not 1 <= topk_group <= num_expert_group:
        problems.append(
            f"topk_group={topk_group} of num_expert_group={num_expert_group} groups cannot be kept; "
            f"use topk_group in [1, {max(num_expert_group, 1)}]"
        )
    if num_expert_group < 1 or num_experts % num_expert_group:
        divisors = [d for d in range(1, num_experts + 1) if num_experts % d == 0]
        near = min(divisors, key=lambda d: abs(d - num_expert_group), default=1)
        problems.append(
            f"num_expert_group={num_expert_group} does not divide E={num_experts} experts; use num_expert_group={near}"
        )
        if not 1 <= top_k <= num_experts:
            problems.append(f"top_k={top_k} is not in [1, E={num_experts}]")
        return problems
    per_group = num_experts // num_expert_group
    selectable = max(min(topk_group, num_expert_group), 0) * per_group
    if not 1 <= top_k <= selectable:
        groups_needed = -(-max(top_k, 1) // max(per_group, 1))
        more_groups = f" or topk_group >= {groups_needed}" if topk_group < groups_needed <= num_expert_group else ""
        problems.append(
            f"top_k={top_k} experts cannot be chosen among topk_group={topk_group} groups of {per_group} experts "
            f"= {selectable} selectable; use top_k in [1, {selectable}]{more_groups}"
        )
    return problems
