"""Rollout routing replay (R3): keep which experts a layer chose, and run it again with the same experts.

    capture = RoutingCapture(layers=58, num_experts=256, top_k=8, max_num_tokens=8192)
    with capture.listening({number: layer for number, layer in enumerate(layers)}):
        ...                                    # forwards of the rollout
        ids_TXK = capture.take()               # uint8 or uint16, (tokens, layers, K)

    layer.forward_replayed(x_TH, ids_TXK[:, 3])               # inference: ids fixed, weights of the live gate
    training_layer(x_TH, replay=ids_TXK[:, 3]).y_TH           # the same with gradients
    layer.forward_replayed(x_TH, Routing(ids_TK, weights_TK)) # ids and weights as recorded

With ids alone, groups and the correction bias have no part: both only choose. The scores of the recorded experts are
those of the live logits, renormalised among the recorded experts and scaled, so that their gradient reaches the gate.
Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv 2510.11370; the layout (tokens, layers, K) is that of vLLM's `routed_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import addressof
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError, UnsupportedError, expect_kind
from moe_mk.kernels import native
from moe_mk.kernels.reference.topk import exact_scores, expert_scores, weigh
from moe_mk.router.router import Router
from moe_mk.router.topk import FLOATS
from moe_mk.shapes import expect
from moe_mk.tokens import Routing

UNSIGNED = {torch.uint8: 2**8 - 1, torch.uint16: 2**16 - 1}
"""Dtypes of captured ids, and the value that stands for an assignment of no expert, if no expert has that number."""
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def capture_dtype(num_experts: int) -> torch.dtype:
    """The narrowest unsigned dtype for ids of this many experts and one more value for none. Raises ConfigError."""
    for dtype, none in UNSIGNED.items():
        if 1 <= num_experts <= none:
            return dtype
    raise ConfigError(f"num_experts={num_experts} is outside [1, {UNSIGNED[torch.uint16]}], what uint16 ids can hold")


def recorded_ids(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Recorded ids as int64 with -1 for none: of signed dtypes as they are, of unsigned ones by `UNSIGNED`.

    Ids are read on the host. Raises ShapeError for a dtype that cannot hold all experts, and for experts that do not
    exist: ids of physical experts, of another model, or wrapped by a narrower dtype.
    """
    none = UNSIGNED.get(ids_TK.dtype)
    if none is not None and num_experts > none + 1:
        raise ShapeError(f"recorded ids are {ids_TK.dtype}, which cannot hold {num_experts} experts; record them wider")
    wide_TK = ids_TK.to(torch.int64)
    if none is not None and num_experts <= none:
        wide_TK = wide_TK.masked_fill(wide_TK == none, -1)
    if wide_TK.numel():
        lowest, highest = (int(each) for each in torch.aminmax(wide_TK))
        if lowest < -1 or highest >= num_experts:
            raise ShapeError(
                f"recorded ids are {lowest} to {highest}, the layer has experts 0 to {num_experts - 1}, and -1 for "
                "none; `moe-mk trace check` finds out why a record does not fit"
            )
    return wide_TK


@dataclass(frozen=True)
class ReplayedTokens:
    """A router for one call whose tokens have recorded experts: logits in, a `Routing` with these experts out."""

    router: Router
    """How live logits weigh; its groups, its top-k and a bias for selection have no part."""
    ids_TK: Tensor
    """int64; -1 for none."""
    weights_TK: Tensor | None = None
    """f32, used as they are; None: those of the live logits."""

    @classmethod
    def of(cls, router: object, recorded: Tensor | Routing, num_experts: int) -> Self:
        """recorded: ids (T, K) that live logits weigh, or a routing of which the weights are used as well.

        Reads ids on the host. Raises ConfigError for another kind of record, ShapeError for one that does not fit,
        UnsupportedError for a router of the program, which cannot weigh ids.
        """
        expect_kind("replay", recorded, Tensor, Routing)
        has_weights = isinstance(recorded, Routing)
        if not has_weights and (type(router) is not Router or router.simulate is not None):
            way = "pass a Routing with weights, or use a moe_mk.router.Router without simulate"
            raise UnsupportedError(f"{type(router).__name__} cannot weigh recorded ids", [way])
        ids_TK = recorded.ids_TK if isinstance(recorded, Routing) else recorded
        expect("recorded ids", ids_TK, "T K", (*UNSIGNED, *SIGNED))
        ids_TK, weights_TK = recorded_ids(ids_TK, num_experts), None
        if isinstance(recorded, Routing):
            num_tokens, top_k = ids_TK.shape
            sizes = {"T": num_tokens, "K": top_k}
            expect("recorded weights", recorded.weights_TK, "T K", torch.float32, ids_TK.device, **sizes)
            weights_TK = recorded.weights_TK.masked_fill(ids_TK < 0, 0.0)
        return cls(router, ids_TK, weights_TK)  # type: ignore[arg-type]

    def __call__(self, router_logits: Tensor, e_score_correction_bias: Tensor | None = None) -> Routing:
        """The recorded experts of the tokens of these logits [T, E]; a bias, which only chooses, is not used.

        Weights of logits are f32, of f64 logits f64, and have their gradient. A token with a NaN among its scores has
        ids of -1, as without replay. Raises ShapeError for other numbers of tokens.
        """
        where, num_tokens = router_logits.device, router_logits.shape[0]
        expect("router_logits", router_logits, "T E", (*FLOATS, torch.float64))
        expect("recorded ids", self.ids_TK, "T K", torch.int64, where, T=num_tokens)
        if self.weights_TK is not None:
            return Routing(self.ids_TK.to(torch.int32), self.weights_TK)
        router, is_exact = self.router, router_logits.dtype is torch.float64
        score_dtype = router_logits.dtype if router.router_dtype == "model" and not is_exact else torch.float32
        scores_TE = expert_scores(router_logits, router.scoring_func, score_dtype)
        exact_TE = exact_scores(router_logits, scores_TE, router.scoring_func, score_dtype)
        weights_TK = weigh(exact_TE, self.ids_TK, router.renormalize, router.routed_scaling_factor)
        nowhere_T1 = scores_TE.isnan().any(-1, keepdim=True)
        weights_TK = (weights_TK if is_exact else weights_TK.float()).masked_fill(nowhere_T1, 0.0)
        return Routing(self.ids_TK.masked_fill(nowhere_T1, -1).to(torch.int32), weights_TK)


