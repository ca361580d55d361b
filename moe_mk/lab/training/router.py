"""Routing while training: expert capacity, noisy top-k gating, and what keeps the load of experts even.

`expert_capacity` and `route_with_capacity` limit the rows of an expert: static shapes, no synchronisation; assignments
that do not fit go to the token's next choice, or get id -1. `noisy_topk` is the router of the sparsely-gated mixture of
experts (Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.1, arXiv 1701.06538). Importance, its
variation as a loss, and the bias update without a loss are below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from moe_mk.errors import ConfigError
from moe_mk.kernels.reference.topk import best
from moe_mk.router.gate import gate_logits
from moe_mk.router.topk import FLOATS, raise_all
from moe_mk.shapes import expect


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Rows an expert may receive: ceil(capacity_factor * T * K / E), in exact arithmetic."""
    if num_tokens < 0 or top_k < 1 or num_experts < 1 or not 0 < capacity_factor < float("inf"):
        raise ConfigError(
            f"expert_capacity: needs tokens >= 0, top_k >= 1, experts >= 1 and a finite capacity_factor > 0, got "
            f"num_tokens={num_tokens}, top_k={top_k}, num_experts={num_experts}, capacity_factor={capacity_factor}"
        )
    # 1.1 means eleven tenths: as a binary float it would round 10 rows up to 12.
    return ceil(Fraction(str(capacity_factor)) * num_tokens * top_k / num_experts)


@dataclass(frozen=True)
class CapacityRouting:
    """Assignments that a capacity kept and dropped."""

    weights_TK: Tensor
    """f32: the score of each choice; 0 where dropped. Not renormalised: a dropped share stays with the residual."""
    ids_TK: Tensor
    """int32, in the order in which experts accepted the token; -1 behind the last."""
    num_dropped: Tensor
    """int64 scalar: assignments that found no place."""


def route_with_capacity(
    scores_TE: Tensor, top_k: int, capacity: int, num_choices: int | None = None
) -> CapacityRouting:
    """Give every token up to top_k experts, none of which takes more than `capacity` tokens.

    First choices of all tokens come before second choices; among equal choices earlier tokens come first. A token that
    is refused asks its next best expert, until it has top_k or has asked num_choices (default: all experts).
    num_choices = top_k is no spill: the overflow is dropped.
    """
    expect("scores", scores_TE, "T E", FLOATS)
    num_tokens, num_experts = scores_TE.shape
    num_choices = num_experts if num_choices is None else num_choices
    problems: list[str] = []
    if not 1 <= top_k <= num_choices <= num_experts:
        problems.append(f"1 <= top_k={top_k} <= num_choices={num_choices} <= E={num_experts} does not hold")
    if capacity < 0:
        problems.append(f"capacity={capacity} is negative")
    raise_all("route_with_capacity", problems)

    choice_TX = best(scores_TE, num_choices)
    # One column too many: what was refused is written there and cut off.
    ids_TK = torch.full((num_tokens, top_k + 1), -1, dtype=torch.int64, device=scores_TE.device)
    accepted_T = torch.zeros(num_tokens, dtype=torch.int64, device=scores_TE.device)
    load_E = torch.zeros(num_experts, dtype=torch.int64, device=scores_TE.device)
    for rank in range(num_choices):
        asked_T = choice_TX[:, rank]
        asks_TE = one_hot(asked_T, num_experts) * (accepted_T < top_k).unsqueeze(-1)
        place_TE = load_E + asks_TE.cumsum(0)
        taken_TE = asks_TE * (place_TE <= capacity)
        taken_T = taken_TE.sum(-1) > 0
        column_T = torch.where(taken_T, accepted_T, top_k)
        ids_TK.scatter_(1, column_T.unsqueeze(-1), asked_T.unsqueeze(-1))
        accepted_T = accepted_T + taken_T
        load_E = load_E + taken_TE.sum(0)
    ids_TK = ids_TK[:, :top_k]
    weights_TK = scores_TE.float().gather(1, ids_TK.clamp(min=0)).masked_fill(ids_TK < 0, 0.0)
    return CapacityRouting(weights_TK, ids_TK.to(torch.int32), (ids_TK < 0).sum())


