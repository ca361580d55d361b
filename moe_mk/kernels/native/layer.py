"""A layer as one prepared native call, see csrc/forward.cpp: on one rank, or over an `Exchange`.

    RowsOfExperts         the experts of a rank as the call needs them
    PreparedCall          the arguments of a layer on one rank, written once; calls may run concurrently
    PreparedPagedCall     the same with experts that may be larger than memory
    PreparedExchangeCall  the same over one `Exchange`, one call at a time

The results are those of `RouteCall`, `ExchangeCalls` and `ExpertsCall`, bit for bit. A call over an exchange returns
early where Python has something to do, and is then resumed: reserve pages, wait for late peers, call a listener.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Array, addressof, byref, c_int64
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch

from moe_mk.errors import ShapeError
from moe_mk.kernels.native.exchange import EPOCHS, ExchangeCalls
from moe_mk.kernels.native.exchange_abi import CLayer
from moe_mk.kernels.native.experts_mode import ExpertsMode, check_call, check_shared
from moe_mk.kernels.native.library import CExperts, Native, Status
from moe_mk.kernels.native.packed import PackedMatrix
from moe_mk.kernels.native.prepared import RouteMode, check_gate, experts_block, route_block


class Stage(IntEnum):
    """`LayerStage` of csrc/exchange.h: the stages of a call, in order."""

    ROUTE = 0
    PLACE = 1
    DISPATCH = 2
    SHARED = 3
    AWAIT_ROWS = 4
    RECEIVE = 5
    EXPERTS = 6
    SHOW_SUMS = 7
    AWAIT_SUMS = 8
    ADD_SUMS = 9
    ADD_SHARED = 10
    DONE = 11


WIDE_IDS, SKIP_OTHERS = 1, 2
"""`IdForm` of csrc/exchange.h."""
Routed = tuple[torch.Tensor, torch.Tensor]
"""Ids and weights (T, K)."""


class LayerCall(Protocol):
    """A whole layer in one call, with the bits of its stages. It counts its stages for the ledger."""

    @property
    def routes(self) -> bool:
        """Whether it contains the router."""

    def is_ready(self, num_tokens: int) -> bool:
        """Whether the next call may be made here; else the separate steps are, which open buffers."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        load_E: torch.Tensor | None,
        routing: Routed | None = None,
        first: Stage = Stage.ROUTE,
        *,
        skip: bool = False,
        routed: Callable[[], None] | None = None,
        shared_weights_T: torch.Tensor | None = None,
        captured: int | None = None,
    ) -> torch.Tensor:
        """(T, H) to (T, H), contiguous.

        load_E: int64 [E], to which the choices are added in stage PLACE; None: nothing is counted. first: ROUTE, where
        `routing` is None, or int32 ids and f32 weights to be written; PLACE, where it holds the caller's logical
        experts, int32 or int64, -1 for none; or DISPATCH, where it holds physical experts in int32. skip: ids that do
        not exist are skipped; otherwise ShapeError is raised for them, with nothing counted. routed: called once
        `routing` is written, before rows are dispatched to other ranks. shared_weights_T: f32, of the shared experts;
        None: ones. captured: the address of a `MoeMkCapture` with room for what ROUTE chooses. Whatever is raised here
        ends the call on every rank of the group.
        """


class PreparedExperts(Protocol):
    """Result of `FusedExperts.fuse_layer`: the packed experts of this rank for a prepared call."""

    def alone(self, shared: PreparedExperts | None, gating: Gating | None, tables: Any, ran: Any) -> LayerCall | None:
        """The layer on one rank, see `PreparedCall`; None: not supported. tables: the `PlacementTables`."""


@dataclass(frozen=True)
class Gating:
    """The router: gate bf16 or f32 [E, H] and an f32 bias [E] of the choice, both contiguous, and the mode."""

    gate_EH: torch.Tensor
    bias_E: torch.Tensor | None
    mode: RouteMode


