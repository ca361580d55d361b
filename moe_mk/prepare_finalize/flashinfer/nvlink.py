"""Transports of FlashInfer inside one NVLink domain: `nvlink_one_sided` and `nvlink_two_sided`.

One-sided: ranks of one NVLink domain write rows into each other's workspace and read sums back.

The choice inside one NVLink domain for every batch size; an NVL72 rack is one node of 72 ranks.

    dispatch   values, scales, ids and weights of a token go once to each rank of its experts
    arrival    (R, M) windows, the rows of each source at the front of its window, in any order
    combine    each rank reads the rows of its tokens from all peers and adds them up in f32

An id finds its rank by division, so -1 would be rank 0: the ids that route repeat another of their token, or name this
rank, and the ids that travel as a payload say -1. Top-k is filled up to one that the kernels are built for.
Workspaces are made with `enable_rank_mask` where the build knows it, and every call brings an `active_rank_mask`.
Library API read at 0.6.18 and 0.7.2. Since 0.7.1 the library advises `flashinfer.moe_ep` in place of MoeAlltoAll, see
`moe_ep_one_sided`.

Two-sided: rows are pushed through FIFOs that the receiver empties.

The choice where memory must not grow with tokens: the FIFOs are as large for one token as for ten thousand.

    prepare    ids and weights are exchanged, and every rank learns what it will get
    dispatch   values, then scales: a token goes once to each rank of its experts
    arrival    rows of all sources one behind the other, those of a source in any order; the rest is padding
    combine    a sum from each rank into one of the K places of its token, then a sum over K

An id finds its rank by division and an id above all slots means no rank: -1 becomes that. The library wants slots in
multiples of four and rows in multiples of 16 bytes: numbers and rows are filled up. It keeps one pair of workspaces a
process, so that a process can serve one group. It has no rank mask, so that `leave_out` raises UnsupportedError.
Library API read at 0.6.18 and 0.7.2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem
from moe_mk.errors import UnsupportedError
from moe_mk.external.library import load
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.buffers import MAX_OPEN_CALLS, LibraryBufferSlot, LibrarySession, SlotHandle
from moe_mk.prepare_finalize.deepep.common import (
    ROW_ALIGNMENT,
    Call,
    SlotTransport,
    UniformExpertIds,
    payloads_of,
    rows_of,
)
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant.wire import row_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens

LIBRARY = "flashinfer"
DOMAIN = TransportTraits(
    summary="",
    kinds=frozenset({"cuda"}),
    min_arch=(9, 0),
    library=LIBRARY,
    extra="pip install 'moe-mk[flashinfer]'",
    produces=RowTokens,
    wants=OutputStage.REDUCED,
    wire=TransportTraits.ANY_WIRE,
    min_ranks=2,
    one_node=True,
    blocking=True,
    graph_safe=True,
    deterministic=False,
)
"""What both have in common: ranks of one NVLink domain, rows in any format, in no particular order."""


def domain_of(context: TransportContext) -> tuple[Any, Any]:
    """Mapping and MnnvlConfig of the group. Raises LibraryMissing where neither library nor emulation may be used.

    Expert-parallel ranks are the library's tensor-parallel ones too: its two-sided workspaces are sized by those.
    """
    comm = load("flashinfer.comm", allow_emulated=context.allow_emulated)
    mnnvl = load("flashinfer.comm.mnnvl", allow_emulated=context.allow_emulated)
    ranks, per_node = context.comm.size, context.ranks_per_node or context.comm.size
    mapping = comm.Mapping(ranks, context.comm.rank, per_node, tp_size=ranks, moe_ep_size=ranks)
    return mapping, mnnvl.MnnvlConfig(comm_backend=mnnvl.TorchDistBackend(context.comm.library_group()))


def rank_mask(left_out: Collection[int], size: int) -> Tensor:
    """The ranks that take part, as `moe_a2a_active_rank_mask` of the library makes it: the bits of a uint64."""
    bits = sum(1 << rank for rank in range(size) if rank not in left_out)
    return torch.tensor([bits], dtype=torch.uint64, device="cpu")


def leave_out_once(session: LibrarySession[Any], active: Sequence[bool]) -> None:
    """Mask ranks for good. active: of each rank, whether it takes part.

    Raises UnsupportedError for a rank that would come back: its count of calls stood still, and the library numbers
    the flags of a call by it.
    """
    gone = frozenset(rank for rank, on in enumerate(active) if not on)
    session.expect_between_calls("leave out", gone)
    if back := sorted(session.pool.left_out - gone):
        way_out = "build the layers over a new group"
        raise UnsupportedError(f"ranks {back} were left out and cannot take part again", [way_out])
    with session.call("leave_out"):
        session.pool.left_out = gone


MULTIPLE = 4
MULTIPROCESSORS = {(9, 0): 132, (10, 0): 148}
"""Of the GPUs with NVLink that the library knows, by compute capability; channels are cut from them."""
FIFO_BYTES = 8 * 256 * 1024
PREPARE_FIFO_BYTES = 1024 * 1024
CONNECTION_BYTES = 256


@PREPARE_FINALIZE.register("nvlink_two_sided")
class NvlinkTwoSided(PrepareFinalize):
    """FlashInfer's MnnvlMoe, one copy of a token per destination rank."""

    pads_rows: ClassVar[bool] = True
    collectives: ClassVar[int] = 4
    """Prepare, values, scales and combine are launches of their own."""
    traits: ClassVar[TransportTraits] = replace(
        DOMAIN,
        summary="FlashInfer, rows pushed through FIFOs whose size knows no tokens; inside one NVLink domain",
        max_ranks=128,
        max_top_k=32,
    )

    def __init__(self, context: TransportContext) -> None:
        """Get the workspaces of this process, together with all ranks."""
        super().__init__(context)
        moe = load("flashinfer.comm.trtllm_alltoall", allow_emulated=context.allow_emulated).MnnvlMoe
        self._moe = moe
        mapping, config = domain_of(context)
        self._numbers = UniformExpertIds(context, MULTIPLE)
        self._session: LibrarySession[tuple[Any, Any]] = LibrarySession(context, LIBRARY, "two-sided")
        self._session.open(
            (), lambda _: (moe.get_moe_prepare_workspace(mapping, config), moe.get_moe_workspaces(mapping, config))
        )

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Tell the ranks of the experts what they will get, then send it."""
        c = self.context
        self.expect_room(x_TH)
        x_wire = self.encode(x_TH)
        with c.spans.span("dispatch"):
            # Numbers go up to `total`, which means no rank to the library.
            ids_TK = self._numbers.of(routing.ids_TK, nowhere=self._numbers.total).contiguous()
            weights_TK = routing.weights_TK.to(torch.float32).contiguous()
            for_ids, for_rows = self._session.buffer
            with self._session.call("dispatch"):
                route, ids_RK, weights_RK, _ = self._moe.mnnvl_moe_alltoallv_prepare_without_allgather(
                    ids_TK, weights_TK, None, for_ids, c.max_num_tokens, c.comm.rank, c.comm.size,
                    self._numbers.total, self._numbers.total, c.top_k,
                )  # fmt: skip
                parts: list[Tensor] = [
                    self._moe.mnnvl_moe_alltoallv(_aligned(part), route, for_rows, c.comm.rank, c.comm.size)
                    for part in payloads_of(x_wire)
                ]
            yield InFlight("dispatch")
            slots_RK, handle = self._numbers.slots(ids_RK), (route, x_TH.shape[0])
            return self.window_rows(rows_of(parts, x_wire), slots_RK, weights_RK, handle, x_TH.shape[0])

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Push sums back, and add up those of each token."""
        handle, c = tokens.handle, self.context
        assert isinstance(handle, tuple)
        route, num_tokens = handle
        with c.spans.span("combine"):
            _, for_rows = self._session.buffer
            with self._session.call("combine"):
                y_TX: Tensor = self._moe.mnnvl_moe_alltoallv_combine(
                    _aligned(output.y), route, for_rows, c.comm.rank, c.comm.size, c.top_k, num_tokens
                )
            yield InFlight("combine")
            return y_TX[:, : output.y.shape[1]].contiguous()

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """The two workspaces of a process, whatever the tokens."""
        return fifo_bytes(problem.ranks, MULTIPROCESSORS.get(problem.device.arch or (9, 0), 132))


