"""Top-k routing: the grouped kernel with a single group.

Reads logits (T, E) and an optional bias (E), writes weights f32 (T, K) and ids int32 (T, K).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.kernels.triton.grouped_topk import grouped_topk


def topk(
    router_logits: Tensor,
    top_k: int,
    scoring_func: str,
    renormalize: bool,
    routed_scaling_factor: float,
    e_score_correction_bias: Tensor | None,
    score_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Choose each token's top_k experts over all of them, and weigh the chosen with their unbiased scores."""
    return grouped_topk(
        router_logits, top_k, 1, 1, scoring_func, e_score_correction_bias, renormalize, routed_scaling_factor,
        score_dtype,
    )  # fmt: skip
