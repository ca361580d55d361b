"""Routing by token id: a fixed table chooses the experts, the gate only weighs them, as in DeepSeek-V4's first layers.

router = HashRouter(table_XK, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)
layer.router = router.of(token_ids_T)        the routing of one batch; its tokens in the order of the rows
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.reference.topk import exact_scores, expert_scores, weigh
from moe_mk.router.router import Router
from moe_mk.router.topk import IDS, check_tensors, raise_all, scoring_problems
from moe_mk.shapes import expect
from moe_mk.tokens import Routing


@dataclass(frozen=True)
class HashRouter:
    """The experts of every token of a vocabulary."""

    table_XK: Tensor
    """table_XK[v, k] is the k-th expert of token v of the vocabulary; integers, -1 goes nowhere."""
    scoring_func: str = "sqrtsoftplus"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        expect("table", self.table_XK, "X K", IDS)
        raise_all("HashRouter", scoring_problems(self.scoring_func, self.routed_scaling_factor, torch.float32))

    def of(self, token_ids_T: Tensor) -> HashedTokens:
        """The router of one batch: call it with the logits of the same tokens."""
        return HashedTokens(self, token_ids_T)

    def route(self, router_logits: Tensor, token_ids_T: Tensor) -> Routing:
        """Look the experts up and weigh them by the scores of their logits: ids int32 [T, K], weights f32 [T, K].

        Raises ShapeError for tensors that do not fit each other, ConfigError for tokens or experts out of range; that
        check reads the ids, so it waits for the device.
        """
        check_tensors(router_logits, None)
        expect("token_ids", token_ids_T, "T", IDS, router_logits.device, T=router_logits.shape[0])
        self.check(token_ids_T)
        ids_TK, num_experts = self.table_XK.to(token_ids_T.device)[token_ids_T.long()].long(), router_logits.shape[1]
        if ids_TK.numel() and not -1 <= int(ids_TK.min()) <= int(ids_TK.max()) < num_experts:
            raise ConfigError(
                f"the table chooses experts from {int(ids_TK.min())} to {int(ids_TK.max())}, the layer has "
                f"{num_experts}"
            )
        scores_TE = expert_scores(router_logits, self.scoring_func, torch.float32)
        exact_TE = exact_scores(router_logits, scores_TE, self.scoring_func, torch.float32)
        weights_TK = weigh(exact_TE, ids_TK, self.renormalize, self.routed_scaling_factor)
        nowhere_T1 = scores_TE.isnan().any(-1, keepdim=True)
        weights_TK = weights_TK.float().masked_fill(nowhere_T1, 0.0)
        return Routing(ids_TK.masked_fill(nowhere_T1, -1).to(torch.int32), weights_TK)

    def check(self, token_ids_T: Tensor) -> None:
        """Raise ConfigError for tokens that the table does not have; waits for the device."""
        vocabulary = self.table_XK.shape[0]
        if token_ids_T.numel() and not 0 <= int(token_ids_T.min()) <= int(token_ids_T.max()) < vocabulary:
            raise ConfigError(
                f"token ids from {int(token_ids_T.min())} to {int(token_ids_T.max())} lie outside the table's "
                f"[0, {vocabulary})"
            )


@dataclass(frozen=True)
class ImageRouter:
    """Selects experts of tokens of images with a bias of their own, as in DeepSeek-V4-Flash-Vision-Exp."""

    scores: Router
    image_bias_E: Tensor
    """f32; the bias for selection of tokens of images."""
    first_image: int
    """Token ids from this one on are those of images."""
    table: HashRouter | None = None
    """What chooses the experts of text by token id; None: scores with the layer's bias do."""

    def of(self, token_ids_T: Tensor) -> HashedTokens:
        return HashedTokens(self, token_ids_T)

    def route(self, router_logits: Tensor, token_ids_T: Tensor, bias_E: Tensor | None = None) -> Routing:
        """Route every token as text and as part of an image, and keep what it is. Raises as `HashRouter.route`."""
        expect("token_ids", token_ids_T, "T", IDS, router_logits.device, T=router_logits.shape[0])
        is_image_T = token_ids_T >= self.first_image
        images = self.scores(router_logits, self.image_bias_E)
        if self.table is None:
            text = self.scores(router_logits, bias_E)
        else:
            text = self.table.route(router_logits, token_ids_T.masked_fill(is_image_T, 0))
        ids_TK = torch.where(is_image_T[:, None], images.ids_TK, text.ids_TK)
        return Routing(ids_TK, torch.where(is_image_T[:, None], images.weights_TK, text.weights_TK))

    def check(self, token_ids_T: Tensor) -> None:
        """Raise ConfigError for tokens of text that the table does not have; waits for the device."""
        if self.table is not None:
            self.table.check(token_ids_T.masked_fill(token_ids_T >= self.first_image, 0))


@dataclass(frozen=True)
class HashedTokens:
    """A layer's router for one batch of known tokens."""

    router: HashRouter | ImageRouter
    token_ids_T: Tensor

    def __call__(self, router_logits: Tensor, e_score_correction_bias: Tensor | None = None) -> Routing:
        """Route; raises ShapeError where a bias is given, which a fixed choice cannot heed."""
        if isinstance(self.router, ImageRouter):
            return self.router.route(router_logits, self.token_ids_T, e_score_correction_bias)
        if e_score_correction_bias is not None:
            raise ShapeError("experts are chosen by token id, so an e_score_correction_bias has no part in it; drop it")
        return self.router.route(router_logits, self.token_ids_T)
