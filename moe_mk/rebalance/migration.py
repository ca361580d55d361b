"""Execution of one announced plan: new shares at once, then layer by layer, switched by all ranks together.

    chunk received -> vote -> next chunk ... all received -> stage -> vote -> flip

A vote is one number per rank. All ranks see all votes and so decide alike at the same step. What serves is unchanged
until the last vote; after it, no step can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from moe_mk.comm.failure import Change
from moe_mk.errors import unless_signalled
from moe_mk.flight import Flight
from moe_mk.layer.moe_layer import MoELayer
from moe_mk.placement.balance.moves import plan_moves
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.rebalance.background import BackgroundJob
from moe_mk.rebalance.ledger import Ledger
from moe_mk.rebalance.peers import Peers
from moe_mk.rebalance.planner import PlanMessage
from moe_mk.rebalance.settings import RebalanceSettings
from moe_mk.rebalance.status import IncidentLog
from moe_mk.rebalance.transfer import ExpertBytes, ExpertTransfer, LayerMoves, Link
from moe_mk.weights.expert_weights import SlotWeights


class Vote(IntEnum):
    """The vote of one rank; the highest vote decides."""

    READY = 0
    WAIT = 1
    REFUSE = 2


class Migration:
    """From the maps that serve to those of a message. The same state on all ranks, but for weights and troubles."""

    def __init__(
        self,
        message: PlanMessage,
        ledger: Ledger,
        layers: Sequence[MoELayer],
        peers: Peers,
        settings: RebalanceSettings,
        journal: IncidentLog,
        counts: ExpertBytes,
    ) -> None:
        self.message, self.ledger, self.layers, self.peers = message, ledger, layers, peers
        self.settings, self.journal, self.counts = settings, journal, counts
        self.moves = moves_of(ledger, message)
        self.batches = self._batches()
        """Layers that flip together, first those for which no weights move."""
        self.retries, self.resumes_at, self.waited = 0, 0, 0
        self.dropped, self.flips = False, 0
        self.staged: list[tuple[int, Any]] | None = None
        """(layer, state) of the present batch once it is built."""
        self._begun_at: list[tuple[tuple[int, int], ExpertMap]] = []
        """Generation and placement of each layer of the present batch when its transfer began."""
        self._transfer: ExpertTransfer | None = None
        self._reader: BackgroundJob[dict[int, SlotWeights]] = BackgroundJob(
            "expert reader", limit_s=settings.plan_limit_s
        )

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.dropped or not self.batches

    @property
    def predicted_bytes(self) -> int:
        """Bytes that will travel from rank to rank, all slices of experts counted."""
        whole = {x: self.layers[x].live.export_slot(0).num_bytes * self.peers.tp.size for x in self.moves}
        return sum(each.links * whole[x] for x, each in self.moves.items())

    def steps(self, step: int) -> Flight[None]:
        """One step: land a chunk, post the next, or flip."""
        if self.finished or step < self.resumes_at:
            return
        transfer = self._transfer or self._begin()
        if transfer.in_flight:
            yield from transfer.land()
            self._check_generation(transfer)
            if (yield from self._vote(Vote.REFUSE if transfer.trouble else Vote.READY, step)) is Vote.REFUSE:
                return
            transfer.accept()
        if not transfer.all_sent:
            transfer.post()
            return
        mine = self._stage(transfer)
        yield from self.peers.decide(self._vote(mine, step), self._change(), accepts=Vote.READY.__eq__)

    def drop(self) -> None:
        """End it, with what is in flight."""
        self._reader.forget()
        self._transfer = self.staged = None
        self.dropped = True

    def flip(self) -> None:
        """Serve from the staged batch; every rank does so at the same step. Nothing to do where it has ended."""
        for x, state in self.staged or ():
            self.layers[x].live.flip(state)
            self.ledger.phy2log[x], self.ledger.share[x] = self.message.phy2log[x], self.message.share[x]
        if self.staged is not None:
            self.batches, self.staged, self._transfer, self.flips = self.batches[1:], None, None, self.flips + 1
            self.retries = self.waited = 0

    def _change(self) -> Change:
        """The flip of the present batch, or that of all or some of its layers undone."""
        former = [(x, self.layers[x].state) for x in self.batches[0]]
        slots, share = self.ledger.phy2log.copy(), self.ledger.share.copy()
        batch = self.batches, self.staged, self._transfer, self.flips

        def back() -> None:
            if self.batches is not batch[0]:
                self.batches, self.staged, self._transfer, self.flips = batch
            for (x, state), (_, staged) in zip(former, self.staged or (), strict=False):
                if self.layers[x].expert_map is staged.expert_map:
                    self.layers[x].use(state)
                self.ledger.phy2log[x], self.ledger.share[x] = slots[x], share[x]

        return Change(self.flip, back)

    def _batches(self) -> list[list[int]]:
        old, new = self.ledger.share, self.message.share
        changed = [x for x in range(len(self.layers)) if x in self.moves or not np.array_equal(old[x], new[x])]
        still = [x for x in changed if x not in self.moves]
        return [still] * bool(still) + [[x] for x in changed if x in self.moves]

    def _begin(self) -> ExpertTransfer:
        layer = self.batches[0][0]
        moves = self.moves.get(layer, LayerMoves(layer))
        self._transfer = ExpertTransfer(
            self.peers.ep, self.layers[layer], moves, self.message.plan_id, self.settings.bytes_per_step, self._reader,
            self.counts,
        )  # fmt: skip
        self._begun_at = self._generations()
        return self._transfer

    def _generations(self) -> list[tuple[tuple[int, int], ExpertMap]]:
        return [(self.layers[x].live.generation, self.layers[x].expert_map) for x in self.batches[0]]

    @property
    def is_current(self) -> bool:
        """Whether no caller has replaced weights, backends or the placement since the present batch began."""
        return self._generations() == self._begun_at

    def _check_generation(self, transfer: ExpertTransfer) -> None:
        """Refuse what has arrived for what a caller has replaced since."""
        if not self.is_current:
            transfer.trouble = "weights, backends or the placement were replaced while experts were on their way"

    def _stage(self, transfer: ExpertTransfer) -> Vote:
        """Build the other state of every layer of the batch, once all its experts are here."""
        if transfer.waits_for_reading():
            return Vote.WAIT
        self._check_generation(transfer)
        if transfer.trouble or self.staged is not None:
            return Vote.REFUSE if transfer.trouble else Vote.READY
        try:
            staged = []
            for x in self.batches[0]:
                placed = self.ledger.map_of(self.message.phy2log[x], self.message.share[x])
                arrived = transfer.arrived if x == transfer.moves.layer else None
                staged.append((x, self.layers[x].live.stage(placed, arrived)))
            self.staged = staged
        except unless_signalled(Exception) as problem:
            transfer.trouble = f"staging failed: {type(problem).__name__}: {problem}"
            return Vote.REFUSE
        return Vote.READY

    def _vote(self, mine: Vote, step: int) -> Flight[Vote]:
        """Hear what all ranks say, and back off where one refuses or all have waited long enough."""
        votes = yield from self.peers.gather(mine, "rebalance vote")
        verdict = Vote(max(votes))
        if verdict is Vote.WAIT:
            self.waited += 1
            if self.waited > self.settings.patience:
                verdict = Vote.REFUSE
        if verdict is Vote.REFUSE:
            self._back_off(step, votes)
        return verdict

    def _back_off(self, step: int, votes: Sequence[int]) -> None:
        against = [rank for rank, vote in enumerate(votes) if vote == Vote.REFUSE]
        late = [rank for rank, vote in enumerate(votes) if vote == Vote.WAIT]
        assert self._transfer is not None
        what = self._transfer.trouble or (
            f"ranks {against} refuse what they got"
            if against
            else f"ranks {late} are still reading after {self.waited} steps"
        )
        self._reader.forget()
        self._transfer, self.staged, self.waited = None, None, 0
        self.retries += 1
        name = self.layers[self.batches[0][0]].name
        if self.retries > self.settings.max_retries:
            self.dropped = True
            then = f"plan {self.message.plan_id} is dropped after {self.settings.max_retries} retries of {name!r}"
        else:
            self.resumes_at = step + self.settings.backoff * 2 ** (self.retries - 1)
            then = f"{name!r} serves as before; retry {self.retries} at step {self.resumes_at}"
        self.journal.record(step, what, then)


def moves_of(ledger: Ledger, message: PlanMessage) -> dict[int, LayerMoves]:
    """Return the moves of each layer, in ranks of the group and slots of those ranks.

    Near sources first, in rounds without two transfers at one rank.
    """
    moves = plan_moves(ledger.phy2log, message.phy2log, ledger.topology)
    group = {rank: at for at, rank in enumerate(ledger.living)}
    gpu_P = ledger.topology.gpu_P
    found: dict[int, LayerMoves] = {}
    for x in np.unique(moves.layer).tolist():
        rounds: dict[int, list[Link]] = {}
        reads: list[tuple[int, int, int]] = []
        for index in np.flatnonzero(moves.layer == x).tolist():
            expert, src, dst = int(moves.expert[index]), int(moves.src[index]), int(moves.dst[index])
            to_slot = int(moves.slot[index]) - ledger.first_slot(dst)
            if src < 0:
                reads.append((group[dst], to_slot, expert))
            elif src != dst:
                held = np.flatnonzero((ledger.phy2log[x] == expert) & (gpu_P == src))
                from_slot = int(held[0]) - ledger.first_slot(src)
                link = Link(expert, group[src], group[dst], from_slot, to_slot)
                rounds.setdefault(int(moves.round[index]), []).append(link)
        found[x] = LayerMoves(x, tuple(tuple(rounds[turn]) for turn in sorted(rounds)), tuple(reads))
    return found
