"""Top-k routing, plain and group-limited: score every expert, keep the best groups, choose k experts inside them.

Reads logits (T, E) and an optional bias (E), writes weights f32 (T, K) and ids int32 (T, K). No synchronisation, no
value-dependent shapes. Experts of one group are contiguous: group g holds ids [g * E/G, (g + 1) * E/G).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Keeps 0/0 away when every chosen score has underflowed; too small to change any f32 sum above 1e-13.
RENORMALIZE_EPSILON = 1e-20


BY_LOGIT = ("logit_sigmoid", "logit_softmax", "masked_softmax")
"""Scores that weigh experts which logits choose: a bias for selection is added to the logits."""


def expert_scores(router_logits: Tensor, scoring_func: str, score_dtype: torch.dtype) -> Tensor:
    """Turn logits into f32 scores: of softmax and sigmoid in [0, 1], of sqrtsoftplus at least 0, or the logits.

    score_dtype: what sigmoid and sqrtsoftplus are rounded to before they become f32. A softmax is always taken in f32.
    """
    if scoring_func == "softmax":
        return router_logits.softmax(-1, dtype=torch.float32)
    if scoring_func in BY_LOGIT:
        return router_logits.float().masked_fill(router_logits == torch.inf, torch.nan)
    score = sqrtsoftplus if scoring_func == "sqrtsoftplus" else sigmoid
    return score(router_logits.float()).to(score_dtype).float()


def exact_scores(router_logits: Tensor, scores_TE: Tensor, scoring_func: str, score_dtype: torch.dtype) -> Tensor:
    """Return scores in f64, for weights within one ulp of f32; those of `expert_scores` if they are rounded.

    An f32 softmax is up to 24 ulps off: exp of a difference that was rounded, by half an ulp of a number of size 16.
    """
    if scoring_func in ("sigmoid", "sqrtsoftplus") and score_dtype is not torch.float32:
        return scores_TE
    logits_TE = router_logits.double()
    if scoring_func == "masked_softmax":
        return masked_softmax(logits_TE)
    if scoring_func.endswith("softmax"):
        return logits_TE.softmax(-1)
    return sqrtsoftplus(logits_TE) if scoring_func == "sqrtsoftplus" else sigmoid(logits_TE)


def masked_softmax(x_TE: Tensor) -> Tensor:
    """The weight of each expert in a softmax over itself and lower ones within two percent, as PhiMoE weighs experts.

    A logit s is that near to a higher m where (m - s) / max(|s|, m) <= 0.02, in f32. Memory: E values per logit.
    """
    order_TE = x_TE.argsort(stable=True, dim=-1, descending=True)
    x_TX = x_TE.gather(-1, order_TE)
    high_TX1, low_T1X = x_TX.float()[:, :, None], x_TX.float()[:, None]
    far_TXX = (high_TX1 - low_T1X) / low_T1X.abs().maximum(high_TX1) > 0.02
    others_TXX = (x_TX[:, None] - x_TX[:, :, None]).exp().masked_fill(far_TXX, 0.0).triu()
    return torch.empty_like(x_TE).scatter(-1, order_TE, others_TXX.sum(-1).reciprocal())


def sqrtsoftplus(x: Tensor) -> Tensor:
    """The root of ln(1 + exp(x)) of f32 values, as DeepSeek-V4 scores experts; 0 below -88.

    ln(exp(x) + exp(0)) neither overflows nor loses digits. The root of 0 has no gradient, so what would underflow is
    cut off as in `sigmoid`.
    """
    cut = x.clamp(min=-88.0)
    return torch.logaddexp(cut, torch.zeros_like(cut)).sqrt().masked_fill(x < -88.0, 0.0)


def sigmoid(x: Tensor) -> Tensor:
    """The logistic function of f32 values, bit-identical for equal values at any position of a tensor.

    NOTE: torch.sigmoid on CPU takes one code path in the vector body and another in the tail, in strided tensors and at
    thread boundaries, one ulp apart (seen in 2.13 with AVX-512): equal logits would not tie, and a token's experts
    could depend on other tokens. exp and the division do not differ by position.
    """
    # Beyond -88 exp(-x) overflows, and its gradient would be 0 * inf.
    return (1.0 + (-x.clamp(min=-88.0)).exp()).reciprocal().masked_fill(x < -88.0, 0.0)


def best(values_TX: Tensor, count: int) -> Tensor:
    """Indices of the `count` greatest values of each row, best first; of equal values the lowest index.

    Each pass relies on argmax returning the first of equal maxima; torch.topk guarantees no order among them.
    """
    # -inf marks chosen entries, so an input of -inf is raised above it and can still be chosen.
    remaining_TX = values_TX.detach().clamp(min=torch.finfo(values_TX.dtype).min)
    found: list[Tensor] = []
    for _ in range(count):
        found.append(remaining_TX.argmax(-1, keepdim=True))
        remaining_TX.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def weigh(scores_TE: Tensor, ids_TK: Tensor, renormalize: bool, routed_scaling_factor: float) -> Tensor:
    """The weights [T, K] of chosen experts by their scores, in the dtype of the scores; 0 for an id of -1."""
    weights_TK = scores_TE.gather(-1, ids_TK.clamp_min(0)).masked_fill(ids_TK < 0, 0.0)
    if renormalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + RENORMALIZE_EPSILON)
    return weights_TK * routed_scaling_factor


def weigh_best(
    scores_TE: Tensor, biased_TE: Tensor, top_k: int, renormalize: bool, routed_scaling_factor: float
) -> tuple[Tensor, Tensor]:
    """Choose by biased score, weight by unbiased score, f32 or f64; a choice of -inf is dropped: id -1, weight 0."""
    ids_TK = best(biased_TE, top_k)
    ids_TK = ids_TK.masked_fill(biased_TE.gather(-1, ids_TK) == -torch.inf, -1)
    return weigh(scores_TE, ids_TK, renormalize, routed_scaling_factor).float(), ids_TK.to(torch.int32)


def drop_undecidable(weights_TK: Tensor, ids_TK: Tensor, biased_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Drop tokens with a NaN among their biased scores: every id -1, every weight 0."""
    undecidable_T1 = biased_TE.isnan().any(-1, keepdim=True)
    return weights_TK.masked_fill(undecidable_T1, 0.0), ids_TK.masked_fill(undecidable_T1, -1)


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
