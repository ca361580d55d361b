"""Sequence parallelism around a MoE layer: ranks that have the same tokens each carry a share of them, then all gather.

    x_TH on every rank -> chunk -> dispatch, experts, combine, late all-reduce of the chunk -> all-gather -> y_TH

Tensor-parallel attention leaves the same tokens on all its ranks; without chunks each of them would be computed once a
rank. Chunks are ceil(T / ranks) rows, the last ones shorter or empty: rows are padded where they are gathered, never
where they are computed. Source of the scheme: vLLM, `sequence_parallel_chunk` around its MoE runner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from moe_mk.comm.collective import CallGroups, collective
from moe_mk.comm.communicator import Communicator, offsets
from moe_mk.comm.groups import Absent, Group, communicator
from moe_mk.errors import expect_kind
from moe_mk.flight import Flight, wait
from moe_mk.layer.checks import check_hidden_states
from moe_mk.layer.module_habits import WithoutParameters
from moe_mk.layer.moe_layer import MoELayer


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


class SequenceParallelMoE(nn.Module):
    """A layer on chunks of the tokens that the ranks of `group` have in common.

    Those ranks bring the same (T, H) and get the same (T, H); T may differ between groups and may be zero. The layer's
    own groups are not touched: its EP ranks usually are those of several such groups, with parallel.tokens = sharded.
    """

    def __init__(self, layer: MoELayer, group: Group | Absent | None) -> None:
        """Raises ConfigError for None and for what is no group."""
        super().__init__()
        expect_kind("layer", layer, WithoutParameters)
        self.layer = layer
        self.comm = communicator(group, timeout_s=layer.config.kernel.timeout_s, layer=layer.name)
        self.groups = CallGroups(self.comm)

    def forward(self, hidden_states: Tensor, token_ids_T: Tensor | None = None) -> Tensor:
        """(T, H) to (T, H), the same on every rank of the group.

        token_ids_T: of all T tokens; needed where they choose the experts, else without effect.
        """
        return wait(self.steps(hidden_states, token_ids_T))

    @collective(lambda moe: moe.groups, recovers=True)
    def recover(self) -> None:
        """Resume after a call failed on some rank, see `MoELayer.recover`; all ranks of all groups call it."""
        grid = self.layer.state.experts.grid
        self.layer.recover()
        if self.comm.status not in (grid.ep.status, grid.tp.status):
            wait(self.groups.recover())

    @collective(lambda moe, *_, **__: moe.groups)
    def steps(self, x_TH: Tensor, token_ids_T: Tensor | None = None) -> Flight[Tensor]:
        """The forward as a flight. Invalid tokens or ids are refused here, on every rank."""
        layer, model, limits = self.layer, self.layer.config.model, self.layer.config.kernel
        most = limits.max_num_tokens * self.comm.size
        check_hidden_states(x_TH, layer.dtype, layer.device, model.hidden_size, most)
        layer.routing.check_token_ids(x_TH, token_ids_T)
        own = chunk_of(x_TH.shape[0], self.comm.size, self.comm.rank)
        by_id = layer.routing.hash_router is not None
        own_ids = token_ids_T[own] if by_id and token_ids_T is not None else None
        x_TH, run = x_TH.contiguous(), partial(layer.steps, token_ids_T=own_ids)
        return (yield from sequence_parallel(x_TH, self.comm, run))
