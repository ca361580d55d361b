"""The way from one pipeline stage to the next, tile by tile.

    stage 0, a rank    C0 home  S0 ...  C1 home  S1 ...        a finished tile leaves while others still come home
    stage 1, its twin           x0 here          x1 here       and the next stage begins with what has arrived

A link is a group of two: a rank, and the one in the same place of the next stage. Its messages meet nobody else's, so
they may overlap with anything that goes on inside a stage. How many tiles, and of which sizes, both ends know: the next
stage has the tokens of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight

PHASE = "next stage"


@dataclass(frozen=True)
class StageLink:
    """Two ranks: 0 is of the earlier stage and sends, 1 is of the later one and receives.

    Raises ConfigError for a group of any other size.
    """

    comm: Communicator

    def __post_init__(self) -> None:
        if self.comm.size != 2:
            raise ConfigError(
                f"a link between two stages is a group of 2 ranks, this one has {self.comm.size}; make one for each "
                "pair of neighbours in rank_groups(...)['pp']"
            )

    def send(self, tile: int, y_XH: Tensor) -> Flight[None]:
        """Send a tile; the flight lands when it may be forgotten. An `Onward` of `runner.tiles`."""
        del tile  # tiles arrive in the order in which they are sent
        yield from self.comm.all_to_all(y_XH, [0, len(y_XH)], [0, 0], PHASE)

    def receive(self, num_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Flight[Tensor]:
        """The next tile, (num_tokens, hidden)."""
        nothing_XH = torch.empty((0, hidden), dtype=dtype, device=device)
        return (yield from self.comm.all_to_all(nothing_XH, [0, 0], [num_tokens, 0], PHASE))


def tile_sizes(num_tokens: int, tiles: int) -> Sequence[int]:
    """Tokens of each tile, as `runner.tiles.cut` makes them."""
    least, more = divmod(num_tokens, tiles)
    return [least + (tile < more) for tile in range(tiles)]
