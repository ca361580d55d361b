"""Top-k routing, plain and group-limited: keep the best groups of experts, then choose k experts inside them.

Reads logits (T, E) and an optional bias (E), writes weights f32 (T, K) and ids int32 (T, K). No synchronisation, no
value-dependent shapes. Experts of one group are contiguous: group g holds ids [g * E/G, (g + 1) * E/G).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.kernels.reference.topk import best, drop_undecidable, exact_scores, expert_scores, weigh_best


def grouped_topk(
    router_logits: Tensor,
    top_k: int,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str,
    e_score_correction_bias: Tensor | None,
    renormalize: bool,
    routed_scaling_factor: float,
    score_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Choose each token's top_k experts inside its topk_group best groups, weighted by their unbiased scores.

    Source: DeepSeek-V2 and -V3 model code (group maximum without a bias, sum of the two best with one).
    """
    scores_TE = expert_scores(router_logits, scoring_func, score_dtype)
    biased_TE = scores_TE if e_score_correction_bias is None else scores_TE + e_score_correction_bias.float()
    num_counted = 1 if e_score_correction_bias is None else 2
    kept_TE = biased_TE
    if topk_group < num_expert_group:
        kept_TE = mask_other_groups(biased_TE, num_expert_group, topk_group, num_counted)
    exact_TE = exact_scores(router_logits, scores_TE, scoring_func, score_dtype)
    weights_TK, ids_TK = weigh_best(exact_TE, kept_TE, top_k, renormalize, routed_scaling_factor)
    return drop_undecidable(weights_TK, ids_TK, biased_TE)


def mask_other_groups(biased_TE: Tensor, num_expert_group: int, topk_group: int, num_counted: int) -> Tensor:
    """Set the experts of all but the topk_group best groups to -inf.

    num_counted: the score of a group is the sum of this many best experts, or of all if it has fewer.
    """
    per_group = biased_TE.shape[-1] // num_expert_group
    biased_TGX = biased_TE.reshape(-1, num_expert_group, per_group)
    score_TG = biased_TGX.topk(min(num_counted, per_group), -1).values.sum(-1)
    masked_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter_(-1, best(score_TG, topk_group), False)
    # -inf and never 0: a bias may push every score of a kept group below 0, and a masked 0 would win.
    return biased_TGX.masked_fill(masked_TG.unsqueeze(-1), -torch.inf).view(biased_TE.shape)
