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

from collections.abc import Sequence
from ctypes import Array, addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch

from moe_mk.kernels.native.exchange_abi import CWindows
from moe_mk.kernels.native.library import Isa, Native
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
        self.windows = byref(CWindows(*(addressof(each) for each in self._held), places.rank, ranks))
        self._token_of, self._tokens = torch.empty(0, dtype=torch.int32, device="cpu"), 0
        self._received_at, self._functions = addressof(self.received), native.functions

    def token_of(self, tokens: int) -> int:
        """The address of [W][T] int32 for the tokens of each rank."""
        if tokens > self._tokens:
            self._token_of = torch.empty(tokens * len(self.counts), dtype=torch.int32, device="cpu")
            self._tokens = tokens
        return self._token_of.data_ptr()

    def arrived(self, epoch: int, microseconds: int) -> list[int] | None:
        """Rows received from each rank, once all flags for rows have come; what goes to itself is known by `dispatch`.

        None: not all have come in time.
        """
        self.received[self.rank] = self.counts[self.rank]
        waiting = self._functions["exchange_await"]
        behind = waiting(self.windows, 0, epoch % EPOCHS, microseconds, self._received_at)
        return None if behind else self.received[:]

    def show(self, epoch: int) -> None:
        """Tell each rank the number of the first of its sums here: they lie in the order of the rows received."""
        self._functions["exchange_show"](self.windows, epoch % EPOCHS, self._received_at)


def _addresses(addresses: Sequence[int]) -> Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)
