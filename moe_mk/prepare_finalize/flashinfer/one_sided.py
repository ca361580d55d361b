"""One-sided NVLink (FlashInfer): ranks of one NVLink domain write rows into each other's workspace and read sums back.

The choice inside one NVLink domain for every batch size; an NVL72 rack is one node of 72 ranks.

    dispatch   values, scales, ids and weights of a token go once to each rank of its experts
    arrival    (R, M) windows, the rows of each source at the front of its window, in any order
    combine    each rank reads the rows of its tokens from all peers and adds them up in f32

An id finds its rank by division, so -1 would be rank 0: the ids that route repeat another of their token, or name this
rank, and the ids that travel as a payload say -1. Top-k is filled up to one that the kernels are built for.
Workspaces are made with `enable_rank_mask` where the build knows it, and every call brings an `active_rank_mask`.
Library API read at 0.6.18 and 0.7.2. Since 0.7.1 the library advises `flashinfer.moe_ep` in place of MoeAlltoAll, see
`moe_ep_one_sided`.
"""

from __future__ import annotations

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
from moe_mk.prepare_finalize.deepep.common import Call, UniformExpertIds, payloads_of, rows_of
from moe_mk.prepare_finalize.flashinfer.mapping import DOMAIN, LIBRARY, domain_of, leave_out_once, rank_mask
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant.wire import row_bytes
from moe_mk.tokens import ExpertOutput, Routing, Tokens

TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
"""What the kernels are built for."""
LINE_BYTES = 128


@PREPARE_FINALIZE.register("nvlink_one_sided")
class NvlinkOneSided(PrepareFinalize):
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
        self._top_k = next(k for k in TOP_KS if k >= context.top_k)
        combined = row_bytes(context.dtype, context.hidden_size)
        dispatched = max(combined, row_bytes(context.wire, context.hidden_size)) + 8 * self._top_k
        self._size = workspace_bytes(context.comm.size, context.max_num_tokens, dispatched, combined)
        geometry = (self._size, context.max_num_tokens, self._top_k, self._numbers.total)
        self._session: LibrarySession[Any] = LibrarySession(context, LIBRARY, geometry)
        self._session.open_first_slot(self._exchange)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Write each token to the ranks of its experts."""
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

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Leave sums where the homes of their tokens read them, and add up those of this rank's tokens."""
        handle, c = tokens.handle, self.context
        assert isinstance(handle, SlotHandle)
        self._session.expect_open(handle.buffer_slot, handle.call)
        with c.spans.span("combine"):
            payload = output.y.contiguous().view(c.comm.size, c.max_num_tokens, c.hidden_size)
            with self._session.call("combine"):
                y_TH: Tensor = handle.buffer_slot.buffer.combine(payload, c.max_num_tokens, **self._mask)
            yield InFlight("combine")
            handle.buffer_slot.busy = False
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
        """The argument for calls that mask ranks."""
        if not self._masks:
            return {}
        return {"active_rank_mask": rank_mask(self._session.pool.left_out, self.context.comm.size)}

    def _dispatch(self, buffer_slot: LibraryBufferSlot[Any], payloads: list[Tensor]) -> list[Tensor]:
        """Windows of each payload as rows. The library wants the widest elements first."""
        ids_TK = payloads[-2]
        widest_first = sorted(range(len(payloads)), key=lambda number: -payloads[number].element_size())
        windows = buffer_slot.buffer.dispatch(
            self._routes(ids_TK),
            [payloads[number] for number in widest_first],
            self.context.max_num_tokens,
            invalid_token_expert_id=-1,
            expert_id_payload_index=widest_first.index(len(payloads) - 2),
            **self._mask,
        )
        return [windows[widest_first.index(number)].flatten(0, 1) for number in range(len(payloads))]

    def _routes(self, ids_TK: Tensor) -> Tensor:
        """Ids without -1: a token that has any goes to its other ranks only, one that has nothing else stays here."""
        highest_T1 = ids_TK.amax(dim=1, keepdim=True)
        instead_T1 = torch.where(highest_T1 >= 0, highest_T1, self._numbers.first)
        return torch.where(ids_TK >= 0, ids_TK, instead_T1).contiguous()

    def _exchange(self, number: int) -> Any:
        """One more workspace; every rank opens it at the same call."""
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
        filled = next((k for k in TOP_KS if k >= top_k), top_k)
        return workspace_bytes(
            problem.ranks, problem.config.kernel.max_num_tokens, row + 8 * filled, row_bytes(problem.dtype, hidden)
        )


def workspace_bytes(ranks: int, max_num_tokens: int, dispatch_row: int, combine_row: int) -> int:
    """Bytes of one rank's workspace, the library's own formula.

    Counters, two lines of flags, target ranks and slots for 22 picks of each token; then a window of M rows for each
    rank, for dispatch and combine. Each part ends on a line of 128 bytes.
    """
    notes = [8 + 8 * ranks, 4 * ranks, 4 * ranks, *[4 * TOP_KS[-1] * max_num_tokens] * 2]
    windows = [ranks * max_num_tokens * dispatch_row, ranks * max_num_tokens * combine_row]
    return sum(-(-part // LINE_BYTES) * LINE_BYTES for part in (*notes, *windows))
