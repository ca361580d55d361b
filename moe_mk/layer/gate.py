"""The gate of one layer: its weight in the precision of the router, and the tier that multiplies by it.

On a CPU, gate and router are one native call: products, scores, bias, groups, choice and weights. At a handful of
tokens the torch operators in between cost more than the numbers they compute. Choices follow `grouped_topk`'s rules to
the letter: ties to the lowest id, NaN and -inf nowhere. The logits are f32 sums of exact products in another order
than a GEMM's, so two experts within rounding of each other may change places.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from moe_mk.kernels import native
from moe_mk.oracle.verdict import Decision
from moe_mk.router.gate import SMALL_M_LIBRARY, choose_gate_tier, gate_logits
from moe_mk.router.hashed import HashedTokens
from moe_mk.router.replay import ReplayedTokens
from moe_mk.router.router import OwnRouter, Router
from moe_mk.tokens import Routing

AnyRouter = Router | OwnRouter | HashedTokens | ReplayedTokens

SCORED = ("sigmoid", "softmax")
"""The scores that the kernel computes."""


def routes_natively(router: AnyRouter) -> TypeGuard[Router]:
    """Whether the native kernel does what this router does.

    It does no simulations, no scores in the model dtype, and of scores sigmoid and softmax alone.
    """
    if type(router) is not Router or router.simulate is not None or router.router_dtype != "float32":
        return False
    return router.scoring_func in SCORED


def mode_of(router: Router) -> native.RouteMode:
    """The settings of a router that `routes_natively`, as the kernel takes them."""
    return native.RouteMode(
        top_k=router.top_k, scoring=native.Scoring[router.scoring_func.upper()], num_groups=router.num_expert_group,
        top_groups=router.topk_group, renormalize=router.renormalize, scale=router.routed_scaling_factor,
    )  # fmt: skip


class Gate:
    """Hidden states to router logits, and on to a routing. Empty until loaded."""

    def __init__(self, decision: Decision, dtype: torch.dtype, device: torch.device) -> None:
        self.decision, self.dtype, self.device = decision, dtype, device
        self.router_dtype = decision.problem.config.router.router_dtype
        self._two_best = decision.problem.config.router.group_score == "two_best"
        self._invariant = decision.problem.config.kernel.invariant
        self.weight_EH: Tensor | None = None
        self.bias_E: Tensor | None = None
        """f32; takes part in the choice of experts only."""
        self.logit_bias_E: Tensor | None = None
        """f32; added to the logits."""
        self.expert_scale_E: Tensor | None = None
        """f32; multiplied with the routing weights of each expert."""
        self._prepared: tuple[object, Tensor | None, object, native.RouteCall | None] = None, None, None, None
        """What routes in one native call, behind what it was made from; None where gate and router are operators."""

    def notes(self) -> dict[str, str]:
        """Return a digest of the gate that ranks compare: it is equal on all ranks, and differs between layers.

        Values are compared: backends differ in the dtype in which they keep a gate. Read on the host, once before the
        first call. The bias, which may be corrected while serving, is not compared.
        """
        if self.weight_EH is None:
            return {}
        data = self.weight_EH.detach().cpu().float().contiguous().numpy()
        return {"gate weights": hashlib.sha256(data.tobytes()).hexdigest()[:16]}

    def load(
        self,
        weight_EH: Tensor,
        bias_E: Tensor | None,
        logit_bias_E: Tensor | None = None,
        expert_scale_E: Tensor | None = None,
    ) -> None:
        """Take the weight, converted once, and in f32 both biases, of the choice and of the logits, and the factors.

        The native tier reads bf16 and f32 alike, so a weight that is stored wider than bf16 loses nothing there.
        """
        wide = keeps_gate_in_f32(self.decision) or (self._native and weight_EH.dtype is not torch.bfloat16)
        self.weight_EH = weight_EH.to(device=self.device, dtype=torch.float32 if wide else self.dtype).contiguous()
        if bias_E is None and self._two_best:  # a bias of 0 changes how groups are scored and nothing else
            bias_E = torch.zeros(weight_EH.shape[0], dtype=torch.float32, device=self.device)
        self.bias_E = None if bias_E is None else bias_E.to(device=self.device, dtype=torch.float32)
        self.logit_bias_E, self.expert_scale_E = (
            None if each is None else each.to(device=self.device, dtype=torch.float32)
            for each in (logit_bias_E, expert_scale_E)
        )

    def __call__(self, x_TH: Tensor) -> Tensor:
        """(T, H) to (T, E): f32, or the layer's dtype where the router works in it."""
        assert self.weight_EH is not None
        alone = keeps_gate_in_f32(self.decision) or self._native
        tier = "plain" if alone else self._tier(1 if self._invariant else x_TH.shape[0])
        # A GEMM rounds the sums of a row differently for different numbers of rows; of one row it cannot.
        parts = torch.split(x_TH, 1) if self._invariant and x_TH.shape[0] else (x_TH,)
        logits = [gate_logits(part, self.weight_EH, self.router_dtype, tier) for part in parts]
        logits_TE = logits[0] if len(logits) == 1 else torch.cat(logits)
        return logits_TE if self.logit_bias_E is None else logits_TE + self.logit_bias_E.to(logits_TE.dtype)

    def route(self, x_TH: Tensor, router: AnyRouter) -> tuple[Routing, Tensor]:
        """Routing and logits of the tokens: one native call if the decision and the router allow it."""
        assert self.weight_EH is not None
        made_for, logit_bias_E, made_at, call = self._prepared
        # `.data = ` and share_memory_() give a tensor other memory, and the call reads it at its address.
        at = [(each.data_ptr(), each.is_contiguous()) for each in (self.weight_EH, self.bias_E) if each is not None]
        if made_for is not router or logit_bias_E is not self.logit_bias_E or made_at != at:
            call = self._prepare(router, at)
        if call is not None and isinstance(router, Router):
            ids_TK, weights_TK, logits_TE = call(x_TH, torch.get_num_threads())
            return self.scaled(Routing(ids_TK.to(router.ids_dtype), weights_TK, logits_TE=logits_TE), router), logits_TE
        logits_TE = self(x_TH)
        return self.scaled(router(logits_TE, self.bias_E), router), logits_TE

    def scaled(self, routing: Routing, router: AnyRouter) -> Routing:
        """A router's logical routing with the weights times the factor of each expert, where experts have any.

        Recorded weights already have it.
        """
        if self.expert_scale_E is None or (isinstance(router, ReplayedTokens) and router.weights_TK is not None):
            return routing
        factors_TK = self.expert_scale_E[routing.ids_TK.clamp_min(0).long()]
        return replace(routing, weights_TK=routing.weights_TK * factors_TK)

    def _prepare(self, router: AnyRouter, at: object) -> native.RouteCall | None:
        """Return the native call that routes, kept until the router, the gate or its memory is replaced."""
        gating = self.gating(router)
        call = None
        if gating is not None:
            kernel = self.decision.problem.config.kernel
            own, pinned = kernel.threads == "own", kernel.instruction_set
            library = native.loaded(kernel.cache_dir).configured(own_threads=own, instruction_set=pinned)
            call = native.RouteCall(library, gating.gate_EH, gating.bias_E, gating.mode)
        if isinstance(router, Router):  # token ids are of one batch
            self._prepared = router, self.logit_bias_E, at, call
        return call

    def gating(self, router: AnyRouter) -> native.Gating | None:
        """Return the gate for a native call; None where it cannot route, or would copy gate or bias."""
        weight_EH, able = self.weight_EH, self._native and self.logit_bias_E is None
        if not able or not routes_natively(router) or weight_EH is None or not native.is_dense(weight_EH, self.bias_E):
            return None
        return native.Gating(weight_EH, self.bias_E, mode_of(router))

    @property
    def _native(self) -> bool:
        return self.decision.gate.tier == "native"

    def _tier(self, num_tokens: int) -> str:
        problem = self.decision.problem
        arch = problem.device.arch if problem.device.kind == "cuda" else None
        available = frozenset({"small_m"} if SMALL_M_LIBRARY in problem.installed else ())
        return choose_gate_tier(arch, num_tokens, self.dtype, self.router_dtype, available).tier


def keeps_gate_in_f32(decision: Decision) -> bool:
    """Whether the gate's weight is kept in f32, because no tier of the decision reads it narrower."""
    return decision.problem.config.router.router_dtype == "float32" and decision.gate.tier == "plain"
