"""How a window of the one-sided transport is laid out: who writes what where, known to all without a word.

    data of a window   [ the rows as experts read them, W M of values | values of W - 2 sources, M each |
                         tails of W sources: scales, ids, weights | sums of W M rows | notes of W ranks ]

Experts read received rows one behind the other in rank order, and how many each source brings is known only when they
are there. The owner and one neighbour (the rank after it; before it for the last rank) need not know: the rows of the
lower of the two end at a seam, those of the higher begin there. Both write where experts read. The rows of other
sources wait in a region of their own and are copied to their place around these; between two ranks nothing is.

    owner 1 of 4                      seam
    ... [ rows of 0, copied | own rows | rows of 2 | rows of 3, copied ] ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_mk.comm.symmetric.heap import NOTE_BYTES, PAGE_BYTES, aligned


@dataclass(frozen=True)
class RegionShape:
    """Bytes of a row in each part of a window, and how many rows a source brings at most."""

    rows: int
    value_bytes: int
    tail_bytes: int
    sum_bytes: int

    def data_bytes(self, ranks: int) -> int:
        """All parts of one window."""
        return self.notes_at(ranks) + ranks * NOTE_BYTES

    def notes_at(self, ranks: int) -> int:
        """Where a rank that fails writes the cause, in every window."""
        return aligned(self.sums_at(ranks) + ranks * self.rows * self.sum_bytes, NOTE_BYTES)

    def values_at(self, ranks: int, owner: int, source: int, count: int) -> int:
        """Where a source writes the values of `count` rows in the window of `owner`."""
        at, back = self.place(ranks, owner, source)
        return at - count * back

    def place(self, ranks: int, owner: int, source: int) -> tuple[int, int]:
        """Where a source writes in the window of `owner`, and how many bytes it goes back for every row it brings."""
        left = lower_of_pair(ranks, owner)
        if source in (left, left + 1):
            return self.seam_at(ranks, owner), self.value_bytes if source == left else 0
        number = source if source < left else source - 2
        return self._apart_at(ranks) + number * self._region(self.value_bytes), 0

    def tails_at(self, ranks: int, source: int) -> int:
        """Where a source writes the tails of its rows, in every window."""
        apart = max(ranks - 2, 0) * self._region(self.value_bytes)
        return self._apart_at(ranks) + apart + source * self._region(self.tail_bytes)

    def sums_at(self, ranks: int) -> int:
        """Where the owner has its sums, of all received rows one behind the other."""
        return self.tails_at(ranks, ranks)

    def rows_at(self, ranks: int, owner: int, counts: Sequence[int]) -> int:
        """Where the rows of all sources begin in the window of `owner`, once their counts are known."""
        before = sum(counts[: lower_of_pair(ranks, owner) + 1])
        return self.seam_at(ranks, owner) - before * self.value_bytes

    def seam_at(self, ranks: int, owner: int) -> int:
        """Where rows end that were written backwards, and those behind them begin."""
        return (lower_of_pair(ranks, owner) + 1) * self.rows * self.value_bytes

    def _apart_at(self, ranks: int) -> int:
        return aligned(ranks * self.rows * self.value_bytes, PAGE_BYTES)

    def _region(self, row_bytes: int) -> int:
        return aligned(self.rows * row_bytes, PAGE_BYTES)


def lower_of_pair(ranks: int, owner: int) -> int:
    """The lower of the two ranks whose rows meet at the seam of an owner's window; the other is the next rank."""
    return min(owner, ranks - 2)
