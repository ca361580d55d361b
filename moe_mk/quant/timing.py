"""Before or after dispatch: when activations are rounded, as a pure function of their scheme and the transport.

A row that carries its own scales can be rounded where it starts: half the bytes travel, and the numbers are the same,
because no scale looks beyond its row. A scale of all rows of a call cannot: which rows those are, the expert knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moe_mk.quant.blocked import WHOLE, BlockedScheme
from moe_mk.quant.tensor import QuantScheme


class Timing(Enum):
    """When activations are rounded."""

    NEVER = "never"
    BEFORE = "before"
    """Before they travel, so that fewer bytes do."""
    AFTER = "after"
    """At their expert: they travel in the layer's dtype."""
    EITHER = "either"
    """Nothing travels from rank to rank in a collective of its own, or the result and the bytes allow both."""


@dataclass(frozen=True)
class Carries:
    """What a transport can put on its wire."""

    families: frozenset[str]
    """Of schemes, "plain" included."""
    whole_scale: bool = False
    """Whether every rank sees every row, so that one scale for all means the same on both sides (all-gather)."""


@dataclass(frozen=True)
class WhenToRound:
    """The answer, and why."""

    timing: Timing
    because: str


def when_to_round(activations: QuantScheme | None, transport: Carries, *, experts_read: bool) -> WhenToRound:
    """Decide for activations of a scheme; None, or a plain one, is never rounded.

    experts_read: whether the experts multiply activations of this scheme as they arrive.
    """
    if not isinstance(activations, BlockedScheme):
        return WhenToRound(Timing.NEVER, "the experts take the layer's dtype")
    name = activations.name
    if not experts_read:
        return WhenToRound(Timing.AFTER, f"the experts do not read {name} rows; they round for themselves, if at all")
    if activations.is_static:
        return _carried(activations, transport, "its scale is known everywhere")
    if activations.rows == WHOLE:
        if transport.whole_scale:
            return WhenToRound(Timing.EITHER, "every rank sees all rows: one scale means the same on both sides")
        return WhenToRound(Timing.AFTER, "its scale depends on rows of other ranks, and does not travel with a row")
    return _carried(activations, transport, "each row carries its own scales")


def _carried(activations: BlockedScheme, transport: Carries, reason: str) -> WhenToRound:
    if activations.family not in transport.families:
        return WhenToRound(Timing.AFTER, f"the transport does not carry {activations.family} rows")
    if transport.whole_scale:
        return WhenToRound(Timing.EITHER, f"{reason}, and all rows are everywhere; before is fewer bytes")
    return WhenToRound(Timing.BEFORE, f"{reason}; fewer bytes travel and nothing changes")
