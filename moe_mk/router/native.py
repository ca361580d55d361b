"""Gate and router as one native CPU call: products, scores, bias, groups, choice and weights, without leaving C++.

At a handful of tokens the torch operators in between cost more than the numbers they compute. Choices follow
`grouped_topk`'s rules to the letter: ties to the lowest id, NaN and -inf nowhere. The logits are f32 sums of exact
products in another order than a GEMM's, so two experts within rounding of each other may change places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.kernels import native
from moe_mk.router.router import Router
from moe_mk.tokens import Routing

SCORED = ("sigmoid", "softmax")
"""The scores that the kernel computes."""


def routes_natively(router: Router) -> bool:
    """Whether the native kernel does what this router does.

    It does no simulations, no scores in the model dtype, and of scores sigmoid and softmax alone.
    """
    plain = type(router) is Router and router.simulate is None and router.router_dtype == "float32"
    return plain and router.scoring_func in SCORED


def scored_natively(scoring_func: str) -> bool:
    """Whether the native kernel supports these settings."""
    return scoring_func in SCORED


def route_natively(x_TH: Tensor, gate_EH: Tensor, bias_E: Tensor | None, router: Router) -> tuple[Routing, Tensor]:
    """Route tokens bf16 [T, H] with a gate bf16 or f32 [E, H]; also return the logits f32 [T, E].

    Raises ShapeError for tensors, ConfigError for groups that do not fit, UnsupportedError without a C++ compiler and
    for scores that the kernel does not compute.
    """
    mode, threads = mode_of(router), torch.get_num_threads()
    ids_TK, weights_TK, logits_TE = native.route(native.loaded(), x_TH, gate_EH, bias_E, mode, threads=threads)
    return Routing(ids_TK, weights_TK), logits_TE


def mode_of(router: Router) -> native.RouteMode:
    """A router's settings as the kernel takes them. Raises UnsupportedError for scores that it does not compute."""
    if not scored_natively(router.scoring_func):
        reason = f"scores are {router.scoring_func}, the native kernel computes {' and '.join(SCORED)}"
        raise UnsupportedError("the native router cannot run", [f"{reason}; route with the router itself"])
    return native.RouteMode(
        top_k=router.top_k, scoring=native.Scoring[router.scoring_func.upper()], num_groups=router.num_expert_group,
        top_groups=router.topk_group, renormalize=router.renormalize, scale=router.routed_scaling_factor,
    )  # fmt: skip