@dataclass(frozen=True)
class Places:
    """The placement of logical experts, int32; read at every call, so it may be changed between calls."""

    physical_of_E: torch.Tensor
    """-1: on no rank."""
    rank_of_P: torch.Tensor
    slot_of_P: torch.Tensor
    rank: int


@dataclass(frozen=True)
class Stack:
    """The packed experts of this rank, and optionally shared experts, applied to every row in the same pass."""

    w13: PackedMatrix
    w2: PackedMatrix
    shared: tuple[PackedMatrix, PackedMatrix] | None = None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        return self.w13, self.w2, *(self.shared or ())


@dataclass(frozen=True, eq=False)
class RowsOfExperts:
    """The experts of a rank for calls on rows: `PreparedExperts`."""

    native: Native
    stack: Stack
    mode_of_rows: Callable[[int], ExpertsMode]
    """The mode for a number of rows."""
    by_rows: bool
    """Whether the mode depends on the number of rows."""
    takes_fp8: bool
    """Whether rows in e4m3 with f32 scales of 128 values are read as they are."""

    def alone(self, shared: PreparedExperts | None, gating: Gating | None, tables: Any, ran: Any) -> LayerCall | None:
        """None where an expert has several replicas."""
        if not tables.one_to_one or not isinstance(shared, RowsOfExperts | None):
            return None
        return PreparedCall(self, shared, gating, Places(tables.choice_X, tables.rank_of_P, tables.slot_of_P, 0), ran)

    def block(self, mode: ExpertsMode) -> CExperts:
        """The arguments in a mode. Raises ShapeError for matrices that do not fit together."""
        w13, w2, shared = self.stack.w13, self.stack.w2, self.stack.shared
        if shared is not None:
            check_shared(shared, w13, w2)
        x_XH = torch.empty((0, w13.layout.num_inputs), dtype=torch.bfloat16, device="cpu")
        ids_XK = torch.empty((0, 1), dtype=torch.int32, device="cpu")
        check_call(mode, x_XH, None, ids_XK, None, self.stack.matrices)
        return experts_block(self.native, w13, w2, shared, mode)


