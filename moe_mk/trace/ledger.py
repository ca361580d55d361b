"""What really ran: which object did which stage, how often and on how many bytes. Written by the code that runs."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Entry:
    """One object at one stage."""

    calls: int = 0
    num_bytes: int = 0
    """Of rows that went in and came out, values and scales."""


class Ledger:
    """Entries by (stage, class). Sizes of tensors only: nothing waits for a device."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, type], Entry] = {}

    def ran(self, stage: str, who: type, num_bytes: int) -> None:
        """Note that an object of a class has done a stage."""
        held = self.entries.get((stage, who), Entry())
        self.entries[stage, who] = replace(held, calls=held.calls + 1, num_bytes=held.num_bytes + num_bytes)

    def clear(self) -> None:
        """Begin anew."""
        self.entries.clear()
