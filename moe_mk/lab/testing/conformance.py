"""The checks of every backend by name, to run on a backend of your own, and those of a router.

    check_transport("my_transport", num_ranks=4)
    check_experts("my_experts", FP8_128x128, dtype=BF16, compute=FP8_1x128)
    check_router(my_router, num_experts=64, top_k=8)

Each raises NonConforming with the case and the figures, and returns how many cases it ran.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.lab.testing.experts import check_experts
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.limits import NonConforming, no_global_changes, require
from moe_mk.lab.testing.transports import check_transport
from moe_mk.router.router import OwnRouter
from moe_mk.tokens import Routing

__all__ = [
    "IdentityExperts", "NonConforming", "RoutingCase", "check_experts", "check_router", "check_transport",
    "hostile_routings",
]  # fmt: skip

CASES = ("normal", "equal", "large", "one NaN", "all -inf")
TOKENS_OF_ROUTERS = (0, 1, 7, 65)


def check_router(
    router: Callable[[Tensor, Tensor | None], Routing], *, num_experts: int, top_k: int, has_bias: bool = False
) -> int:
    """Run a router on logits of every kind and number of tokens, as a layer with `layer.router = router` would.

    Checks shapes, dtypes and the range of ids, that a token chooses an expert once, that weights are finite, that
    inputs and states of the process stay as they were, that two calls give equal bits, and that the choice of a token
    does not depend on the other tokens. A token with NaN among its logits must choose no expert.
    """
    checked, ran = OwnRouter(router, top_k, num_experts), 0
    for num_tokens in TOKENS_OF_ROUTERS:
        for kind in CASES:
            what = f"router {checked.name}, {num_tokens} tokens, {kind}"
            logits_TE = _logits(kind, num_tokens, num_experts)
            bias_E = torch.linspace(0, 0.1, num_experts, dtype=torch.float32, device=logits_TE.device)
            bias = bias_E if has_bias else None
            before = bits_of(logits_TE, bias_E)
            with no_global_changes(what):
                first = _routed(checked, logits_TE, bias, what)
            require(bits_of(logits_TE, bias_E) == before, f"{what}: an input changed")
            require(bool(first.weights_TK.isfinite().all()), f"{what}: weights are not finite")
            for token, ids in enumerate(first.ids_TK.tolist()):
                held = [expert for expert in ids if expert >= 0]
                require(len(set(held)) == len(held), f"{what}: token {token} chooses an expert twice: {ids}")
            again = _routed(checked, logits_TE, bias, what)
            require(bits_of(first) == bits_of(again), f"{what}: two calls give different bits")
            if num_tokens:
                alone = _routed(checked, logits_TE[-1:], bias, what)
                same = torch.equal(alone.ids_TK, first.ids_TK[-1:])
                require(same, f"{what}: the last token has other experts in a batch of its own")
            if num_tokens and kind == "one NaN":
                nowhere = bool((first.ids_TK[0] == -1).all())
                require(nowhere, f"{what}: a token with NaN among its logits chooses experts")
            ran += 1
    return ran


def _logits(kind: str, num_tokens: int, num_experts: int) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(num_tokens)
    logits_TE = torch.randn((num_tokens, num_experts), generator=draw, dtype=torch.float32, device="cpu")
    if kind == "equal":
        return torch.zeros_like(logits_TE)
    if kind == "large":
        return logits_TE * 1e4
    if kind != "normal" and num_tokens:
        logits_TE[0] = -torch.inf
        logits_TE[0, -1] = torch.nan if kind == "one NaN" else -torch.inf
    return logits_TE


def _routed(router: OwnRouter, logits_TE: Tensor, bias_E: Tensor | None, what: str) -> Routing:
    try:
        return router(logits_TE, bias_E)
    except MoEMKError as problem:
        raise NonConforming(f"{what}: {problem}") from problem
