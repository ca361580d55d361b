"""Top-k routing, plain and group-limited, in one launch: score, add the bias, keep the best groups, choose, weight.

Reads logits (T, E) once and an optional bias (E), writes weights f32 (T, K) and ids int32 (T, K). One program per
token; experts are held as groups x experts of a group in registers, both padded to a power of two. Of equal scores the
lower id is chosen, as in the reference. Scores are f32; the weights of the K choices are computed in f64 and rounded
once.

With `placing` it also counts the choices, by one atomic addition each, and writes the physical expert of each choice
from a table (E): a layer with one copy of every expert needs no further launch between its gate and its experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from moe_mk.errors import UnsupportedError
from moe_mk.kernels.triton.launch import after_the_one_before, chained
from moe_mk.kernels.triton.numerics import IN_INTERPRETER, to_bf16

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
MOST_EXPERTS = 1024
"""Experts that one program holds, with groups and their sizes padded to powers of two: 32 registers of each thread."""
MOST_CHOICES = 32


def serves(
    router_logits: Tensor,
    top_k: int,
    num_expert_group: int,
    scoring_func: str,
    e_score_correction_bias: Tensor | None,
    score_dtype: torch.dtype,
) -> bool:
    """Whether these kernels compute a case as the reference does; sizes must fit each other. They have no gradient."""
    num_experts = router_logits.shape[1]
    held = triton.next_power_of_2(num_expert_group) * triton.next_power_of_2(num_experts // num_expert_group)
    given = [router_logits] if e_score_correction_bias is None else [router_logits, e_score_correction_bias]
    return (
        scoring_func in ("sigmoid", "softmax")
        and (score_dtype in (torch.float32, torch.bfloat16) or scoring_func == "softmax")
        and held <= MOST_EXPERTS
        and top_k <= MOST_CHOICES
        and all(each.stride(-1) == 1 for each in given)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in given))
    )


def grouped_topk(
    router_logits: Tensor, top_k: int, num_expert_group: int, topk_group: int, scoring_func: str, bias: Tensor | None,
    renormalize: bool, factor: float, score_dtype: torch.dtype, placing: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Choose each token's top_k experts inside its topk_group best groups, weighted by their unbiased scores.

    score_dtype: float32 or bfloat16. placing: load_E (int64, contiguous), to which the choices are added, except ids of
    -1; and physical_of_E (int32, -1 for an expert without a copy). Returns weights, ids and physical ids, int32 (T, K);
    without placing, ids twice. Raises UnsupportedError for scores that are neither sigmoid nor softmax.
    Source: DeepSeek-V2 and -V3 model code, as the reference.
    """
    if scoring_func not in ("sigmoid", "softmax"):
        reason = f"scores are {scoring_func}, this kernel computes sigmoid and softmax; use the reference"
        raise UnsupportedError("Triton's grouped_topk cannot run", [reason])
    num_tokens, num_experts = router_logits.shape
    weights_TK = torch.empty((num_tokens, top_k), dtype=torch.float32, device=router_logits.device)
    ids_TK = torch.empty((num_tokens, top_k), dtype=torch.int32, device=router_logits.device)
    physical_TK = ids_TK if placing is None else torch.empty_like(ids_TK)
    if num_tokens == 0:
        return weights_TK, ids_TK, physical_TK
    per_group = num_experts // num_expert_group
    _grouped_topk[(num_tokens,)](
        router_logits, bias if bias is not None else router_logits, weights_TK, ids_TK,
        *(placing or (ids_TK, ids_TK)), physical_TK, router_logits.stride(0), factor,
        NUM_GROUPS=num_expert_group, PER_GROUP=per_group, KEPT_GROUPS=topk_group, TOP_K=top_k,
        GROUPS=triton.next_power_of_2(num_expert_group), WIDTH=triton.next_power_of_2(per_group),
        KS=triton.next_power_of_2(top_k), BIASED=bias is not None, SOFTMAX=scoring_func == "softmax",
        RENORMALIZE=renormalize, ROUND_SCORES=scoring_func != "softmax" and score_dtype is torch.bfloat16,
        PLACED=placing is not None, num_warps=1, **chained(),
    )  # fmt: skip
    return weights_TK, ids_TK, physical_TK


@triton.jit
def _exp(x):
    """The exponential of CUDA's library, of f32 or f64, as in torch: within 1 ulp, where `tl.exp` errs by |x| ulps."""
    return tl.exp(x) if IN_INTERPRETER else libdevice.exp(x)


@triton.jit
def _first_of(value, index, wanted):
    return tl.min(tl.where(value == wanted, index, 2147483647))


