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


def chunk_of(num_tokens: int, ranks: int, rank: int) -> slice:
    """The rows of one rank; what belongs to the tokens is cut as they are."""
    starts = offsets(chunk_sizes(num_tokens, ranks))
    return slice(starts[rank], starts[rank + 1])


def sequence_parallel(x_TH: Tensor, comm: Communicator, run: Callable[[Tensor], Flight[Tensor]]) -> Flight[Tensor]:
    """Run this rank's chunk of (T, H) and gather those of all ranks of `comm`, which must bring the same tokens."""
    num_tokens = x_TH.shape[0]
    y_XH = yield from run(x_TH[chunk_of(num_tokens, comm.size, comm.rank)])
    return (yield from comm.all_gather(y_XH, chunk_sizes(num_tokens, comm.size), "sequence gather"))