def noisy_topk(
    x_TH: Tensor,
    gate_EH: Tensor,
    noise_EH: Tensor,
    top_k: int,
    *,
    noise_std: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by noisy logits; return probabilities f32 [T, E], topk_weights f32 [T, K], topk_ids int32 [T, K].

    Logits are x @ gate.T + N(0, noise_std^2) * softplus(x @ noise.T), and -inf outside each token's top_k, so that the
    probability of an expert that is not chosen is exactly 0. noise_std 0 is evaluation: no draw, no dependence on
    `generator`. Ties go to the lowest id.
    """
    clean_TE = gate_logits(x_TH, gate_EH)
    num_tokens, num_experts = clean_TE.shape
    expect("noise weight", noise_EH, "E H", (x_TH.dtype, torch.float32), x_TH.device, E=num_experts, H=x_TH.shape[1])
    problems: list[str] = []
    if not 1 <= top_k <= num_experts:
        problems.append(
            f"top_k={top_k} experts cannot be chosen among E={num_experts}; use top_k in [1, {num_experts}]"
        )
    if not noise_std >= 0:
        problems.append(f"noise_std={noise_std} is negative; use 0 for none")
    raise_all("noisy_topk", problems)
    if noise_std == 0:
        noisy_TE = clean_TE
    else:
        draw_TE = torch.randn(num_tokens, num_experts, dtype=torch.float32, device=x_TH.device, generator=generator)
        noisy_TE = clean_TE + noise_std * draw_TE * softplus(gate_logits(x_TH, noise_EH))
    kept_TE, ids_TK = keep_top_k(noisy_TE, top_k)
    probabilities_TE = kept_TE.softmax(-1)
    return probabilities_TE, probabilities_TE.gather(-1, ids_TK), ids_TK.to(torch.int32)


def keep_top_k(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Set all but each token's top_k logits to -inf; return them with the int64 ids of the kept, best first."""
    ids_TK = best(logits_TE, top_k)
    dropped_TE = torch.ones_like(logits_TE, dtype=torch.bool).scatter_(-1, ids_TK, False)
    return logits_TE.masked_fill(dropped_TE, -torch.inf), ids_TK


FLOATS_AND_F64 = (*FLOATS, torch.float64)


def importance(probabilities_TE: Tensor, all_reduce_sum: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Sum each expert's probabilities over the batch [E], over all ranks where a reduction is given.

    all_reduce_sum: returns the sum of its argument over all ranks; it need not be differentiable, and every rank calls
    it, with zero tokens too. Gradients flow into this rank's probabilities as if the whole batch were here, so ranks
    that hold copies of one gate sum its gradients and do not average them.
    """
    expect("probabilities", probabilities_TE, "T E", FLOATS_AND_F64)
    local_E = probabilities_TE.sum(0)
    if all_reduce_sum is None:
        return local_E
    elsewhere_E = all_reduce_sum(local_E.detach().clone()) - local_E.detach()
    return local_E + elsewhere_E


def balance_loss(importance_E: Tensor, weight: float, exponent: float = 2.0) -> Tensor:
    """The auxiliary loss: weight * CV(importance) ** exponent, a differentiable scalar.

    weight 0 gives a plain 0 that depends on nothing, so training is the same to the last bit.
    """
    expect("importance", importance_E, "E", FLOATS_AND_F64)
    if weight == 0:
        return importance_E.new_zeros(())
    # Through the variance: the standard deviation has no gradient where all are equal.
    least = torch.finfo(importance_E.dtype).tiny  # a batch without tokens is even
    squared = importance_E.var(correction=0) / importance_E.mean().square().clamp(min=least)
    return weight * (squared if exponent == 2 else squared ** (exponent / 2))


def updated_bias(e_score_correction_bias: Tensor, load_E: Tensor, gamma: float) -> Tensor:
    """Raise the bias of experts below the mean load by gamma and lower that of experts above it; returns a new bias.

    load_E: assignments of each expert in the last step, summed over ranks; integers or floats.
    Source: auxiliary-loss-free balancing, Wang et al. 2024 (arXiv 2408.15664); used to train DeepSeek-V3.
    """
    expect("e_score_correction_bias", e_score_correction_bias, "E", torch.float32)
    expect("load", load_E, "E", None, e_score_correction_bias.device, E=e_score_correction_bias.shape[0])
    load = load_E.to(torch.float32)
    return e_score_correction_bias + gamma * (load.mean() - load).sign()
