"""Rows into the windows of peers and sums out of them: by kernels that write there themselves, or put with torch.

Both lay rows out alike, bit for bit, so that ranks of one group may differ. What they need of a transport:

    send      write values [Q] and tails [scales | ids | weights] of each token to each rank it visits, then a flag
    receive   the rows of all sources one behind the other, as they lie in the own window
    add_up    the sums of each rank to their tokens, rank after rank from zero in f32, rounded once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.kernels.native.exchange import Rounding, RowFormat
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.one_sided_lane import Lane
from moe_mk.prepare_finalize.one_sided_sum import add_up
from moe_mk.prepare_finalize.packing import ID_BYTES, WEIGHT_BYTES
from moe_mk.quant.blocked import BlockedScheme
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.tensor import QuantTensor
from moe_mk.quant.wire import as_bytes, from_bytes, row_bytes
from moe_mk.tokens import Routing

Sent = tuple[Tensor, ...] | None
"""The tokens sent to each rank, ascending; None: kernels keep them in their lane."""
Arrived = tuple[Tensor, Tensor, Tensor, Tensor]
"""Values (R, bytes) and scales (R, bytes) uint8, ids (R, K) int32, weights (R, K) f32."""
GROUP = 128


@dataclass(frozen=True)
class RowBytes:
    """The parts of a row in bytes."""

    values: int
    scales: int
    top_k: int

    @classmethod
    def of(cls, context: TransportContext) -> RowBytes:
        """Of the wire scheme of a transport."""
        hidden, wire = context.hidden_size, context.wire
        whole = row_bytes(wire, hidden)
        if not isinstance(wire, BlockedScheme):
            return cls(whole, 0, context.top_k)
        values = wire.value_shape(1, hidden)[1] * wire.element.dtype.itemsize
        return cls(values, whole - values, context.top_k)

    @property
    def tail(self) -> int:
        """Scales, ids and weights."""
        return self.scales + self.top_k * (ID_BYTES + WEIGHT_BYTES)


class PutRows:
    """Gathered and put with torch operations; for every heap."""

    def __init__(self, context: TransportContext, size: RowBytes) -> None:
        self._context, self._size = context, size

    def send(self, lane: Lane, x_TH: QuantTensor | Tensor, routing: Routing) -> tuple[Sent, list[int]]:
        """Put values and tails at every peer, and the own rows where they are read. Returns counts by rank, too."""
        assert isinstance(x_TH, QuantTensor), "only kernels round on the way"
        values_TB = as_bytes(x_TH.values)
        token_of_W, tail_of_W = self._sorted_by_rank(x_TH, routing)
        counts = list(map(len, token_of_W))
        for rank, token_X in enumerate(token_of_W):
            at = lane.out_at(rank, len(token_X))
            everything = len(token_X) == len(values_TB)  # token_X ascends, each token once
            if rank == lane.rank:
                torch.index_select(values_TB, 0, token_X, out=lane.own_values(at, len(token_X)))
                lane.heap.reserve(rank, lane.tails_at(rank), tail_of_W[rank].numel())
                lane.own_tails(rank, len(token_X)).copy_(tail_of_W[rank])
                continue
            lane.heap.put(rank, at, values_TB, None if everything else token_X)
            lane.heap.put(rank, lane.tails_at(lane.rank), tail_of_W[rank])
            lane.show_rows(rank, len(token_X))
        return token_of_W, counts

    def receive(self, lane: Lane, counts: Sequence[int]) -> Arrived:
        """Copy what lies apart to its place; values are those of the window."""
        values_RB = lane.own_values(lane.region.rows_at(lane.size, lane.rank, counts), sum(counts))
        for source, rows_XB in enumerate(torch.split(values_RB, list(counts))):
            there_XB = lane.own_values(lane.in_at(source, counts[source]), counts[source])
            if there_XB.data_ptr() != rows_XB.data_ptr():
                rows_XB.copy_(there_XB)
        tails_RB = torch.cat([lane.own_tails(source, count) for source, count in enumerate(counts)])
        ids_at, weights_at = self._size.scales, self._size.scales + self._size.top_k * ID_BYTES
        ids_RK = from_bytes(tails_RB[:, ids_at:weights_at], torch.int32)
        return values_RB, tails_RB[:, :ids_at], ids_RK, from_bytes(tails_RB[:, weights_at:], torch.float32)

    def add_up(self, lane: Lane, sent: Sent, firsts: Mapping[int, int], own_XH: Tensor, num_tokens: int) -> Tensor:
        """Read the sums of every rank where they lie. firsts: the number of the first one, by peer."""
        assert isinstance(sent, tuple)
        parts = [
            lane.sums_of(rank, firsts[rank], len(token_X)).view(own_XH.dtype) if rank in firsts else own_XH
            for rank, token_X in enumerate(sent)
        ]
        return add_up(parts, sent, num_tokens)

    def _sorted_by_rank(self, x_TH: QuantTensor, routing: Routing) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """For each rank its tokens, ascending, and the tails of their rows. Assignments elsewhere become -1 there."""
        c = self._context
        expert_TK = routing.ids_TK.clamp_min(0).long()
        rank_TK = torch.where(routing.ids_TK >= 0, c.tables.rank_of_P[expert_TK], -1)
        ranks_W = torch.arange(c.comm.size, dtype=rank_TK.dtype, device=rank_TK.device)
        there_WTK = rank_TK == ranks_W[:, None, None]
        peer_X, token_X = torch.nonzero(there_WTK.any(dim=2), as_tuple=True)
        there_XK = there_WTK[peer_X, token_X]
        slots_XK = torch.where(there_XK, c.tables.slot_of_P[expert_TK][token_X], -1).to(torch.int32)
        weights_XK = torch.where(there_XK, routing.weights_TK[token_X], 0.0).to(torch.float32)
        scales = () if x_TH.scales is None or not self._size.scales else (as_bytes(x_TH.scales)[token_X],)
        tails_XB = torch.cat((*scales, as_bytes(slots_XK), as_bytes(weights_XK)), dim=1)
        sizes = torch.bincount(peer_X, minlength=c.comm.size).tolist()
        return torch.split(token_X, sizes), torch.split(tails_XB, sizes)


class KernelRows:
    """Written into windows by native kernels, which round FP8 rows on the way; their lane knows what was sent."""

    def __init__(self, context: TransportContext, size: RowBytes) -> None:
        self._size = size
        self._form = RowFormat(size.values, size.scales, size.top_k)
        self._rounding = RowFormat(size.values, size.scales, size.top_k, rounding_of(context))
        tables = context.tables
        self._tables = tables.rank_of_P.to(torch.int32).contiguous(), tables.slot_of_P.to(torch.int32).contiguous()

    @property
    def rounds(self) -> bool:
        """Whether `send` takes rows as they are and brings them into the wire scheme."""
        return self._rounding.rounding is not Rounding.NONE

    def send(self, lane: Lane, x_TH: QuantTensor | Tensor, routing: Routing) -> tuple[Sent, list[int]]:
        """Write all rows in one call, the own ones where they are read, then a flag a peer."""
        assert lane.exchange is not None
        dense = routing.ids_TK.to(torch.int32).contiguous(), routing.weights_TK.to(torch.float32).contiguous()
        form, x = (self._rounding, (x_TH, None)) if isinstance(x_TH, Tensor) else (self._form, self._parts(x_TH))
        while (counts := lane.exchange.dispatch(form, x, dense, self._tables, lane.epoch)) is None:
            lane.make_room([*lane.exchange.counts])
        return None, counts

    def receive(self, lane: Lane, counts: Sequence[int]) -> Arrived:
        """Take tails apart; values are those of the window, copied to their place where they lie apart."""
        assert lane.exchange is not None
        region, total = lane.region, sum(counts)
        begin = region.rows_at(lane.size, lane.rank, counts)
        if lane.size > 2:  # others than the two whose rows meet at the seam
            seam_at, end = region.seam_at(lane.size, lane.rank), begin + total * region.value_bytes
            lane.take_pages("below", lane.rank, begin, seam_at - begin)
            lane.take_pages("above", lane.rank, seam_at, end - seam_at)
        apart = lane.exchange.receive(self._form, counts, lane.heap.address(lane.rank, begin))
        return lane.received(begin, total), *apart

    def add_up(self, lane: Lane, sent: Sent, firsts: Mapping[int, int], own_XH: Tensor, num_tokens: int) -> Tensor:
        """Add the sums of every rank where they lie."""
        assert sent is None and lane.exchange is not None
        first_of_W = [firsts.get(rank, 0) for rank in range(lane.size)]
        return lane.exchange.add_up(first_of_W, own_XH.data_ptr(), num_tokens, own_XH.shape[1], own_XH.dtype)

    def _parts(self, x_TH: QuantTensor) -> tuple[Tensor, Tensor | None]:
        values_TX = x_TH.values if x_TH.values.stride(1) == 1 else x_TH.values.contiguous()
        scales_TX = None if x_TH.scales is None or not self._size.scales else x_TH.scales.contiguous()
        return values_TX, scales_TX


def rounding_of(context: TransportContext) -> Rounding:
    """What the kernels can make of rows on their way: FP8 by groups of 128 of a token."""
    wire = context.wire
    if not isinstance(wire, Fp8Block) or wire.block != (1, GROUP):
        return Rounding.NONE
    return Rounding.FP8_UE8M0 if wire.ue8m0 else Rounding.FP8
