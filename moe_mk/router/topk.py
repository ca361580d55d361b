"""Top-k routing: plain, as in Mixtral and Qwen3-MoE, and limited to groups of experts, as in DeepSeek-V2/V3/R1, Kimi-K2
and GLM-4.5; with the checks of tensors and settings that all routers share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.external.device import has_kernels
from moe_mk.kernels.reference import topk as reference
from moe_mk.registry import did_you_mean
from moe_mk.shapes import expect

SCORING_FUNCS = ("sigmoid", "softmax", "sqrtsoftplus", *reference.BY_LOGIT)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)


def topk(
    router_logits: Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
    *,
    score_dtype: torch.dtype = torch.float32,
    ids_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts for every token; return topk_weights f32 [T, K] and topk_ids [T, K], int32 or int64.

    Meaning of every argument, ties and NaN: as in `grouped_topk`, with all experts in one group.
    """
    given = (scoring_func, e_score_correction_bias, renormalize, routed_scaling_factor)
    return grouped_topk(router_logits, top_k, 1, 1, *given, score_dtype=score_dtype, ids_dtype=ids_dtype)


def fused_kernels(
    router_logits: Tensor,
    top_k: int,
    num_expert_group: int,
    scoring_func: str,
    e_score_correction_bias: Tensor | None,
    score_dtype: torch.dtype,
) -> ModuleType | None:
    """The Triton kernels that route in one launch, where they compute this case; None: the reference is used.

    They run on NVIDIA GPUs from sm_90 on and have no gradient; traced and subclassed tensors take the reference.
    """
    if not is_plain(router_logits) or not has_kernels(router_logits.device):
        return None
    from moe_mk.kernels.triton import topk as fused

    case = (router_logits, top_k, num_expert_group, scoring_func, e_score_correction_bias, score_dtype)
    return fused if fused.serves(*case) else None


def is_plain(x: Tensor) -> bool:
    """Whether a kernel may read this tensor's memory: no subclass, and nothing is being traced."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


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


def ids_problems(ids_dtype: torch.dtype) -> list[str]:
    """List what is wrong with the dtype of ids."""
    return [] if ids_dtype in IDS else [f"ids_dtype={ids_dtype} is not one of {', '.join(map(str, IDS))}"]


def raise_all(what: str, problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists all problems, if there are any."""
    if problems:
        raise ConfigError(f"{what}: " + "; ".join(problems))


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
    ids_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts inside the best topk_group groups; return topk_weights f32 [T, K] and topk_ids [T, K].

    Scores are f32. Scores plus e_score_correction_bias choose, scores alone weigh. A group counts as the sum of its two
    best biased scores, or as its best score where there is no bias. `renormalize` divides a token's weights by their
    sum; routed_scaling_factor multiplies them afterwards, and must not be applied again.
    Ids come best first. Of equal scores, of experts or of groups, the lowest id wins, on every device and every run.
    A token with a NaN among its scores (a NaN logit; +inf under softmax) goes nowhere: ids -1, weights 0. So does a
    choice whose biased score is -inf, which makes a bias of -inf an expert that is never chosen.
    score_dtype: bf16 rounds sigmoid scores as DeepSeek's own inference code does; softmax is always taken in f32.
    ids_dtype: int32, which kernels and layers take, or int64, which torch indexes with.
    Raises ShapeError for tensors, ConfigError for numbers that do not fit each other. Never synchronises.
    """
    check_tensors(router_logits, e_score_correction_bias)
    problems = scoring_problems(scoring_func, routed_scaling_factor, score_dtype)
    problems += group_problems(router_logits.shape[1], top_k, num_expert_group, topk_group)
    raise_all("grouped_topk", problems + ids_problems(ids_dtype))
    bias = e_score_correction_bias
    fused = fused_kernels(router_logits, top_k, num_expert_group, scoring_func, bias, score_dtype)
    given = (scoring_func, bias, renormalize, routed_scaling_factor, score_dtype)
    chosen = (fused or reference).grouped_topk(router_logits, top_k, num_expert_group, topk_group, *given)
    weights_TK, ids_TK = chosen[:2]
    return weights_TK, ids_TK.to(ids_dtype)


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
    if not 1 <= top_k <= selectable and num_expert_group == 1:
        problems.append(
            f"top_k={top_k} experts cannot be chosen among E={num_experts}; use top_k in [1, {num_experts}]"
        )
    elif not 1 <= top_k <= selectable:
        groups_needed = -(-max(top_k, 1) // max(per_group, 1))
        more_groups = f" or topk_group >= {groups_needed}" if topk_group < groups_needed <= num_expert_group else ""
        problems.append(
            f"top_k={top_k} experts cannot be chosen among topk_group={topk_group} groups of {per_group} experts "
            f"= {selectable} selectable; use top_k in [1, {selectable}]{more_groups}"
        )
    return problems
