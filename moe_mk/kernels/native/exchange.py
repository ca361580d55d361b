"""Rows straight into windows of peers, rows out of a window, and sums of rows in rank order, on raw memory.

Windows are addresses: whoever calls answers for their being mapped and long enough. Equal inputs give equal bits,
whatever the threads and the instruction set, and those of the reference: FP8 as `reference/quantize_rows`, sums from
zero in rank order in f32, rounded once.

    dispatch  sort tokens by the ranks they visit, write values (as they are, or rounded to FP8 on the way) and tails
              [scales | slots | weights] there, raise a flag a peer
    arrived   look at flags until they have come to an epoch, for no longer than so many microseconds
    receive   tails taken apart, rows that lie elsewhere put in order
    show      tell peers where their sums are
    add_up    the rows of each rank to their tokens; `collect` looks at flags first, as `arrived` does

An `Exchange` is what a set of windows can do for whoever uses it; what one layer sends through it is `exchange_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch

from moe_mk.errors import CommError
from moe_mk.kernels.native.exchange_abi import CFault, CWindows
from moe_mk.kernels.native.library import Isa, Native, Status
from moe_mk.kernels.native.selfcheck import is_compiled, loaded

ROW_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The dtypes of rows that are rounded or added up."""
BYTES_FOR_THREADS = 1 << 20
"""A call that moves less is done before a second thread has woken."""
EPOCHS = 1 << 32


class Rounding(IntEnum):
    """`Quantize` of csrc/exchange.h: what becomes of rows on their way."""

    NONE = 0
    FP8 = 1
    """e4m3 with an f32 scale for every 128 of a row."""
    FP8_UE8M0 = 2
    """The same with powers of two, a byte each."""


class FaultKind(IntEnum):
    """`FaultKind` of csrc/exchange.h: which word of a peer is outside of its limits."""

    TOO_MANY_ROWS = 1
    """The count of a dispatch flag."""
    SUMS_BEYOND = 2
    """The offset of a combine flag."""
    NO_SUCH_SLOT = 3
    """A slot in the tail of a received row."""
    OTHER_LAYER = 4
    """The layer number of a flag."""
    PEER_FAILED = 5
    """A flag that reports a failure; the cause is in a note beside it."""


_FAULTS = {
    FaultKind.TOO_MANY_ROWS: ("dispatch", "sent {value} rows into a region of {limit}"),
    FaultKind.SUMS_BEYOND: (
        "combine", "its sums for this rank begin at row {value}, at most {limit} rows of other ranks precede them"
    ),
    FaultKind.NO_SUCH_SLOT: (
        "dispatch", "row {row} is for slot {value}, out of range (0 <= slot < {limit}, or -1 for no expert here)"
    ),
    FaultKind.OTHER_LAYER: (
        "", "is in a call of layer number {value}, this rank in one of {limit} (modulo 255); all ranks must make the "
        "same calls, from one thread"
    ),
    FaultKind.PEER_FAILED: ("", "its call failed"),
}  # fmt: skip


@dataclass(frozen=True)
class PeerFault:
    """A word that a peer wrote and that cannot be used as a size, an offset or an index: `MoeMkFault`."""

    kind: FaultKind
    peer: int
    value: int
    limit: int
    row: int = 0

    def error(self, rank: int, epoch: int, layer: str, phase: str = "") -> CommError:
        """The error that names peer, phase, value and limit, the same for native kernels and torch.

        phase: for faults that may be found in any.
        """
        of_fault, text = _FAULTS[self.kind]
        phase = of_fault or phase
        filled = text.format(value=self.value, limit=self.limit, row=self.row)
        return CommError(f"epoch {epoch}: {filled}", rank=rank, phase=phase, layer=layer, peer=self.peer)


@dataclass(frozen=True)
class RowFormat:
    """How a row lies at its destination: its values in one place, its tail [scales | K ids | K weights] in another."""

    value_bytes: int
    scale_bytes: int
    top_k: int
    rounding: Rounding = Rounding.NONE
    """What can be made of rows that come in one of ROW_TYPES."""
    scale_dtype: torch.dtype = torch.uint8