def fifo_bytes(ranks: int, multiprocessors: int) -> int:
    """Bytes of both workspaces of one rank, the library's own formula.

    2 MiB for each rank and channel, half the multiprocessors serving channels of one block for eight ranks each way,
    and 1 MiB for each rank for ids and weights; with each FIFO goes a line of 256 bytes.
    """
    channels = max(multiprocessors // 2 // (2 * -(-ranks // 8)), 1)
    rows = (FIFO_BYTES + CONNECTION_BYTES) * ranks * channels
    return rows + (PREPARE_FIFO_BYTES + CONNECTION_BYTES) * ranks


def _aligned(part_TX: Tensor) -> Tensor:
    """Rows filled up to a multiple of 16 bytes, where they are none."""
    elements = ROW_ALIGNMENT // part_TX.element_size()
    short = -part_TX.shape[1] % elements
    return pad(part_TX, (0, short)) if short else part_TX.contiguous()


def routes_of(ids_TK: Tensor, first: int) -> Tensor:
    """Ids without -1: a token that has any goes to its other ranks only, one that has nothing else to `first`."""
    highest_T1 = ids_TK.amax(dim=1, keepdim=True)
    return torch.where(ids_TK >= 0, ids_TK, torch.where(highest_T1 >= 0, highest_T1, first)).contiguous()


def filled_top_k(top_k: int) -> int:
    """Return the smallest top-k for which kernels are built that takes so many experts a token."""
    return next((k for k in TOP_KS if k >= top_k), top_k)


TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
"""What the kernels are built for."""
LINE_BYTES = 128


@PREPARE_FINALIZE.register("nvlink_one_sided")
class NvlinkOneSided(SlotTransport):
    """FlashInfer's MoeAlltoAll, one copy of a token per destination rank."""

    pads_rows: ClassVar[bool] = True
    traits: ClassVar[TransportTraits] = replace(
        DOMAIN,
        summary="FlashInfer, rows written straight into peers' memory; inside one NVLink domain",
        max_ranks=64,
        max_top_k=TOP_KS[-1],
        open_calls=MAX_OPEN_CALLS,
        masks_ranks=True,
    )

    def __init__(self, context: TransportContext) -> None:
        """See that there is a workspace, together with all ranks. Raises UnsupportedError without the class."""
        super().__init__(context)
        self._library = load("flashinfer.comm", allow_emulated=context.allow_emulated)
        if not hasattr(self._library, "MoeAlltoAll"):
            lacks = "it has no flashinfer.comm.MoeAlltoAll, which 0.6 and 0.7 have"
            raise UnsupportedError("transport 'nvlink_one_sided' cannot use the installed flashinfer", [lacks])
        self._masks = Call(self._library.MoeAlltoAll, []).knows("enable_rank_mask")
        self._mapping, self._config = domain_of(context)
        self._numbers = UniformExpertIds(context)
        self._top_k = filled_top_k(context.top_k)
        combined = row_bytes(context.dtype, context.hidden_size)
        dispatched = max(combined, row_bytes(context.wire, context.hidden_size)) + 8 * self._top_k
        self._size = workspace_bytes(context.comm.size, context.max_num_tokens, dispatched, combined)
        geometry = (self._size, context.max_num_tokens, self._top_k, self._numbers.total)
        self._session: LibrarySession[Any] = LibrarySession(context, LIBRARY, geometry)
        self._session.open_first_slot(self._exchange)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        c = self.context
        self.expect_room(x_TH)
        x_wire = self.encode(x_TH)
        with c.spans.span("dispatch"):
            buffer_slot = self._session.take("dispatch", self._exchange)
            more = self._top_k - c.top_k
            ids_TK = pad(self._numbers.of(routing.ids_TK), (0, more), value=-1)
            tails = [ids_TK, pad(routing.weights_TK.to(torch.float32), (0, more))]
            with self._session.call("dispatch"):
                *x_parts, ids_RK, weights_RK = self._dispatch(buffer_slot, [*payloads_of(x_wire), *tails])
            yield InFlight("dispatch")
            slots_RK, handle = self._numbers.slots(ids_RK[:, : c.top_k]), SlotHandle(buffer_slot, buffer_slot.call)
            x_RH = rows_of(x_parts, x_wire)
            return self.window_rows(x_RH, slots_RK, weights_RK[:, : c.top_k], handle, x_TH.shape[0])

    def _combine(self, y: Tensor, handle: SlotHandle) -> Tensor:
        """Leave sums where peers read them."""
        c = self.context
        payload = y.contiguous().view(c.comm.size, c.max_num_tokens, c.hidden_size)
        y_TH: Tensor = handle.buffer_slot.buffer.combine(payload, c.max_num_tokens, **self._mask)
        return y_TH

    def leave_out(self, active_W: Tensor) -> None:
        """See `PrepareFinalize.leave_out`. Masks are kernel arguments: capture CUDA graphs again after it.

        Raises UnsupportedError for a rank that would come back.
        """
        if not self._masks:
            super().leave_out(active_W)
            return
        leave_out_once(self._session, self.active_ranks(active_W))

    @property
    def _mask(self) -> dict[str, Tensor]:
        if not self._masks:
            return {}
        return {"active_rank_mask": rank_mask(self._session.pool.left_out, self.context.comm.size)}

    def _dispatch(self, buffer_slot: LibraryBufferSlot[Any], payloads: list[Tensor]) -> list[Tensor]:
        """Windows of each payload as rows. The library wants the widest elements first."""
        ids_TK = payloads[-2]
        widest_first = sorted(range(len(payloads)), key=lambda number: -payloads[number].element_size())
        windows = buffer_slot.buffer.dispatch(
            routes_of(ids_TK, self._numbers.first),
            [payloads[number] for number in widest_first],
            self.context.max_num_tokens,
            invalid_token_expert_id=-1,
            expert_id_payload_index=widest_first.index(len(payloads) - 2),
            **self._mask,
        )
        return [windows[widest_first.index(number)].flatten(0, 1) for number in range(len(payloads))]

    def _exchange(self, number: int) -> Any:
        # A line more for each: the library gives workspaces of one size to everybody who asks.
        return self._library.MoeAlltoAll(
            self._mapping, self.context.max_num_tokens, self._top_k, self._numbers.total,
            workspace_size_per_rank=self._size + LINE_BYTES * number, mnnvl_config=self._config,
            **({"enable_rank_mask": True} if self._masks else {}),
        )  # fmt: skip

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """One workspace; each further call in flight takes another one."""
        hidden, top_k = problem.config.model.hidden_size, problem.config.router.top_k
        wires = [problem.dtype, *([] if problem.activations is None else [problem.activations])]
        row = max(packed_row_bytes(wire, hidden, 0) for wire in wires)
        return workspace_bytes(
            problem.ranks,
            problem.config.kernel.max_num_tokens,
            row + 8 * filled_top_k(top_k),
            row_bytes(problem.dtype, hidden),
        )


def workspace_bytes(ranks: int, max_num_tokens: int, dispatch_row: int, combine_row: int) -> int:
    """Bytes of one rank's workspace, the library's own formula.

    Counters, two lines of flags, target ranks and slots for 22 picks of each token; then a window of M rows for each
    rank, for dispatch and combine. Each part ends on a line of 128 bytes.
    """
    notes = [8 + 8 * ranks, 4 * ranks, 4 * ranks, *[4 * TOP_KS[-1] * max_num_tokens] * 2]
    windows = [ranks * max_num_tokens * dispatch_row, ranks * max_num_tokens * combine_row]
    return sum(-(-part // LINE_BYTES) * LINE_BYTES for part in (*notes, *windows))
