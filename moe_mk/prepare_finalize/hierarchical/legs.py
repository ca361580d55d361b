"""The legs of a two-level exchange: which rows went where, and from where rows that a relay holds are handed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moe_mk.comm.communicator import offsets
from moe_mk.kernels.native.library import Native
from moe_mk.prepare_finalize.packing import ID_BYTES, SMALL_BYTES, WEIGHT_BYTES, Rows, side_by_side
from moe_mk.prepare_finalize.rows.exchange import Write
from moe_mk.prepare_finalize.rows.sums import Part, add_up, cut, total
from moe_mk.quant.wire import from_bytes


@dataclass(frozen=True)
class Leg:
    """One exchange of rows: which of the held rows went where, and how many came back from where."""

    row_X: Tensor
    """int64. The held row behind each row sent, peer by peer, ascending inside one."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    held: int
    """Rows that were there to choose from."""

    @classmethod
    def of(
        cls, row_of: Mapping[int, Tensor], sent: Sequence[int], received: Sequence[int], held: int, none: Tensor
    ) -> Leg:
        """From the rows for each peer that is spoken to; none: what there is for nobody, int64 (0)."""
        return cls(torch.cat([none, *(row_of[peer] for peer in sorted(row_of))]), tuple(sent), tuple(received), held)


@dataclass(frozen=True)
class DispatchHandle:
    """How the sums of one piece find back: the leg between nodes, then the leg inside this one."""

    between: Leg
    within: Leg


@dataclass(frozen=True)
class Held:
    """Rows that a relay has, numbered through: of earlier nodes, of its own tokens, of later nodes. None is moved."""

    pieces: tuple[Rows, ...]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    @classmethod
    def by_node(cls, own: Rows, landed: Rows, between: Leg, rank: int) -> Held:
        """What a rank holds once rows of equal places have crossed to it."""
        before = sum(between.received[:rank])
        return cls((landed[:before], own, landed[before:]))

    def ids(self, top_k: int) -> Tensor:
        """(X, K) int32: the physical experts of each row."""
        first = self.pieces[0].widths[1] - top_k * (ID_BYTES + WEIGHT_BYTES)
        tails_XB = torch.cat([piece.tails[:, first : first + top_k * ID_BYTES] for piece in self.pieces])
        return from_bytes(tails_XB, torch.int32)

    def writer(self, row_X: Tensor, counts: Sequence[int]) -> Write:
        """What writes held rows of these numbers, ascending inside the rows of each rank. counts: rows by rank."""
        if sum(map(len, self.pieces)) * sum(self.pieces[0].widths) < SMALL_BYTES:
            whole = joined(self.pieces)
            return lambda to, span: to.put(whole, row_X[span])
        starts = offsets([len(piece) for piece in self.pieces])
        edges = torch.tensor(starts, dtype=row_X.dtype, device=row_X.device)
        at = offsets(counts)

        def write(to: Rows, span: slice) -> None:
            for first, last in pairwise(at):
                if span.start <= first < last <= span.stop:
                    write_rank(to[first - span.start : last - span.start], row_X[first:last])

        def write_rank(to: Rows, chosen_X: Tensor) -> None:
            cuts = torch.searchsorted(chosen_X, edges).tolist()
            for piece, start, (first, last) in zip(self.pieces, starts, pairwise(cuts), strict=False):
                if first < last:
                    to[first:last].put(piece, chosen_X[first:last] - start)

        return write


def handed_on(parts: Sequence[Part], own: slice, going_XH: Tensor, native: Native | None) -> list[Part]:
    """Write what parts add up to for tokens of others to `going_XH`; what they have for those at `own`, to be added.

    Rounded to what travels only where it travels.
    """
    end = going_XH.shape[0] + own.stop - own.start
    if end * going_XH.shape[1] * torch.float32.itemsize < SMALL_BYTES:  # fewer operations count for more
        sums_XH = total([parts], (end, going_XH.shape[1]), going_XH.device)
        torch.cat((sums_XH[: own.start], sums_XH[own.stop :]), out=going_XH)
        numbers_T = torch.arange(own.stop - own.start, dtype=torch.int64, device=going_XH.device)
        return [Part(sums_XH[own], numbers_T)]
    earlier, mine, later = cut([0, own.start, own.stop, end], parts)
    add_up([earlier], going_XH[: own.start], native)
    add_up([later], going_XH[own.start :], native)
    return mine


def wanted(place_XK: Tensor, peer_of: Mapping[int, int]) -> dict[int, Tensor]:
    """For each peer the rows that name its place, the key of `peer_of`."""
    return {peer: torch.nonzero((place_XK == place).any(dim=1)).flatten() for place, peer in peer_of.items()}


def joined(parts: Sequence[Rows]) -> Rows:
    """One behind the other; a single one as it is."""
    if len(parts) == 1:
        return parts[0]
    packed = [part.packed for part in parts if part.packed is not None]
    if len(packed) == len(parts):
        return side_by_side(torch.cat(packed), parts[0].widths[0])
    return Rows(torch.cat([part.values for part in parts]), torch.cat([part.tails for part in parts]))
