"""Rebalancing while serving: count, decide, plan beside the serving thread, move weights gently, flip together.

    manager = RebalanceManager(layers)
    while serving:
        for layer in layers: ...                 one forward of the model
        manager.step("decode")                   between two forwards, on every rank

    watching   one small sum over all ranks every `sync_every` steps; it also tells of a plan the first rank has made
    moving     a chunk of weights and a vote a step, then the flip; see `migration`

Every rank calls `step` equally often. What ranks decide follows from what all of them received, so they decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import CommError, ConfigError
from moe_mk.flight import Flight, land
from moe_mk.rebalance.hysteresis import Hysteresis
from moe_mk.rebalance.ledger import Ledger
from moe_mk.rebalance.live_layer import LiveLayer
from moe_mk.rebalance.load import LoadHistory, LoadWindow, Phase
from moe_mk.rebalance.metrics import Balance, measure_balance
from moe_mk.rebalance.migration import Migration, Vote
from moe_mk.rebalance.notice import DIGEST, BadNotice, Notice
from moe_mk.rebalance.peers import Peers
from moe_mk.rebalance.planner import PlacementPlanner, Planner
from moe_mk.rebalance.settings import RebalanceSettings
from moe_mk.rebalance.status import Journal, RebalanceStatus, State


class RebalanceManager:
    """Keeps the experts of some layers, all of the same kind, evenly spread over the ranks of a group."""

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        settings: RebalanceSettings | None = None,
        *,
        comm: Communicator | None = None,
        tp: Communicator | None = None,
        planner: Planner | None = None,
    ) -> None:
        """comm, tp: how EP ranks, and the ranks with slices of the same experts, talk here; the layers' own groups
        unless given. planner: what the first rank plans with. Raises ConfigError for layers of different sizes.
        """
        self.settings = settings or RebalanceSettings()
        self.layers = tuple(layers)
        _check(self.layers)
        self.peers = Peers(comm or self.layers[0].ep, tp or self.layers[0].tp)
        self.ledger = Ledger.of([layer.expert_map for layer in layers], self.settings.nodes, self.settings.speeds)
        sizes = len(self.layers), self.ledger.num_experts
        self.window = LoadWindow(*sizes, self.layers[0].device)
        self.window.start_from([layer.expert_load for layer in self.layers])
        self.history = LoadHistory(*sizes, decay=self.settings.decay)
        self.balance: Balance | None = None
        self.journal = Journal()
        self._planner = PlacementPlanner(self.settings, self.journal, planner)
        self._hysteresis = Hysteresis()
        self._migration: Migration | None = None
        self._load_flight: Flight[Tensor] | None = None
        self._step = self._plan_id = self._flips = 0
        self._predicted_bytes = self._received_bytes = self._read_bytes = 0
        self._reason, self._halted, self._sync_now = "no plan yet", False, False

    @property
    def comm(self) -> Communicator:
        """The ranks that share out the experts."""
        return self.peers.ep

    def step(self, phase: Phase = "decode") -> None:
        """Do one step's share of the work. phase: of the forward before it. Never raises for a failed rebalance."""
        land(self.steps(phase))

    def plan_soon(self) -> None:
        """Ask for a plan whatever the thresholds say; the first rank makes it and announces it at the sync after."""
        self._planner.wanted = True

    def steps(self, phase: Phase = "decode") -> Flight[None]:
        """`step` as a flight, for several ranks in one process."""
        self._step += 1
        self.window.gather([layer.expert_load for layer in self.layers], phase)
        if self._halted:
            return
        try:
            yield from self._work()
        except CommError as problem:
            self._halted, self._load_flight = True, None
            self.journal.tell(self._step, str(problem), "rebalancing stops here until rank_lost() brings a new group")

    def _work(self) -> Flight[None]:
        if self._load_flight is not None:
            flight, self._load_flight = self._load_flight, None
            yield from self._take_load((yield from flight))
        if self._migration is not None:
            yield from self._migrate(self._migration)
        if self.peers.leads and self._migration is None:
            self._planner.think(self._step, self.history, self.ledger, self.balance, self._plan_id + 1, self._flips)
        if self._step % self.settings.sync_every == 0 or self._sync_now:
            self._sync_now = False
            self._post_load()

    def _post_load(self) -> None:
        """Send this rank's window off; it lands at the next step. The leader adds the size of a plan it has ready."""
        outbox = self._planner.outbox if self.peers.leads and self._migration is None else None
        counts_X = self.window.close().flatten()
        size_X = torch.tensor([0 if outbox is None else len(outbox)], dtype=torch.int64, device=counts_X.device)
        self._load_flight = self.comm.all_reduce(torch.cat((counts_X, size_X)), "rebalance load")
        next(self._load_flight)

    def _take_load(self, total_X: Tensor) -> Flight[None]:
        total_X = total_X.cpu()
        self.history.add(total_X[:-1].view(self.window.counts_2XE.shape))
        load_XE = self.history.load(self.settings.phase)
        self.balance = measure_balance(load_XE, self.ledger)
        if load_XE.any():
            value, limits = self.balance.step_over_ideal, self.settings.thresholds
            self._hysteresis, fires = self._hysteresis.observe(value, self._step, limits)
            self._planner.wanted |= fires
        size = int(total_X[-1])
        if self.peers.tp.size > 1:  # only the EP group of the leader has heard of it
            size = max((yield from self.peers.tp.gather_count(size, "rebalance load")))
        if size:
            yield from self._receive_plan(size)

    def _receive_plan(self, size: int) -> Flight[None]:
        """Get the plan from the leader, and follow it if every rank got it whole and stands where it starts from."""
        column = yield from self.peers.from_leader(self._planner.outbox, size, self.layers[0].device, "rebalance plan")
        self._planner.outbox, trouble = None, ""
        try:
            notice = Notice.decode(column)
            if notice.base != self._flips:
                trouble = f"plan {notice.plan_id} follows on flip {notice.base}, this rank has made {self._flips}"
        except BadNotice as problem:
            trouble = str(problem)
        digest = column[:DIGEST].cpu().numpy().tobytes()
        if self.peers.tp.size > 1 and not (yield from self.peers.agree(digest, "rebalance vote")):
            trouble = trouble or "ranks were sent different plans; do all of them have the same leader?"
        votes = yield from self.peers.gather(Vote.REFUSE if trouble else Vote.READY, "rebalance vote")
        if max(votes) != Vote.READY:
            against = [rank for rank, vote in enumerate(votes) if vote != Vote.READY]
            self.journal.tell(self._step, trouble or f"ranks {against} refuse the plan", "a new plan will be made")
            self._planner.wanted = True
            return
        self._planner.announced(full=notice.full)
        self._plan_id, self._reason = notice.plan_id, notice.reason
        self._migration = Migration(notice, self.ledger, self.layers, self.peers, self.settings, self.journal)
        self._predicted_bytes += self._migration.predicted_bytes

    def _migrate(self, migration: Migration) -> Flight[None]:
        self._flips += yield from migration.steps(self._step)
        if migration.finished:
            self._received_bytes += migration.received_bytes
            self._read_bytes += migration.read_bytes
            self._migration = None
            self.balance = measure_balance(self.history.load(self.settings.phase), self.ledger)

    # A rank dies.

    def rank_lost(self, rank: int, comm: Communicator) -> None:
        """Go on without a rank. Its shares go to the other replicas at once; a plan to repair the rest follows.

        rank: its number in the group that served. comm: the group of those that are left, in the same order. Every one
        of them calls this before its next forward. Where experts are cut into slices, all ranks with slices of the same
        experts leave together: a part of an expert serves nobody. Assignments of experts that only the dead rank held
        go nowhere until those are read again from where the layers were loaded; `status().lost_experts` lists them.
        """
        land(self.rank_lost_steps(rank, comm))

    def rank_lost_steps(self, rank: int, comm: Communicator) -> Flight[None]:
        """`rank_lost` as a flight."""
        if comm.size != self.comm.size - 1:
            raise ConfigError(
                f"without rank {rank}, {self.comm.size - 1} ranks are left; the new group has {comm.size}"
            )
        # The death may have come between two ranks' last votes: who has not flipped yet follows those who have.
        peers = self.peers.renewed(comm)
        flips = yield from peers.gather(self._flips, "rebalance flips")
        if max(flips) > self._flips and self._migration is not None:
            self._migration.flip()
            self._flips += 1
        self.peers, self._migration, self._load_flight, self._halted = peers, None, None, False
        self.ledger.lose(self.ledger.living[rank])
        gone = [self._drop_rank(x, layer, rank) for x, layer in enumerate(self.layers)]
        self._planner.restart()
        self._sync_now = True
        what = f"rank {rank} is lost and with it the only copies of {sum(map(len, gone))} experts in {len(gone)} layers"
        self.journal.tell(self._step, what, "its shares went to other replicas; a repair is being planned")

    def _drop_rank(self, x: int, layer: LiveLayer, rank: int) -> frozenset[int]:
        left = layer.expert_map.without_rank(rank)
        layer.flip(layer.stage(left, ep=self.comm))
        alive_P = self.ledger.topology.alive_W[self.ledger.topology.gpu_P]
        self.ledger.share[x, alive_P] = np.asarray(left.shares, np.float32)
        return left.lost

    # What it is doing.

    @property
    def state(self) -> State:
        """In one word."""
        if self._halted:
            return "halted"
        if self._migration is not None:
            return "backing off" if self._step < self._migration.resumes_at else "moving"
        return "planning" if self._planner.busy else "watching"

    def status(self) -> RebalanceStatus:
        """Everything worth knowing, at no cost to other ranks."""
        migration = self._migration
        lost = {layer.name: tuple(sorted(layer.expert_map.lost)) for layer in self.layers if layer.expert_map.lost}
        return RebalanceStatus(
            state=self.state,
            step=self._step,
            epochs=tuple(layer.epoch for layer in self.layers),
            plan_id=self._plan_id,
            reason=self._planner.reason or self._reason,
            layers_left=sum(map(len, migration.batches)) if migration else 0,
            predicted_bytes=self._predicted_bytes,
            received_bytes=self._received_bytes + (migration.received_bytes if migration else 0),
            read_bytes=self._read_bytes + (migration.read_bytes if migration else 0),
            retries=migration.retries if migration else 0,
            resumes_at=migration.resumes_at if migration and self._step < migration.resumes_at else None,
            balance=self.balance.as_dict() if self.balance else {},
            lost_experts=lost,
            incidents=tuple(self.journal.incidents),
        )


def _check(layers: Sequence[LiveLayer]) -> None:
    if not layers:
        raise ConfigError("there are no layers to rebalance; pass at least one")
    slices = {layer.tp.size for layer in layers}
    if len(slices) > 1:
        raise ConfigError(f"experts of the layers are cut into {sorted(slices)} slices; they must all be cut alike")
    ranks = {layer.expert_map.num_ranks for layer in layers} | {layer.ep.size for layer in layers}
    if len(ranks) > 1:
        raise ConfigError(f"layers and their groups have {sorted(ranks)} ranks; they must all have the same")
