"""A small trace by hand, and random ones."""

import numpy as np
import torch

from moe_mk.lab.trace.routing import RoutingTrace, TracedForward, TraceFacts


def by_hand() -> RoutingTrace:
    """Two layers, two ranks, one prefill step and one decode step in which rank 1 has no tokens. E=4, K=2."""
    facts = TraceFacts(num_experts=4, top_k=2, num_groups=2, num_ranks=2, model="toy")

    def ids(*rows: tuple[int, int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)

    def forward(step: int, layer: int, rank: int, rows: torch.Tensor) -> TracedForward:
        weights = torch.where(rows >= 0, torch.tensor([0.625, 0.375]), torch.tensor(0.0))
        tokens = torch.arange(len(rows)) + 100 * rank + 7 * step
        return TracedForward(step, layer, rank, "decode" if step else "prefill", rows, weights, tokens)

    return RoutingTrace.of(
        facts,
        [
            forward(0, 3, 0, ids((0, 1), (0, 3))),
            forward(0, 3, 1, ids((2, -1))),
            forward(0, 5, 0, ids((3, 2), (3, 1))),
            forward(0, 5, 1, ids((3, 0))),
            forward(1, 3, 0, ids((0, 2))),
            forward(1, 3, 1, ids()),
        ],
    )


def drawn(
    num_experts: int, top_k: int, *, layers: int = 2, steps: int = 3, ranks: int = 2, seed: int = 0, holes: bool = True
) -> RoutingTrace:
    """Random ids without repetition in a row, random weights, uneven and empty forwards."""
    draw = torch.Generator().manual_seed(seed)
    forwards = []
    for step in range(steps):
        for rank in range(ranks):
            tokens = int(torch.randint(0, 9, (), generator=draw))
            for layer in range(layers):
                ids_TK = torch.rand(tokens, num_experts, generator=draw).topk(top_k).indices
                if holes:
                    ids_TK[torch.rand(tokens, top_k, generator=draw) < 0.2] = -1
                weights_TK = torch.rand(tokens, top_k, generator=draw)
                forwards.append(TracedForward(step, layer, rank, "prefill", ids_TK, weights_TK))
    return RoutingTrace.of(TraceFacts(num_experts, top_k, num_ranks=ranks), forwards)


def group_limited(
    *, experts: int, groups: int, kept: int, top_k: int, layers: int, steps: int, tokens: int, ranks: int = 1
) -> RoutingTrace:
    """Group-limited routing with hot experts: the best `kept` groups by their two best experts. E.g. 4 of 8."""
    draw, forwards = np.random.default_rng(7), []
    hot = draw.lognormal(0.0, 0.7, (layers, experts))
    hot *= np.repeat(draw.lognormal(0.0, 0.1, (layers, groups)), experts // groups, axis=1)
    for step in range(steps):
        for rank in range(ranks):
            for layer in range(layers):
                score = np.log(hot[layer]) + draw.gumbel(size=(tokens, experts))
                best = np.sort(score.reshape(tokens, groups, -1), 2)[:, :, -2:].sum(2)
                chosen = best >= np.sort(best, 1)[:, -kept, None]
                score = np.where(np.repeat(chosen, experts // groups, axis=1), score, -np.inf)
                ids_TK = torch.from_numpy(np.argsort(-score, 1)[:, :top_k])
                forwards.append(TracedForward(step, 3 + layer, rank, "decode" if step else "prefill", ids_TK))
    return RoutingTrace.of(TraceFacts(experts, top_k, groups, ranks), forwards)


def equal(one: RoutingTrace, other: RoutingTrace) -> bool:
    """To the bit, dtypes and facts included."""
    names = ("step_X", "layer_X", "rank_X", "phase_X", "tokens_X", "ids_RK", "weights_RK", "token_ids_R")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return one.facts == other.facts and all(
        a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in pairs
    )