class PreparedCall:
    """A layer on one rank: a `LayerCall`. Concurrent calls are allowed: none changes the arguments."""

    def __init__(
        self,
        experts: RowsOfExperts,
        shared: RowsOfExperts | None,
        gating: Gating | None,
        places: Places,
        ran: Array[c_int64] | None = None,
    ) -> None:
        """shared: experts of one slot, whose output is added to that of the others. gating: None where every call is
        given a routing. ran: int64 [4, 2], see `WorkMeter`.

        Raises ShapeError for tensors that do not fit, ConfigError for groups that do not.
        """
        self._native, self._experts, self._shared = experts.native, experts, shared
        self.hidden, self.routes = experts.stack.w13.layout.num_inputs, gating is not None
        if (width := experts.stack.w2.layout.num_outputs) != self.hidden:
            raise ShapeError(f"cpu layer: H={self.hidden} comes in, H={width} goes out")
        self._route = None
        if gating is not None:
            x_XH = torch.empty((0, self.hidden), dtype=torch.bfloat16, device="cpu")
            check_gate(x_XH, gating.gate_EH, gating.bias_E, gating.mode)
            self._route = route_block(self._native, gating.gate_EH, gating.bias_E, gating.mode)
        self._held, self.num_experts = (gating, places, ran), places.physical_of_E.shape[0]
        self._of_mode: dict[tuple[RowsOfExperts, ExpertsMode], CExperts] = {}
        self._of_rows: dict[int, CLayer] = {}
        self._by_rows = experts.by_rows or (shared is not None and shared.by_rows)
        self.block = CLayer(
            route=None if self._route is None else addressof(self._route),
            experts=self.experts_at(experts, 1),
            shared=None if shared is None else self.experts_at(shared, 1),
            physical_of=places.physical_of_E.data_ptr(),
            rank_of=places.rank_of_P.data_ptr(),
            slot_of=places.slot_of_P.data_ptr(),
            ran=None if ran is None else addressof(ran),
            num_experts=self.num_experts,
            num_physical=places.rank_of_P.shape[0],
            rank=places.rank,
        )
        self._at, self._function = byref(self.block), self._native.functions["layer"]
        self._sign = self._native.threads(1)

    def is_ready(self, num_tokens: int) -> bool:
        return True

    def __call__(
        self, x_TH: torch.Tensor, load_E: torch.Tensor | None, routing: Routed | None = None,
        first: Stage = Stage.ROUTE, *, skip: bool = False, routed: Callable[[], None] | None = None,
        shared_weights_T: torch.Tensor | None = None, captured: int | None = None, stop: Stage = Stage.DONE,
    ) -> torch.Tensor:  # fmt: skip
        """See `LayerCall`. `routed` is called at the end. stop: the first stage that is left out."""
        out_TH, (ids, weights, top_k), form = torch.empty_like(x_TH), (None, None, 0), SKIP_OTHERS * skip
        if routing is not None:
            ids, weights, top_k = routing[0].data_ptr(), routing[1].data_ptr(), routing[0].shape[1]
            form |= WIDE_IDS * (routing[0].dtype is torch.int64)
        status = self._function(
            byref(self._block_at(x_TH.shape[0])) if self._by_rows else self._at, first, stop, x_TH.data_ptr(),
            x_TH.shape[0], ids, weights, top_k, form, None if shared_weights_T is None else shared_weights_T.data_ptr(),
            None if load_E is None else load_E.data_ptr(), captured, out_TH.data_ptr(),
            self._sign * torch.get_num_threads(), 0,
        )  # fmt: skip
        if status != Status.OK:
            self.check(status, first)
        if routed is not None:
            routed()
        return out_TH

    def check(self, status: int, first: int) -> None:
        """Raise the typed error of a status of the own calls."""
        if status == Status.BAD_ID and first == Stage.PLACE:
            raise ShapeError(
                f"ids of experts out of range (0 <= id < {self.num_experts}, or -1 for none), or placed out of range"
            )
        self._native.check("layer", status)

    def experts_at(self, experts: RowsOfExperts, rows: int) -> int:
        """The address of the arguments of experts on a number of rows."""
        key = experts, experts.mode_of_rows(rows)
        if key not in self._of_mode:
            self._of_mode[key] = experts.block(key[1])
        return addressof(self._of_mode[key])

    def _block_at(self, rows: int) -> CLayer:
        if (made := self._of_rows.get(rows)) is not None:
            return made
        made = CLayer.from_buffer_copy(self.block)
        made.experts = self.experts_at(self._experts, rows)
        if self._shared is not None:
            made.shared = self.experts_at(self._shared, rows)
        if len(self._of_rows) >= MOST_SIZES:
            self._of_rows.clear()
        self._of_rows[rows] = made
        return made