@triton.jit
def _grouped_topk(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, load_ptr, physical_of_ptr, physical_ptr, logits_stride, factor,
    NUM_GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, KEPT_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, KS: tl.constexpr, BIASED: tl.constexpr, SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr, ROUND_SCORES: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    token = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    real = (group[:, None] < NUM_GROUPS) & (place[None, :] < PER_GROUP)
    expert = group[:, None] * PER_GROUP + place[None, :]

    logit = tl.load(logits_ptr + token * logits_stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    most, total = 0.0, 1.0
    if SOFTMAX:
        most = tl.max(logit)
        exponential = _exp(logit - most)
        total = tl.sum(exponential)
        score = tl.div_rn(exponential, tl.broadcast_to(total, [GROUPS, WIDTH]))
    else:
        score = tl.where(logit < -88.0, 0.0, tl.div_rn(1.0, 1.0 + _exp(-tl.maximum(logit, -88.0))))
        score = tl.where(logit == logit, score, logit)  # maximum() drops NaN
        if ROUND_SCORES:
            score = to_bf16(score).to(tl.float32)
    biased = score
    if BIASED:
        biased += tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
    biased = tl.where(real, biased, float("-inf"))
    undecidable = tl.max(tl.where(real & (biased != biased), 1, 0)) > 0

    # The score of a group is that of its best expert, or the sum of the two best with a bias.
    best = tl.max(biased, axis=1)
    if BIASED and PER_GROUP > 1:
        first = tl.min(tl.where(biased == best[:, None], place[None, :], WIDTH), axis=1)
        best += tl.max(tl.where(place[None, :] == first[:, None], float("-inf"), biased), axis=1)
    left = tl.where(group < NUM_GROUPS, tl.maximum(best, LOWEST), float("-inf"))
    kept = tl.zeros([GROUPS], tl.int1)
    for _ in tl.static_range(KEPT_GROUPS):
        taken = group == _first_of(left, group, tl.max(left))
        kept = kept | taken
        left = tl.where(taken, float("-inf"), left)

    chosen_value = tl.where(kept[:, None], biased, float("-inf"))
    left = tl.where(real, tl.maximum(chosen_value, LOWEST), float("-inf"))
    choice = tl.arange(0, KS)
    ids, values = tl.full([KS], -1, tl.int32), tl.zeros([KS], tl.float32)
    for k in tl.static_range(TOP_K):
        found = _first_of(left, expert, tl.max(left))
        taken = (expert == found) & real
        nowhere = tl.max(tl.where(taken, chosen_value, float("-inf"))) == float("-inf")
        value = tl.max(tl.where(taken, score if ROUND_SCORES else logit, float("-inf")))
        ids = tl.where(choice == k, tl.where(nowhere, -1, found), ids)
        values = tl.where(choice == k, value, values)
        left = tl.where(taken, float("-inf"), left)
    weights = _weights(values, ids, logit, most, total, SOFTMAX, RENORMALIZE, ROUND_SCORES)
    weights = tl.where(undecidable, 0.0, weights * factor).to(tl.float32)
    ids = tl.where(undecidable, -1, ids)
    inside = choice < TOP_K
    tl.store(weights_ptr + token * TOP_K + choice, weights, mask=inside)
    tl.store(ids_ptr + token * TOP_K + choice, ids, mask=inside)
    if PLACED:
        _place(load_ptr, physical_of_ptr, physical_ptr + token * TOP_K, ids, choice, inside, KS)


@triton.jit
def _weights(
    values, ids, logit, most, total,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, ROUND_SCORES: tl.constexpr,
):  # fmt: skip
    """Weights in f64 of chosen logits (or rounded scores), before the factor.

    Renormalised ones do not depend on the sum over all experts, except through the epsilon.
    """
    weights = values.to(tl.float64)
    if SOFTMAX:
        whole = total.to(tl.float64)
        if not RENORMALIZE:
            whole = tl.sum(_exp(logit.to(tl.float64) - most.to(tl.float64)))
        weights = _exp(weights - most.to(tl.float64)) / whole
    elif not ROUND_SCORES:
        weights = tl.where(values < -88.0, 0.0, 1.0 / (1.0 + _exp(-tl.maximum(weights, -88.0))))
    weights = tl.where(ids >= 0, weights, 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights) + 1e-20)
    return weights


@triton.jit
def _place(load_ptr, physical_of_ptr, physical_ptr, ids, choice, inside, KS: tl.constexpr):
    chosen = inside & (ids >= 0)
    tl.atomic_add(load_ptr + ids, tl.full([KS], 1, tl.int64), mask=chosen, sem="relaxed")
    tl.store(physical_ptr + choice, tl.load(physical_of_ptr + ids, mask=chosen, other=-1), mask=inside)
