"""Even load while training: importance, its variation as a loss, and the bias update that needs no loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_mk.router.topk import FLOATS
from moe_mk.shapes import expect

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


def coefficient_of_variation(values: Tensor) -> Tensor:
    """Population standard deviation over mean of values >= 0: 0 when all are equal, zeros included."""
    return values.std(correction=0) / values.mean().clamp(min=torch.finfo(values.dtype).tiny)


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
