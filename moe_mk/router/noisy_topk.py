"""Noisy top-k gating with trainable noise: the router of the sparsely-gated mixture of experts.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.1 (arXiv 1701.06538).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from moe_mk.kernels.reference.topk import best
from moe_mk.router.gate import gate_logits
from moe_mk.router.topk import raise_all
from moe_mk.shapes import expect


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
