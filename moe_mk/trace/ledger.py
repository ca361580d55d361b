"""What really ran: which object did which stage, how often and on how many bytes. Written by the code that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One object at one stage."""

    calls: int = 0
    num_bytes: int = 0
    """Of rows that went in and came out, values and scales."""


class Ledger:
    """Entries by (stage, class). Sizes of tensors only: nothing waits for a device."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, type], list[int]] = {}

    @property
    def entries(self) -> Mapping[tuple[str, type], Entry]:
        """What has run, in the order in which it first did."""
        return {key: Entry(*sums) for key, sums in self._sums.items()}

    def ran(self, stage: str, who: type, num_bytes: int) -> None:
        """Note that an object of a class has done a stage."""
        sums = self._sums.get((stage, who))
        if sums is None:
            sums = self._sums[stage, who] = [0, 0]
        sums[0] += 1
        sums[1] += num_bytes

    def clear(self) -> None:
        """Begin anew."""
        self._sums.clear()
