"""Plain top-k routing, as Mixtral and Qwen3-MoE use it, and the checks every router makes at its door."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.external.device import profile_here
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
    given = (scoring_func, renormalize, routed_scaling_factor, e_score_correction_bias, score_dtype)
    fused = fused_kernels(router_logits, top_k, 1, scoring_func, e_score_correction_bias, score_dtype)
    return kernel.topk(router_logits, top_k, *given) if fused is None else fused.topk(router_logits, top_k, *given)


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
    if router_logits.device.type != "cuda" or not is_plain(router_logits) or not _has_kernels(router_logits.device):
        return None
    from moe_mk.kernels.triton import topk as fused

    case = (router_logits, top_k, num_expert_group, scoring_func, e_score_correction_bias, score_dtype)
    return fused if fused.serves(*case) else None


def is_plain(x: Tensor) -> bool:
    """Whether a kernel may read this tensor's memory: no subclass, and nothing is being traced."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


@cache
def _has_kernels(device: torch.device) -> bool:
    profile = profile_here(device)
    able = profile.kind == "cuda" and profile.arch is not None and profile.arch >= (9, 0)
    return able and find_spec("triton") is not None


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
