"""The legs of a two-level exchange: which rows went where, and how their sums are added up on the way home."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leg:
    """One exchange of rows: which of the held rows went where, and how many came back from where."""

    row_X: Tensor
    """int64. The held row behind each row sent, peer by peer, ascending inside one."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    held: int
    """Rows that were there to choose from."""


@dataclass(frozen=True)
class WayHome:
    """How the sums of one piece find back: the leg between nodes, then the leg inside this one."""

    between: Leg
    within: Leg


def joined(parts: list[Tensor]) -> Tensor:
    """One behind the other; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def added(back_XH: Tensor, within: Leg) -> Tensor:
    """Sums of each held row over the ranks of this node, in rank order, in f32."""
    total_XH = torch.zeros((within.held, back_XH.shape[1]), dtype=torch.float32, device=back_XH.device)
    sizes = list(within.sent)
    for row_X, part_XH in zip(torch.split(within.row_X, sizes), torch.split(back_XH, sizes), strict=True):
        total_XH[row_X] += part_XH  # a row is at most once in each part
    return total_XH
