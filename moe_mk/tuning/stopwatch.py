"""Times of experts with one choice of parameters beside those with another, on the same rows."""

from __future__ import annotations

from functools import partial

import torch

from moe_mk.config.tuned import Candidate
from moe_mk.experts.base import FusedExperts
from moe_mk.external.device import synchronize
from moe_mk.permute import permute
from moe_mk.tokens import RowTokens, Tokens
from moe_mk.trace.clock import now
from moe_mk.tuning.judge import Rounds, compare
from moe_mk.tuning.space import Space, threads_of
from moe_mk.weights.expert_weights import Weights


class Stopwatch:
    """Runs one backend on random rows of one number of tokens."""

    def __init__(self, experts: FusedExperts, weights: Weights, space: Space, tokens: int, top_k: int) -> None:
        self.experts, self.weights, self.space = experts, weights, space
        self._rows = _rows(experts, tokens, top_k)

    def beside(self, built_in: Candidate, candidate: Candidate, *, whole: bool = False) -> Rounds:
        """Rounds of both, after one run each that warms up."""
        runs = []
        for parameters in (built_in, candidate):
            tuned = self.space.apply(self.experts, parameters)
            self.microseconds(tuned, parameters)
            runs.append(partial(self.microseconds, tuned, parameters))
        return compare(*runs, whole=whole)

    def microseconds(self, tuned: FusedExperts, parameters: Candidate) -> float:
        """One run. Threads that were just started or stopped are warmed up first."""
        with threads_of(parameters, self.space), torch.no_grad():
            if self.space.threads_only:
                tuned.run(self._rows, self.weights)
            synchronize(tuned.context.device)
            start = now()
            tuned.run(self._rows, self.weights)
            synchronize(tuned.context.device)
            return (now() - start) * 1e6


def _rows(experts: FusedExperts, count: int, top_k: int) -> Tokens:
    """Random tokens, each with top_k different experts, in the layout the backend likes best."""
    c, draw = experts.context, torch.Generator("cpu").manual_seed(count)
    x_RH = torch.randn((count, c.hidden_size), generator=draw, dtype=torch.float32, device="cpu")
    scores = torch.rand((count, c.num_slots), generator=draw, dtype=torch.float32, device="cpu")
    ids_RK = scores.argsort(dim=1)[:, :top_k].to(torch.int32)
    weights_RK = torch.full(ids_RK.shape, 1.0 / top_k, dtype=torch.float32, device=c.device)
    x = c.dtype.quantize(x_RH.to(c.device, c.dtype.dtype))
    rows = RowTokens(x, ids_RK.to(c.device), weights_RK, c.num_slots)
    return permute(rows, experts.traits.consumes)
