"""Which step of which tile needs what, said apart from whoever executes it.

A tile is a part of a rank's tokens. Its journeys have two halves each, issued (i) and received (r), by the names of
`schedule`: D dispatch, M experts, C combine, and S onward to the next pipeline stage.

    step   needs                                        phase    0        1        2                3
    D3i    C0r, the room of a tile that is home         carry    D0i D0r  D1i D1r  C0i D2i C0r D2r  C1i D3i C1r D3r
    D3r    D3i                                          experts           M0       M1               M2
    M3     D3r                                          onward                                      S0i S0r
    C3i    M3
    C3r    C3i
    S3i    C3r

So tile 2 goes out and tile 0 comes home while tile 1 is multiplied: three tiles are open, two journeys under way. A
transport that keeps less open gets a plan of depth 2 (the next tile goes out while one is multiplied) or 1 (nothing
overlaps). Lanes run side by side; within one, steps keep their order, which is the same on all ranks whatever ends
first. Sources of the idea: FlashMoE (arXiv 2506.04667) and COMET (arXiv 2502.19811), where tiles of a fused kernel wait
for flags instead of for a whole dispatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from moe_mk.errors import ConfigError

Kind = Literal["D", "M", "C", "S"]
Lane = Literal["carry", "experts", "onward"]
LANES: Mapping[Kind, Lane] = {"D": "carry", "M": "experts", "C": "carry", "S": "onward"}
DEEPEST = 3

_PHASES: Mapping[int, tuple[tuple[Kind, str, int], ...]] = {
    1: (("D", "i", 0), ("D", "r", 0), ("M", "", 0), ("C", "i", 0), ("C", "r", 0), ("S", "r", 1), ("S", "i", 0)),
    2: (("D", "i", 0), ("M", "", 1), ("D", "r", 0), ("C", "i", 1), ("C", "r", 1), ("S", "r", 2), ("S", "i", 1)),
    3: (
        ("C", "i", 2), ("D", "i", 0), ("M", "", 1), ("C", "r", 2), ("D", "r", 0), ("S", "r", 3), ("S", "i", 2),
    ),
}  # fmt: skip
"""Steps of one phase by depth: kind, half, and how many tiles behind the phase's number."""


@dataclass(frozen=True)
class Step:
    """A step of one tile."""

    kind: Kind
    half: str
    """i issued, r received; empty for experts, which do not travel."""
    tile: int

    @property
    def journey(self) -> str:
        """What both halves have in common, such as D2."""
        return f"{self.kind}{self.tile}"

    def __str__(self) -> str:
        return self.journey + self.half


@dataclass(frozen=True)
class TilePlan:
    """The steps of all tiles and what each needs. Pure data, equal on all ranks for equal arguments."""

    tiles: int
    depth: int = DEEPEST
    """The most tiles that are dispatched and not yet home."""
    onward: bool = False
    """Whether tiles that are home are sent on."""

    def __post_init__(self) -> None:
        if self.tiles < 1 or self.depth not in _PHASES:
            raise ConfigError(f"{self.tiles} tiles, {self.depth} deep: at least one tile, and depth 1, 2 or {DEEPEST}")

    @cached_property
    def order(self) -> tuple[Step, ...]:
        """All steps as one thread takes them: journeys are issued before experts begin, received after."""
        steps = []
        for phase in range(self.tiles + self.depth):
            for kind, half, behind in _PHASES[self.depth]:
                tile = phase - behind
                if 0 <= tile < self.tiles and (kind != "S" or self.onward):
                    steps.append(Step(kind, half, tile))
        return tuple(steps)

    @cached_property
    def lanes(self) -> Mapping[Lane, tuple[Step, ...]]:
        """The same steps by who takes them; lanes without steps are left out."""
        of_lane: dict[Lane, list[Step]] = {}
        for step in self.order:
            of_lane.setdefault(LANES[step.kind], []).append(step)
        return {lane: tuple(steps) for lane, steps in of_lane.items()}

    def needs(self, step: Step) -> tuple[Step, ...]:
        """The steps that must have ended before this one begins, beside those before it in its lane."""
        tile = step.tile
        match step.kind, step.half:
            case "D", "i":
                return (Step("C", "r", tile - self.depth),) if tile >= self.depth else ()
            case "M", _:
                return (Step("D", "r", tile),)
            case "C", "i":
                return (Step("M", "", tile),)
            case "S", "i":
                return (Step("C", "r", tile),)
            case kind, _:
                return (Step(kind, "i", tile),)


def deepest(open_calls: int | None, in_flight: int | None) -> int:
    """The depth that a transport allows.

    open_calls: calls that may be dispatched and not yet home. in_flight: operations issued and not yet received. None
    is as many as one likes.
    """
    for depth, operations in ((DEEPEST, 2), (2, 1)):
        if (open_calls is None or open_calls >= depth) and (in_flight is None or in_flight >= operations):
            return depth
    return 1