class CapturedIds:
    """The choices of one layer in a `RoutingCapture`: a listener of its routing, for which a native call may write."""

    def __init__(self, ids_TK: Tensor) -> None:
        """ids_TK: uint8 or uint16, one row for each token; the last dimension is dense."""
        self._ids_TK, (room, top_k) = ids_TK, ids_TK.shape
        self.block = native.CCapture(ids_TK.data_ptr(), ids_TK.stride(0), room, 0, ids_TK.itemsize, top_k)
        self.address = addressof(self.block) if ids_TK.is_cpu else None
        """Of the block, for native calls; None on another device."""

    def expect(self, num_tokens: int, top_k: int) -> None:
        """Raise ShapeError unless so many further tokens fit."""
        if top_k != self.block.top_k:
            raise ShapeError(f"a layer routes to {top_k} experts, the capture has top_k={self.block.top_k}")
        if (end := self.block.num_tokens + num_tokens) > self.block.room:
            raise ShapeError(f"{end} tokens were captured, max_num_tokens={self.block.room}; take() before or raise it")

    def __call__(self, routing: Routing) -> None:
        """Keep the choices of one forward."""
        ids_TK, start = routing.ids_TK, self.block.num_tokens
        self.expect(*ids_TK.shape)
        if routing.input_weights_T1 is not None:
            way = "they are -1 in what a layer reports; replay ids of its router"
            raise UnsupportedError("capture of experts without weights", [way])
        self.block.num_tokens = end = start + ids_TK.shape[0]
        self._ids_TK[start:end] = ids_TK  # -1 becomes the greatest value


class RoutingCapture:
    """The ids that some layers choose, in one buffer (tokens, layers, K) of uint8 or uint16 that is made once.

    Native calls of a layer on one rank or over windows write them there; any other forward costs one copy of its ids. A
    replay of a CUDA graph calls no hook and is not captured.
    """

    def __init__(
        self, *, layers: int, num_experts: int, top_k: int, max_num_tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        """layers: number of layers; max_num_tokens: between two calls of `take`. Raises ConfigError."""
        sizes = {"layers": layers, "top_k": top_k, "max_num_tokens": max_num_tokens}
        if wrong := [f"{name}={size}" for name, size in sizes.items() if size < 1]:
            raise ConfigError(f"routing cannot be captured: {', '.join(wrong)}; each must be at least 1")
        self.dtype = capture_dtype(num_experts)
        self._ids_TXK = torch.empty((max_num_tokens, layers, top_k), dtype=self.dtype, device=device)
        self._of_layer = [CapturedIds(ids_TK) for ids_TK in self._ids_TXK.unbind(1)]

    @contextmanager
    def listening(self, layers: Mapping[int, Any]) -> Iterator[Self]:
        """Capture each `MoELayer`, by its place in the buffer, within the block. Raises ConfigError if one is taken."""
        if wrong := [place for place in layers if not 0 <= place < len(self._of_layer)]:
            raise ConfigError(f"layers {wrong} are outside [0, {len(self._of_layer)}), the places of the buffer")
        if taken := [place for place, layer in layers.items() if layer.on_routing is not None]:
            raise ConfigError(f"layers {taken} are recorded already; end that recording first")
        try:
            for place, layer in layers.items():
                layer.on_routing = self._of_layer[place]
            yield self
        finally:
            for layer in layers.values():
                layer.on_routing = None

    def take(self) -> Tensor:
        """A copy of what was captured, (tokens, layers, K), and start over. Raises ShapeError if layers differ."""
        tokens = [each.block.num_tokens for each in self._of_layer]
        if len(set(tokens)) != 1:
            raise ShapeError(f"layers have captured {tokens} tokens; call take() after whole forwards")
        taken = self._ids_TXK[: tokens[0]].clone()
        for each in self._of_layer:
            each.block.num_tokens = 0
        return taken
