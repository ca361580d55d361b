"""One recorded forward of one layer on one rank, and the router that replays such forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.rebalance.load import Phase
from moe_mk.tokens import Routing

MOST = 2**16
"""Experts, and ranks, that a trace may speak of: tables of them are made before a single token is looked at."""


class TraceError(MoEMKError, ValueError):
    """A routing trace that is damaged, foreign, or does not fit what it is replayed into."""


@dataclass(frozen=True)
class TraceFacts:
    """Sizes that hold for a whole trace."""

    num_experts: int
    """E, logical."""
    top_k: int
    """K, the width of every row; a token with fewer experts has -1 in the rest."""
    num_groups: int = 1
    """Groups of experts that routing keeps together."""
    num_ranks: int = 1
    """W, the ranks that brought tokens of their own."""
    model: str = ""

    def problems(self) -> list[str]:
        """Why no trace can have these."""
        numbers = {name: getattr(self, name) for name in ("num_experts", "top_k", "num_groups", "num_ranks")}
        wrong = [
            f"{name} is a {type(value).__name__}, expected a whole number"
            for name, value in numbers.items()
            if not isinstance(value, Integral) or isinstance(value, bool)
        ]
        wrong += [] if isinstance(self.model, str) else [f"model is a {type(self.model).__name__}, expected a text"]
        if wrong:
            return wrong
        wrong = [f"{name}={value} is below 1" for name, value in numbers.items() if value < 1]
        wrong += [f"{name} is above {MOST}" for name, value in numbers.items() if value > MOST]
        if not wrong and self.top_k > self.num_experts:
            wrong.append(f"top_k={self.top_k} is above num_experts={self.num_experts}")
        if not wrong and self.num_experts % self.num_groups:
            wrong.append(f"num_experts={self.num_experts} does not divide into {self.num_groups} groups")
        return wrong


@dataclass(frozen=True)
class TracedForward:
    """One layer's call on one rank. The tensors of one that was taken from a trace are views of it."""

    step: int
    layer: int
    rank: int
    phase: Phase
    ids_TK: Tensor
    """Logical experts; -1 goes nowhere."""
    weights_TK: Tensor | None = None
    """f32, or None if not recorded."""
    token_ids_T: Tensor | None = None
    """The vocabulary's numbers of the tokens, where they were known."""

    def routing(self, device: torch.device | str = "cpu") -> Routing:
        """The recorded routing. Without recorded weights all experts of a token have equal weights."""
        ids_TK = self.ids_TK.to(device=device, dtype=torch.int32)
        if self.weights_TK is not None:
            return Routing(ids_TK, self.weights_TK.to(device))
        there_TK = (ids_TK >= 0).to(torch.float32)
        return Routing(ids_TK, there_TK / there_TK.sum(1, keepdim=True).clamp_min(1.0))


class ReplayRouter:
    """Routes as was recorded, whatever the logits say. Raises TraceError when a forward does not fit, or none is left.

    Set it as a layer's `router`, or call it for a layer that is given its routing.
    """

    def __init__(self, forwards: Sequence[TracedForward], layer: int, rank: int) -> None:
        self.forwards, self.layer, self.rank = tuple(forwards), layer, rank
        self.position = 0
        """Number of replayed forwards."""

    def __call__(self, router_logits: Tensor, e_score_correction_bias: Tensor | None = None) -> Routing:
        """The next recorded routing, on the device of the logits, of which only the number of rows is read."""
        where = f"layer {self.layer} on rank {self.rank}"
        if self.position == len(self.forwards):
            raise TraceError(f"the trace holds {self.position} forwards of {where}, and all of them were replayed")
        routing = self.forwards[self.position].routing(router_logits.device)
        if routing.num_tokens != router_logits.shape[0]:
            raise TraceError(
                f"forward {self.position} of {where} had {routing.num_tokens} tokens, now come {router_logits.shape[0]}"
            )
        self.position += 1
        return routing
