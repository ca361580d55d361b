"""A layer with token exchange as one prepared native call, see csrc/exchange_layer.cpp.

    RowsOfExperts   the experts of a rank as a native call on received rows needs them
    ExchangeLayer   the arguments of a layer over one `Exchange`, written once; one call at a time

The stages are routing, dispatch, experts and combine. A call returns early where Python has something to do, and is
then resumed: reserve pages of a window, wait for peers that are late, call a listener, run shared experts. The results
are those of `ExchangeCalls` and `ExpertsCall`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Array, addressof, byref, c_int64
from dataclasses import dataclass
from enum import IntEnum

import torch

from moe_mk.kernels.native.exchange import EPOCHS, ExchangeCalls
from moe_mk.kernels.native.exchange_abi import CExchangeLayer
from moe_mk.kernels.native.experts_mode import ExpertsMode, check_call
from moe_mk.kernels.native.library import CLayer, CRoute, Native, Status
from moe_mk.kernels.native.prepared import Gating, Places, Stack, experts_block
from moe_mk.kernels.native.route_mode import check_gate, route_block


class Stage(IntEnum):
    """`ExchangeStage` of csrc/exchange.h: the stages of a call, in order."""

    ROUTE = 0
    DISPATCH = 1
    AWAIT_ROWS = 2
    RECEIVE = 3
    EXPERTS = 4
    SHOW_SUMS = 5
    AWAIT_SUMS = 6
    ADD_SUMS = 7
    DONE = 8


@dataclass(frozen=True)
class RowsOfExperts:
    """The experts of a rank for calls on received rows."""

    native: Native
    stack: Stack
    mode_of_rows: Callable[[int], ExpertsMode]
    """The mode for a number of received rows."""
    by_rows: bool
    """Whether the mode depends on the number of rows."""
    takes_fp8: bool
    """Whether rows in e4m3 with f32 scales of 128 values are read as they are."""


@dataclass(frozen=True)
class WindowParts:
    """Addresses in the own window, and where its rows meet."""

    values: int
    """Row 0."""
    sums: int
    seam_row: int
    """The rows of ranks up to `left` end there."""
    left: int


class ExchangeLayer:
    """The arguments of one layer over one exchange. All memory that grows with a call is kept for the next one.

    moved: int64 [2 W + 2], to which every call adds: rows sent to each rank, rows received from each, the number of
    dispatches and of combines.
    """

    def __init__(
        self,
        calls: ExchangeCalls,
        experts: RowsOfExperts,
        gating: Gating | None,
        places: Places,
        window: WindowParts,
        moved: Array[c_int64],
    ) -> None:
        """gating: None where the caller routes. Raises ShapeError for tensors that do not fit together."""
        self.exchange, self._calls, self._experts, self._gating, self._places = (
            calls.exchange, calls, experts, gating, places
        )  # fmt: skip
        self._native, self._moved, hidden = experts.native, moved, experts.stack.w13.layout.num_inputs
        self._of_mode: dict[ExpertsMode, CLayer] = {}
        self._send, self._receive, self._add_up = calls.blocks
        self._layer = self._block_of(experts.mode_of_rows(1))
        self._ranks, self._hidden, self._top_k = len(self.exchange.counts), hidden, self._send.top_k
        self._num_experts = 0 if gating is None else gating.gate_EH.shape[0]
        exchange = self.exchange
        self._block = CExchangeLayer(
            windows=addressof(exchange.block), layer=addressof(self._layer), send=addressof(self._send),
            receive=addressof(self._receive), add_up=addressof(self._add_up), values=window.values, sums=window.sums,
            received=addressof(exchange.received), moved=addressof(moved), seam_row=window.seam_row, left=window.left,
            first_row=window.seam_row, end_row=window.seam_row,
        )  # fmt: skip
        self._at, functions = byref(self._block), self._native.functions
        self._begin, self._resume = functions["exchange_layer"], functions["exchange_layer_resume"]
        self._make_room_for_tokens(1)  # an idle rank may never send any, and its peers still ask for its tokens
        self._received: list[torch.Tensor | None] = []
        self.last = Stage.EXPERTS if experts.by_rows else Stage.DONE
        """Where `begin` stops at the latest: the mode of the experts may depend on the number of received rows."""

    @property
    def stage(self) -> int:
        """The stage that comes next."""
        return int(self._block.stage)

    @property
    def rows(self) -> int:
        """How many rows the last call has received."""
        return int(self._block.total)

    def begin(
        self,
        x_TH: torch.Tensor,
        load_E: torch.Tensor | None,
        routing: tuple[torch.Tensor, torch.Tensor] | None,
        out_TH: torch.Tensor,
        epoch: int,
        threads: int,
        *,
        is_routed: bool = False,
        stop: Stage = Stage.DONE,
    ) -> int:
        """Run the stages up to `stop`, as far as they go; returns the status, see `stage`.

        x_TH, out_TH: bf16, contiguous. load_E: int64 [E], to which choices are added when this routes. routing: int32
        ids and f32 weights (T, K), contiguous: of physical experts if `is_routed`, else written, if given. Tensors must
        live until the call is done.
        """
        tokens = x_TH.shape[0]
        if tokens > self._tokens:
            self._make_room_for_tokens(tokens)
        ids, weights = (None, None) if routing is None else (routing[0].data_ptr(), routing[1].data_ptr())
        load, threads = None if load_E is None else load_E.data_ptr(), self._native.threads(threads)
        self.exchange.epoch = epoch
        return self._begin(
            self._at, x_TH.data_ptr(), tokens, load, ids, weights, out_TH.data_ptr(), threads, epoch % EPOCHS,
            Stage.DISPATCH if is_routed else Stage.ROUTE, stop if stop < self.last else self.last,
        )  # fmt: skip

    def resume(self, first: int, stop: Stage = Stage.DONE) -> int:
        """Continue with a stage; returns the status."""
        if first <= Stage.EXPERTS and stop > Stage.EXPERTS and self.last is not Stage.DONE:
            if first < Stage.EXPERTS:
                return self._resume(self._at, first, Stage.EXPERTS)
            self._block.layer = addressof(self._block_of(self._experts.mode_of_rows(self.rows)))
        return self._resume(self._at, first, stop)

    def check(self, status: int, phase: str) -> None:
        """Raise the typed error of a status other than OK and LATE."""
        if status not in (Status.OK, Status.LATE):
            self.exchange.check("layer", status, phase)

    @property
    def counts(self) -> list[int]:
        """Rows that the last dispatch sends to each rank, or would send if there were room."""
        return self.exchange.counts[:]

    def received_from(self, counts: dict[int, int]) -> None:
        """Set the checked counts of rows that peers have sent, after a wait by other means."""
        self.exchange.received_from(counts)

    def sums_from(self, firsts: dict[int, int]) -> None:
        """Set the checked numbers of the first sum at each peer, after a wait by other means."""
        self._calls.sums_begin_at(firsts)

    def wait_for(self, microseconds: int) -> None:
        """How long flags are polled before a call returns LATE."""
        self._block.microseconds = microseconds

    def move_window(self, values: int, sums: int) -> None:
        """Change the addresses of received rows and of their sums, for windows that are this rank's own memory."""
        self._block.values, self._block.sums = values, sums

    def tokens_sent(self, num_tokens: int) -> torch.Tensor:
        """int64. The tokens of the last dispatch, of so many, for rank 0, then those for rank 1, ...: a copy."""
        token_of = self._memory[-1]
        each = [token_of[rank * num_tokens :][:count] for rank, count in enumerate(self.counts)]
        return torch.cat(each).long()

    def window_rows(self) -> tuple[int, int]:
        """The first row of the window with received rows, and the one behind the last."""
        received, block = self.exchange.received, self._block
        first = block.seam_row - sum(received[: block.left + 1])
        return first, first + sum(received[:])

    def make_room(self, rows: int, sums: int, window: tuple[int, int]) -> None:
        """Room for received rows and for sums of the window. window: its first row with pages, and the one behind."""
        block = self._block
        block.sums_room = sums
        block.first_row, block.end_row = min(block.first_row, window[0]), max(block.end_row, window[1])
        if rows <= block.row_room:
            return
        room, receive = max(rows, 2 * block.row_room), self._receive
        ids_RK = torch.empty((room, self._top_k), dtype=torch.int32, device="cpu")
        weights_RK = torch.empty((room, self._top_k), dtype=torch.float32, device="cpu")
        receive.ids, receive.weights, scales_RB = ids_RK.data_ptr(), weights_RK.data_ptr(), None
        if receive.scale_bytes:
            scales_RB = torch.empty((room, receive.scale_bytes), dtype=torch.uint8, device="cpu")
            receive.scales = scales_RB.data_ptr()
        self._received, block.row_room = [ids_RK, weights_RK, scales_RB], room

    def _make_room_for_tokens(self, tokens: int) -> None:
        shape, block = (tokens, self._top_k), self._block
        ids_TK, physical_TK = (torch.empty(shape, dtype=torch.int32, device="cpu") for _ in range(2))
        weights_TK = torch.empty(shape, dtype=torch.float32, device="cpu")
        logits_TE = torch.empty((tokens, self._num_experts), dtype=torch.float32, device="cpu")
        token_of = torch.empty(tokens * self._ranks, dtype=torch.int32, device="cpu")
        block.ids, block.physical, block.weights = ids_TK.data_ptr(), physical_TK.data_ptr(), weights_TK.data_ptr()
        block.logits, self._send.token_of, self._add_up.token_of = logits_TE.data_ptr(), *[token_of.data_ptr()] * 2
        self._memory, self._tokens = [ids_TK, physical_TK, weights_TK, logits_TE, token_of], tokens

    def _block_of(self, mode: ExpertsMode) -> CLayer:
        """The arguments of router and experts in one mode."""
        made = self._of_mode.get(mode)
        if made is not None:
            return made
        stack, gating, places = self._experts.stack, self._gating, self._places
        x_XH = torch.empty((0, stack.w13.layout.num_inputs), dtype=torch.bfloat16, device="cpu")
        ids_XK = torch.empty((0, self._send.top_k), dtype=torch.int32, device="cpu")
        check_call(mode, x_XH, None, ids_XK, None, (stack.w13, stack.w2))
        if gating is not None:
            check_gate(x_XH, gating.gate_EH, gating.bias_E, gating.mode)
        made = self._of_mode[mode] = CLayer(
            route=CRoute() if gating is None else route_block(self._native, gating.gate_EH, gating.bias_E, gating.mode),
            experts=experts_block(self._native, stack.w13, stack.w2, None, mode),
            physical_of=places.physical_of_E.data_ptr(), rank_of=places.rank_of_P.data_ptr(),
            slot_of=places.slot_of_P.data_ptr(), num_physical=places.rank_of_P.shape[0], rank=places.rank,
        )  # fmt: skip
        return made
