"""Plain ways of an all-to-all, to measure others against: by messages, and with a table of all routings before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from moe_mk.comm.point_to_point import PointToPoint
from moe_mk.config.problem import Problem
from moe_mk.flight import Flight
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportContext, TransportTraits, Volume


@PREPARE_FINALIZE.register("all_to_all_p2p")
class AllToAllByMessages(AllToAll):
    """The same rows in the same order, each hop as W - 1 messages out and W - 1 in."""

    traits: ClassVar[TransportTraits] = replace(
        AllToAll.traits,
        summary="all-to-all as one message to each rank; a baseline, or where a group has no all-to-all",
        wire=frozenset({"plain", "fp8"}),
    )

    def __init__(self, context: TransportContext) -> None:
        super().__init__(replace(context, comm=PointToPoint(context.comm)))

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """The rows of all-to-all, and a fixed cost for each message."""
        rows = super().volume(problem)
        return replace(rows, collectives=rows.collectives * 2 * (problem.ranks - 1))


@PREPARE_FINALIZE.register("all_to_all_v")
class AllToAllV(AllToAll):
    """Every rank first learns from everybody how many rows go where: an all-gather before each all-to-all.

    The baseline that fused dispatch operators are measured against: two collectives a dispatch, of which the first
    brings W x W numbers to every rank although it needs W of them. Source: AllToAllV in front of the MoE operators of
    Ascend's CANN.
    """

    traits: ClassVar[TransportTraits] = replace(
        AllToAll.traits,
        summary="all-gather of the routing table, then a variable all-to-all; a slow baseline",
        wire=frozenset({"plain", "fp8"}),
    )

    def announce(self, sent: Sequence[int]) -> Flight[list[int]]:
        """Gather the table of rows from each rank to each, and read the own column."""
        comm = self.context.comm
        mine_1W = torch.tensor([list(sent)], dtype=torch.int64, device="cpu")
        table_WW = yield from comm.all_gather(mine_1W, [1] * comm.size, "dispatch counts")
        return [int(count) for count in table_WW[:, comm.rank].tolist()]

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """The rows of all-to-all; the table costs a round trip more than counts alone."""
        rows = super().volume(problem)
        return replace(rows, collectives=rows.collectives + 1)