@dataclass(frozen=True)
class WindowPlaces:
    """Addresses by rank, as `rank` sees the windows of all: `MoeMkWindows` of csrc/exchange.h. 0: none."""

    rank: int
    values_to: Sequence[int]
    back_to: Sequence[int]
    tails_to: Sequence[int]
    flags_to: Sequence[int]
    values_from: Sequence[int]
    back_from: Sequence[int]
    tails_from: Sequence[int]
    flags_from: Sequence[int]
    sums: Sequence[int]
    most_rows: int
    """That a rank may send to another in one call: words of peers are checked against it."""


def ready() -> Native | None:
    """The kernels, if they came with the wheel or somebody has compiled them: an exchange waits for no compiler."""
    return loaded() if is_compiled() else None


class Exchange:
    """One rank's hold on one set of windows, for one call at a time: what was sent is known until it is added up.

    Structures for the kernels are made once and filled in place, so that a call costs what its bytes cost.
    """

    def __init__(self, native: Native, places: WindowPlaces, *, isa: Isa | None = None) -> None:
        self.native, self.rank, ranks = native, places.rank, len(places.values_to)
        self.isa, numbers = int(native.isa_or_best(isa)), c_int64 * ranks
        self.room, self.counts, self.received = numbers(), numbers(), numbers()
        """Rows by rank. room: that there are pages for at each, set by the owner. counts: sent by the last dispatch.
        received: come with the last flags."""
        self._held: list[Array[c_void_p] | Array[c_int64]] = [
            _addresses(places.values_to), numbers(*places.back_to), _addresses(places.tails_to), self.room,
            _addresses(places.flags_to), _addresses(places.values_from), numbers(*places.back_from),
            _addresses(places.tails_from), _addresses(places.flags_from), _addresses(places.sums),
        ]  # fmt: skip
        self._fault, self.layer, self.epoch = CFault(), "", 0
        """layer: that is served now; epoch: of the call under way. For errors."""
        self.failure_of: Callable[[int, str], CommError] | None = None
        """What a peer has reported, given the phase in which it was seen; None: no more than that it failed."""
        addresses = (addressof(each) for each in (*self._held, self._fault))
        self._windows = CWindows(*addresses, places.most_rows, places.rank, ranks, 0)
        self.windows = byref(self._windows)
        self._token_of, self._tokens = torch.empty(0, dtype=torch.int32, device="cpu"), 0
        self._received_at, self._functions = addressof(self.received), native.functions

    def serve(self, layer: str, layer_number: int) -> None:
        """Begin a call of a layer; the number goes with every flag."""
        self.layer, self._windows.layer = layer, layer_number

    def token_of(self, tokens: int) -> int:
        """The address of [W][T] int32 for the tokens of each rank."""
        if tokens > self._tokens:
            self._token_of = torch.empty(tokens * len(self.counts), dtype=torch.int32, device="cpu")
            self._tokens = tokens
        return self._token_of.data_ptr()

    def arrived(self, epoch: int, microseconds: int) -> list[int] | None:
        """Rows received from each rank, once all flags for rows have come; what goes to itself is known by `dispatch`.

        None: not all have come in time. Raises CommError for a count beyond the window.
        """
        self.received[self.rank], self.epoch = self.counts[self.rank], epoch
        come = self.call("exchange_await", 0, epoch % EPOCHS, microseconds, self._received_at)
        return self.received[:] if come else None

    def received_from(self, counts: Mapping[int, int]) -> list[int]:
        """Rows received from each rank, given those of all peers after a wait by other means that has checked them."""
        for peer, count in counts.items():
            self.received[peer] = count
        return self.received[:]

    def call(self, name: str, *arguments: object) -> bool:
        """Call a kernel on these windows; False: peers are late. Raises CommError for a peer's word out of limits."""
        status = self._functions[name](self.windows, *arguments)
        if status == Status.OK:
            return True
        if status == Status.LATE:
            return False
        if status == Status.PEER_FAULT:
            found = self._fault
            fault = PeerFault(FaultKind(found.kind), found.peer, found.value, found.limit, found.row)
            phase = "combine" if name == "exchange_collect" else "dispatch"
            if fault.kind is FaultKind.PEER_FAILED and self.failure_of is not None:
                raise self.failure_of(fault.peer, phase)
            raise fault.error(self.rank, self.epoch, self.layer, phase)
        self.native.check(name, status)
        return False

    def show(self, epoch: int) -> None:
        """Tell each rank the number of the first of its sums here: they lie in the order of the rows received."""
        self._functions["exchange_show"](self.windows, epoch % EPOCHS, self._received_at)


def _addresses(addresses: Sequence[int]) -> Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)