class PreparedPagedCall(PreparedCall):
    """A `PreparedCall` while all experts are in memory; else one call for what is before them, and `sums`."""

    def __init__(
        self, rows: RowsOfExperts, cache: Any, sums: Callable[..., torch.Tensor], gating: Gating | None, tables: Any,
        ran: Any,
    ) -> None:  # fmt: skip
        """cache: of `experts.paged`. sums: of tokens, their slots and weights."""
        super().__init__(rows, None, gating, Places(tables.choice_X, tables.rank_of_P, tables.slot_of_P, 0), ran)
        self._cache, self._sums, self._tables, self._ran = cache, sums, tables, ran
        self._top_k = 0 if gating is None else gating.mode.top_k

    def __call__(
        self, x_TH: torch.Tensor, load_E: torch.Tensor | None, routing: Routed | None = None,
        first: Stage = Stage.ROUTE, *, skip: bool = False, routed: Callable[[], None] | None = None,
        shared_weights_T: torch.Tensor | None = None, captured: int | None = None, stop: Stage = Stage.DONE,
    ) -> torch.Tensor:  # fmt: skip
        """See `LayerCall`. Raises StoreError for experts that cannot be read."""
        rows = len(x_TH)
        if routing is None:
            ids_TK = torch.empty((rows, self._top_k), dtype=torch.int32, device="cpu")
            routing = ids_TK, torch.empty((rows, self._top_k), dtype=torch.float32, device="cpu")
        with self._cache.exclusive():
            if is_whole := self._cache.is_whole:
                y_TH = super().__call__(x_TH, load_E, routing, first, skip=skip, captured=captured)
                self._cache.begin(self._slots(routing[0], skip=skip))
        if is_whole:
            if routed is not None:
                routed()
            return y_TH
        super().__call__(x_TH, load_E, routing, first, skip=skip, routed=routed, captured=captured, stop=Stage.EXPERTS)
        with torch.no_grad():
            y_TH = self._sums(x_TH, self._slots(routing[0], skip=skip), routing[1])
        for word, count in ((4, 1), (5, rows), (6, 1), (7, rows)):  # experts and combine of `LayerWork`
            self._ran[word] += count
        return y_TH

    def _slots(self, ids_TK: torch.Tensor, *, skip: bool) -> torch.Tensor:
        if skip:
            ids_TK = ids_TK.masked_fill((ids_TK < 0) | (ids_TK >= self.num_experts), -1)
        if not self._tables.is_identity:
            ids_TK = self._tables.local_slots(self._tables.to_physical(ids_TK, 0), 0)
        return ids_TK.to(torch.int32)


NativeParts = tuple[RowsOfExperts, RowsOfExperts | None, Gating | None, Places, Array[c_int64] | None]
"""The arguments of `PreparedCall`."""
MOST_SIZES = 256
"""Sizes of batches for which arguments are kept."""


