"""A router in one file: a token goes to as many of its best experts as reach a share of the probability."""

from torch import Tensor

from moe_mk.router import RouterKind
from moe_mk.tokens import Routing

SHARE = 0.6
"""Of the probability of all experts."""


class TopP(RouterKind):
    """The best experts until their probabilities sum up to `SHARE`, at least one and at most `top_k`.

    Source: Huang et al. 2024, "Harder Tasks Need More Experts: Dynamic Routing in MoE Models", arXiv 2403.07652.
    """

    def __call__(self, router_logits: Tensor, e_score_correction_bias: Tensor | None = None) -> Routing:
        weights_TK, ids_TK = router_logits.float().softmax(1).topk(self.config.top_k)
        unused_TK = ~(weights_TK.cumsum(1) - weights_TK < SHARE)  # NaN is in no expert's range
        weights_TK = weights_TK.masked_fill(unused_TK, 0.0)
        if self.config.renormalize:
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True).clamp_min(1e-20)
        return Routing(ids_TK.int().masked_fill(unused_TK, -1), weights_TK * self.config.routed_scaling_factor)
