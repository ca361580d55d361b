"""Writes rows into the windows of peers and reads sums from them with torch operations.

`transport.KernelRows` does the same with native kernels that write there directly. Both use the same layout, bit for
bit, so ranks of one group may differ. The steps of a call in either:

    send      write values [Q] and tails [scales | ids | weights] of each token to each of its ranks, then a flag
    arrived   wait for the flags of all peers
    receive   the rows of all sources one after the other, in the own window
    add_up    wait for the sums of all peers, then add those of each rank to their tokens, in rank order from zero in
              f32, rounded once
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_mk.comm.communicator import offsets
from moe_mk.kernels.native.exchange import ready
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.one_sided.buffers import OneSidedBufferSlot
from moe_mk.prepare_finalize.packing import ID_BYTES
from moe_mk.prepare_finalize.rows.formats import Encode, RowBytes, WireTypes
from moe_mk.prepare_finalize.rows.sums import Part, add_up
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.quant.wire import as_bytes, from_bytes
from moe_mk.tokens import Routing

Sent = tuple[Tensor, ...] | None
"""The tokens sent to each rank, ascending; None: kernels keep them in their buffer."""
Arrived = tuple[QuantTensor, Tensor, Tensor, Tensor]
"""Rows, ids (R, K) int32, weights (R, K) f32, and where the sums of the rows go."""


class DispatchHandle(NamedTuple):
    """How the sums of one dispatch find back."""

    buffer: OneSidedBufferSlot
    epoch: int
    sent: Sent
    """The tokens sent to each rank, ascending."""
    sent_W: list[int]
    received_W: list[int]
    num_tokens: int
    sums_RH: Tensor
    """This rank's sums as peers read them."""


class PutRows:
    """Gathered and put with torch operations; for every heap."""

    def __init__(self, context: TransportContext, size: RowBytes) -> None:
        self._context, self._size, self._types = context, size, WireTypes.of(context.wire)

    def send(
        self, buffer: OneSidedBufferSlot, x_TH: Tensor, routing: Routing, encode: Encode
    ) -> tuple[Sent, list[int]]:
        """Put values and tails at every peer, and the own rows where they are read. Returns counts by rank, too."""
        wire = self._context.wire
        as_it_is = isinstance(wire, Plain) and x_TH.dtype == wire.dtype
        x = QuantTensor(x_TH, None, wire) if as_it_is else encode(x_TH)
        values_TB = as_bytes(x.values)
        token_of_W, tail_of_W = self._sorted_by_rank(x, routing)
        counts = list(map(len, token_of_W))
        for rank, token_X in enumerate(token_of_W):
            at = buffer.out_at(rank, len(token_X))
            everything = len(token_X) == len(values_TB)  # token_X ascends, each token once
            if rank == buffer.rank:
                torch.index_select(values_TB, 0, token_X, out=buffer.own_values(at, len(token_X)))
                buffer.heap.reserve(rank, buffer.tails_at(rank), tail_of_W[rank].numel())
                buffer.own_tails(rank, len(token_X)).copy_(tail_of_W[rank])
                continue
            buffer.heap.put(rank, at, values_TB, None if everything else token_X)
            buffer.heap.put(rank, buffer.tails_at(buffer.rank), tail_of_W[rank])
            buffer.show_rows(rank, len(token_X))
        return token_of_W, counts

    def arrived(self, buffer: OneSidedBufferSlot, sent_W: list[int]) -> list[int]:
        counts = buffer.await_rows() | {buffer.rank: sent_W[buffer.rank]}
        return [counts[rank] for rank in range(buffer.size)]

    def receive(self, buffer: OneSidedBufferSlot, received_W: list[int]) -> Arrived:
        """Copy rows of the separate regions to their place; values are those of the window."""
        total = sum(received_W)
        values_RB = buffer.own_values(buffer.region.rows_at(buffer.size, buffer.rank, received_W), total)
        for source, rows_XB in enumerate(torch.split(values_RB, received_W)):
            there_XB = buffer.own_values(buffer.in_at(source, received_W[source]), received_W[source])
            if there_XB.data_ptr() != rows_XB.data_ptr():
                rows_XB.copy_(there_XB)
        tails_RB = torch.cat([buffer.own_tails(source, count) for source, count in enumerate(received_W)])
        ids_at, weights_at = self._size.scales, self._size.scales + self._size.top_k * ID_BYTES
        ids_RK = from_bytes(tails_RB[:, ids_at:weights_at], torch.int32)  # of a copy: peers cannot change it any more
        buffer.check_slots(ids_RK, received_W, self._context.num_slots)
        weights_RK = from_bytes(tails_RB[:, weights_at:], torch.float32)
        scales = self._types.scales
        scales_RX = None if scales is None else from_bytes(tails_RB[:, :ids_at], scales)
        x_RH = QuantTensor(values_RB.view(self._types.values), scales_RX, self._context.wire)
        return x_RH, ids_RK, weights_RK, buffer.own_sums(total).view(self._context.dtype.dtype)

    def show(self, handle: DispatchHandle) -> None:
        """Signal every peer that the sums of its rows are written."""
        first_of_W = offsets(handle.received_W)
        for peer in handle.buffer.peers:
            handle.buffer.show_sums(peer, first_of_W[peer])

    def add_up(self, handle: DispatchHandle, y_RH: Tensor, own: slice) -> Tensor:
        """Read the sums of every rank where they lie, the own ones among y_RH."""
        buffer, sent = handle.buffer, handle.sent
        assert sent is not None
        firsts = buffer.await_sums()
        own_XH = y_RH[own].to(self._context.dtype.dtype).contiguous()
        sums = [
            buffer.sums_of(rank, firsts[rank], len(token_X)).view(own_XH.dtype) if rank in firsts else own_XH
            for rank, token_X in enumerate(sent)
        ]
        parts = [Part(*each) for each in zip(sums, sent, strict=True)]
        y_TH = torch.empty((handle.num_tokens, own_XH.shape[1]), dtype=own_XH.dtype, device=own_XH.device)
        return add_up([parts], y_TH, ready())

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