class PreparedExchangeCall(PreparedCall):
    """A layer over one exchange. All memory that grows with a call is kept for the next one.

    window: addresses of row 0 and of the first sum in the own window, and where its rows meet: the rows of ranks up to
    `left` end at `seam_row`. moved: int64 [2 W + 2], to which every call adds: rows sent to each rank, rows received
    from each, the number of dispatches and of combines.
    """

    def __init__(
        self,
        calls: ExchangeCalls,
        parts: NativeParts,
        moved: Array[c_int64],
        *,
        window: tuple[int, int] = (0, 0),
        seam_row: int = 0,
        left: int = -1,
        microseconds: int = 0,
    ) -> None:
        """parts: the arguments of `PreparedCall`. microseconds: how long flags are polled before a call returns LATE.

        Raises ShapeError for tensors that do not fit together.
        """
        super().__init__(*parts)
        self.exchange = exchange = calls.exchange
        self.calls, self._moved = calls, moved
        self._send, self._receive, self._add_up = calls.blocks
        self._ranks, self._top_k, block = len(exchange.counts), self._send.top_k, self.block
        block.windows, block.send = addressof(exchange.block), addressof(self._send)
        block.receive, block.add_up = addressof(self._receive), addressof(self._add_up)
        (block.values, block.sums), block.left, block.microseconds = window, left, microseconds
        block.received, block.moved = addressof(exchange.received), addressof(moved)
        block.seam_row = block.first_row = block.end_row = seam_row
        self._make_room_for_tokens(1)  # an idle rank may never send any, and its peers still ask for its tokens
        self._received: list[torch.Tensor | None] = []
        self.last = Stage.EXPERTS if self._experts.by_rows else Stage.DONE
        """Where `begin` stops at the latest: the mode of the experts may depend on the number of received rows."""

    @property
    def stage(self) -> int:
        return self.block.stage  # type: ignore[no-any-return]

    @property
    def rows(self) -> int:
        """How many rows the last call has received."""
        return int(self.block.total)

    def begin(
        self, x_TH: torch.Tensor, load_E: torch.Tensor | None, routing: Routed | None, out_TH: torch.Tensor,
        epoch: int = 0, first: Stage = Stage.ROUTE, stop: Stage = Stage.DONE,
        shared_weights_T: torch.Tensor | None = None, captured: int | None = None,
    ) -> int:  # fmt: skip
        """Run the stages up to `stop`, as far as they go; returns the status, see `stage`.

        As of `LayerCall`; ids are int32 or, in PLACE, int64. Tensors must live until the call is done.
        """
        tokens, form = x_TH.shape[0], 0
        if tokens > self._tokens:
            self._make_room_for_tokens(tokens)
        ids, weights = None, None
        if routing is not None:
            ids, weights, form = routing[0].data_ptr(), routing[1].data_ptr(), int(routing[0].dtype is torch.int64)
        if self._by_rows and self._shared is not None:
            self.block.shared = self.experts_at(self._shared, tokens)
        self.exchange.epoch = epoch
        return self._function(
            self._at, first, stop if stop < self.last else self.last, x_TH.data_ptr(), tokens, ids, weights,
            self._top_k, form, None if shared_weights_T is None else shared_weights_T.data_ptr(),
            None if load_E is None else load_E.data_ptr(), captured, out_TH.data_ptr(),
            self._sign * torch.get_num_threads(), epoch % EPOCHS,
        )  # fmt: skip

    def resume(self, first: int, stop: Stage = Stage.DONE) -> int:
        """Continue with a stage; returns the status."""
        if first <= Stage.EXPERTS and stop > Stage.EXPERTS and self.last is not Stage.DONE:
            if first < Stage.EXPERTS:
                return self._continue(first, Stage.EXPERTS)
            self.block.experts = self.experts_at(self._experts, self.rows)
        return self._continue(first, stop)

    def _continue(self, first: int, stop: Stage) -> int:
        return self._function(self._at, first, stop, None, -1, None, None, 0, 0, None, None, None, None, 0, 0)

    def check(self, status: int, first: int) -> None:
        """Raise the typed error of a status other than OK and LATE. first: the stage that has failed."""
        if status not in (Status.OK, Status.LATE):
            self.exchange.check("layer", status, "dispatch" if first < Stage.SHOW_SUMS else "combine")

    @property
    def counts(self) -> list[int]:
        """Rows that the last dispatch sends to each rank, or would send if there were room."""
        return self.exchange.counts[:]

    def tokens_sent(self, num_tokens: int) -> torch.Tensor:
        """int64. The tokens of the last dispatch, of so many, for rank 0, then those for rank 1, ...: a copy."""
        token_of = self._memory[-1]
        each = [token_of[rank * num_tokens :][:count] for rank, count in enumerate(self.counts)]
        return torch.cat(each).long()

    def window_rows(self) -> tuple[int, int]:
        """The first row of the window with received rows, and the one behind the last."""
        received, block = self.exchange.received, self.block
        first = block.seam_row - sum(received[: block.left + 1])
        return first, first + sum(received[:])

    def make_room(self, rows: int, sums: int, window: tuple[int, int]) -> None:
        """Room for received rows and for sums of the window. window: its first row with pages, and the one behind."""
        block = self.block
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
        def room(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((tokens, columns), dtype=dtype, device="cpu")

        top_k, block = self._top_k, self.block
        self._memory = [
            room(top_k, torch.int32), room(top_k, torch.int32), room(top_k, torch.float32),
            room(self.num_experts * self.routes, torch.float32),
            room(self.hidden * (self._shared is not None), torch.bfloat16), room(self._ranks, torch.int32).flatten(),
        ]  # fmt: skip
        addresses = [each.data_ptr() for each in self._memory]
        block.own_ids, block.places, block.own_weights, block.logits, block.shared_out, token_of = addresses
        self._send.token_of = self._add_up.token_of = token_of
        self._tokens = tokens
