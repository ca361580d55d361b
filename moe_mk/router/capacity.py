"""Expert capacity: a fixed number of rows per expert, spill to the next choice, and tokens that pass through.

Static shapes and no synchronisation; what did not fit has id -1, and so goes nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from moe_mk.errors import ConfigError
from moe_mk.kernels.reference.topk import best
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
    """What became of the assignments under a capacity."""

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
