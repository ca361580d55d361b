"""A layer's place among its ranks: EP shares out experts, TP slices them, partial sums are added up exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy

from torch import Tensor

from moe_mk.comm.agreement import Loads, agree
from moe_mk.comm.collective import CallGroups
from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import ParallelGroups, communicator
from moe_mk.errors import CommError
from moe_mk.flight import Flight
from moe_mk.trace.recorder import Spans


class Grid(CallGroups):
    """The communicators of one layer on one rank."""

    def __init__(self, groups: ParallelGroups, timeout_s: float, name: str) -> None:
        ep, tp, self.dp = (
            communicator(group, timeout_s=timeout_s, layer=name, kept=groups.kept.setdefault(dimension, {}))
            for dimension, group in (("ep", groups.ep), ("tp", groups.tp), ("dp", groups.dp))
        )
        super().__init__(ep, tp)
        self.name = name
        self.agreed: tuple[int, int] | None = None
        """The epochs in which notes were compared last."""
        self._loads: list[Loads] = [(), ()]
        """What was agreed on in both groups."""

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each dimension, by its name in the settings."""
        return {"ep": self.ep.size, "tp": self.tp.size, "dp": self.dp.size}

    def renewed(self, ep: Communicator | None = None) -> Grid:
        """Return the grid with notes still to be compared. ep: other ranks that share out the experts."""
        other = copy(self)
        other.ep, other.agreed = ep or self.ep, None
        other._loads = list(self._loads) if ep is None else [(), self._loads[1]]  # ranks that join count from 0
        return other

    def agree(self, notes: Callable[[], Mapping[str, str]], loads: int = 0) -> Flight[None]:
        """Compare notes with the other ranks before the first collective, and again after a recovery.

        Nothing to do where they have `agreed` in the current epochs; notes are written otherwise only. The layer gets
        its number in both groups. loads: how often weights were loaded, see `comm.agreement`.
        """
        if self.agreed == (epochs := self.epochs):
            return
        written, problem = notes(), None
        for at, comm in enumerate((self.ep, self.tp)):
            if comm.size > 1:
                comm.layer_number = 0
                try:
                    self._loads[at] = yield from agree(comm, written, self.name, loads, self._loads[at])
                except CommError as error:
                    if not error.harmless_to_peers:
                        raise
                    # Not at once: slices of the same experts, whose EP groups agree, would wait for this rank.
                    problem, written = error, {**written, "agreement over EP": error.detail}
                comm.number_layer()
        if problem is not None:
            raise problem
        self.agreed = epochs

    def late_reduce(self, y_TH: Tensor, spans: Spans, *, partial_over_ep: bool) -> Flight[Tensor]:
        """Sum over every group in which the output is partial: TP slices always, EP where tokens are replicated."""
        for comm, is_partial in ((self.ep, partial_over_ep), (self.tp, self.tp.size > 1)):
            if is_partial:
                with spans.span("late_reduce"):
                    y_TH = yield from comm.all_reduce(y_TH, "late reduce")
        return y_TH

    def share_of(self, num_tokens: int) -> slice:
        """This EP rank's part of rows that all EP ranks have; over the ranks, every row once."""
        return slice(num_tokens * self.ep.rank // self.ep.size, num_tokens * (self.ep.rank + 1) // self.ep.size)
