"""Sequence parallelism around a MoE layer: ranks that have the same tokens each carry a share of them, then all gather.

    x_TH on every rank -> chunk -> dispatch, experts, combine, late all-reduce of the chunk -> all-gather -> y_TH

Tensor-parallel attention leaves the same tokens on all its ranks; without chunks each of them would be computed once a
rank. Chunks are ceil(T / ranks) rows, the last ones shorter or empty: rows are padded where they are gathered, never
where they are computed. Source of the scheme: vLLM, `sequence_parallel_chunk` around its MoE runner.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe_mk.comm.communicator import Communicator, offsets
from moe_mk.flight import Flight


def chunk_sizes(num_tokens: int, ranks: int) -> list[int]:
    """Tokens of each rank: 7 over 4 ranks are 2, 2, 2, 1."""
    longest = -(-num_tokens // ranks)
    return [max(min(longest, num_tokens - rank * longest), 0) for rank in range(ranks)]


def sequence_parallel(x_TH: Tensor, comm: Communicator, run: Callable[[Tensor], Flight[Tensor]]) -> Flight[Tensor]:
    """Run this rank's chunk of (T, H) and gather those of all ranks of `comm`, which must bring the same tokens."""
    sizes = chunk_sizes(x_TH.shape[0], comm.size)
    starts = offsets(sizes)
    y_XH = yield from run(x_TH[starts[comm.rank] : starts[comm.rank + 1]])
    return (yield from comm.all_gather(y_XH, sizes, "sequence gather"))
