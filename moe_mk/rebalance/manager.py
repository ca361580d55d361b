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

import warnings
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S
from moe_mk.comm.groups import Group, communicator
from moe_mk.errors import CommError, ConfigError
from moe_mk.flight import Flight, wait
from moe_mk.placement.eplb import Topology
from moe_mk.rebalance.hysteresis import Hysteresis
from moe_mk.rebalance.ledger import Ledger
from moe_mk.rebalance.live_layer import LiveLayer
from moe_mk.rebalance.load import LoadHistory, LoadWindow, Phase
from moe_mk.rebalance.metrics import Balance, measure_balance
from moe_mk.rebalance.migration import Migration, Vote
from moe_mk.rebalance.peers import Peers
from moe_mk.rebalance.plan_message import DIGEST, BadPlanMessage, PlanMessage
from moe_mk.rebalance.planner import PlacementPlanner, Planner
from moe_mk.rebalance.regroup import RankState, Regrouping, Rows, after_join, after_loss, fit, settings_digest
from moe_mk.rebalance.settings import RebalanceSettings
from moe_mk.rebalance.status import IncidentLog, RebalanceStatus, RebalanceWarning, State


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
        self.journal = IncidentLog()
        self._planner = PlacementPlanner(self.settings, self.journal, planner)
        self._hysteresis = Hysteresis()
        self._migration: Migration | None = None
        self._load_flight: Flight[Tensor] | None = None
        self._step = self._plan_id = self._flips = 0
        self._predicted_bytes = self._received_bytes = self._read_bytes = 0
        self._reason, self._halted, self._sync_now = "no plan yet", False, False
        self._initial_slots_W: list[int] = self.ledger.topology.slots_W.tolist()
        """Slots of each rank of the machine as it was set up; more of them are given back when ranks join."""
        self._warn_of_fatal_ranks()

    def _warn_of_fatal_ranks(self) -> None:
        fatal = {layer.name: ranks for layer in self.layers if (ranks := _fatal_ranks(layer))}
        if fatal:
            name, ranks = next(iter(fatal.items()))
            more = f" and {len(fatal) - 1} more layers" if len(fatal) > 1 else ""
            warnings.warn(
                f"the loss of ranks {ranks} cannot be repaired: they hold the only copy of experts of layer {name!r}"
                f"{more}, which have nothing to read weights from; call layer.read_from(source, number), or place a "
                "copy of every expert on a second rank (parallel.placement, min_copies=2)",
                RebalanceWarning,
                stacklevel=3,
            )

    @property
    def comm(self) -> Communicator:
        """The ranks that share out the experts."""
        return self.peers.ep

    def step(self, phase: Phase = "decode") -> None:
        """Do one step's share of the work. phase: of the forward before it. Never raises for a failed rebalance."""
        wait(self.steps(phase))

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
            self.journal.record(self._step, str(problem), "rebalancing stops here until rank_lost() brings a new group")

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
            message = PlanMessage.decode(column)
            if message.base != self._flips:
                trouble = f"plan {message.plan_id} follows on flip {message.base}, this rank has made {self._flips}"
        except BadPlanMessage as problem:
            trouble = str(problem)
        digest = column[:DIGEST].cpu().numpy().tobytes()
        if self.peers.tp.size > 1 and not (yield from self.peers.agree(digest, "rebalance vote")):
            trouble = trouble or "ranks were sent different plans; do all of them have the same leader?"
        votes = yield from self.peers.gather(Vote.REFUSE if trouble else Vote.READY, "rebalance vote")
        if max(votes) != Vote.READY:
            against = [rank for rank, vote in enumerate(votes) if vote != Vote.READY]
            self.journal.record(self._step, trouble or f"ranks {against} refuse the plan", "a new plan will be made")
            self._planner.wanted = True
            return
        self._planner.announced(full=message.full)
        self._plan_id, self._reason = message.plan_id, message.reason
        self._migration = Migration(message, self.ledger, self.layers, self.peers, self.settings, self.journal)
        self._predicted_bytes += self._migration.predicted_bytes

    def _migrate(self, migration: Migration) -> Flight[None]:
        self._flips += yield from migration.steps(self._step)
        if migration.finished:
            self._received_bytes += migration.received_bytes
            self._read_bytes += migration.read_bytes
            self._migration = None
            self.balance = measure_balance(self.history.load(self.settings.phase), self.ledger)

    # Ranks are lost, and join.

    def rank_lost(self, ranks: int | Sequence[int], comm: Group | None) -> None:
        """Go on without some ranks. Every one that is left calls this before its next forward.

        ranks: their numbers in the group that served. comm: the group of those that are left, in the same order: a
        process group, a communicator, or None for one rank. Where experts are cut into slices, all ranks with slices of
        the same experts leave together: a part of an expert serves nobody.

        Where `parallel.on_lost_expert` is raise, experts without a copy on the ranks that are left are read again from
        where the layers were loaded before this returns, and slots grow where there are too few. With drop and
        renormalise the layers serve at once without them, and they are read beside serving, step by step. Transports
        are decided anew for the new size.

        Raises RegroupError on every rank, with what each rank has against it, if ranks name different losses or any of
        them cannot go on; CommError if a rank of the new group does not answer. Then nothing has changed, and the same
        call may be made again. While it runs, every layer's experts need room twice in the layout of their backend.
        """
        wait(self.rank_lost_steps(ranks, comm))

    def rank_lost_steps(self, ranks: int | Sequence[int], comm: Group | None) -> Flight[None]:
        """`rank_lost` as a flight."""
        group, living, size = self._view_of(comm), self.ledger.living, self.comm.size
        lost = sorted({ranks} if isinstance(ranks, int) else set(ranks))
        members = tuple(member for rank, member in enumerate(living) if rank not in lost)
        problem = ""
        if not lost or not all(0 <= rank < size for rank in lost):
            problem = f"names ranks {lost} of a group of {size}; name at least one, 0 <= rank < {size}"
        elif self.comm.rank in lost:
            problem = f"names itself, rank {self.comm.rank}, among the lost ranks {lost}"
        elif group.size != len(members):
            problem = f"without ranks {lost}, {len(members)} ranks are left; the new group has {group.size}"
        repairs = self.layers[0].on_lost_expert == "raise"

        def target(rank_states: Sequence[RankState], rows: Rows) -> tuple[Topology, Rows]:
            topology = after_loss(self._machine_of(rank_states)[0], members, num_experts, self.settings.min_copies)
            slots = topology.slots_W[list(members)].tolist()
            return topology, [fit(rows_WL, slots, num_experts, reads=repairs) for rows_WL in rows]

        num_experts = self.ledger.num_experts
        before = self._gone(living[rank] for rank in lost if 0 <= rank < size)
        work = yield from self._regroup(group, members, problem, {"call": "rank_lost"}, target)
        self._commit(work, self._initial_slots_W)
        what = f"ranks {lost} are lost and with them the only copies of {before} experts in {len(self.layers)} layers"
        left = sum(len(layer.expert_map.lost) for layer in self.layers)
        policy = f"on_lost_expert = {self.layers[0].on_lost_expert} holds for {left} experts until they are repaired"
        self.journal.record(self._step, what, policy if left else f"all experts serve in the group of {self.comm.size}")

    def rank_joined(self, ranks: int | Sequence[int], comm: Group | None) -> None:
        """Go on with more ranks. Every rank of the new group calls this between two forwards, new processes included.

        ranks: the numbers of the new processes in the new group. comm: that group; those that served keep their order
        in it. A new process builds its layers for that group, loads them, makes its own manager with equal settings and
        calls this first. Experts that the new ranks hold are served there as well; slots that grew when others were
        lost are given back, and a plan to spread the load follows. Raises as `rank_lost` does.
        """
        wait(self.rank_joined_steps(ranks, comm))

    def rank_joined_steps(self, ranks: int | Sequence[int], comm: Group | None) -> Flight[None]:
        """`rank_joined` as a flight."""
        group, living = self._view_of(comm), self.ledger.living
        new = sorted({ranks} if isinstance(ranks, int) else set(ranks))
        joins, problem, served = group.rank in new, "", iter(living)
        if not new or not all(0 <= rank < group.size for rank in new):
            problem = f"names ranks {new} of a group of {group.size}; name at least one, 0 <= rank < {group.size}"
        elif not joins and group.size != len(living) + len(new):
            problem = f"{len(living)} ranks serve and {len(new)} join; the new group has {group.size}"
        members: tuple[int | None, ...] = ()
        if not joins and not problem:
            members = tuple(None if rank in new else next(served) for rank in range(group.size))
        initial_slots: list[int] = []
        repairs, num_experts = self.layers[0].on_lost_expert == "raise", self.ledger.num_experts

        def target(rank_states: Sequence[RankState], rows: Rows) -> tuple[Topology, Rows]:
            stated = next(each.members for each in rank_states if each.member is not None)
            most = [max(len(rows_WL[rank]) for rows_WL in rows) for rank in new]
            topology, initial_slots[:] = after_join(*self._machine_of(rank_states), stated, most)
            living = np.flatnonzero(topology.alive_W).tolist()
            topology = after_loss(topology, living, num_experts, self.settings.min_copies)
            slots = topology.slots_W[living].tolist()
            return topology, [fit(rows_WL, slots, num_experts, reads=repairs) for rows_WL in rows]

        facts = {"call": "rank_joined", "ranks that join": str(new)}
        work = yield from self._regroup(group, members, problem, facts, target)
        self._commit(work, initial_slots)

    def _regroup(
        self,
        group: Communicator,
        members: tuple[int | None, ...],
        problem: str,
        facts: dict[str, str],
        target: Callable[[Sequence[RankState], Rows], tuple[Topology, Rows]],
    ) -> Flight[Regrouping]:
        topology, serves = self.ledger.topology, bool(members) or facts["call"] == "rank_lost"
        machine = {
            "gpus": topology.gpus,
            "nodes": topology.nodes,
            "slots": topology.slots_W.tolist(),
            "speeds": topology.speed_W.tolist(),
            "alive": topology.alive_W.tolist(),
        }
        rank_state = RankState(
            member=self.ledger.living[self.comm.rank] if serves else None,
            members=members,
            problem=problem,
            must_equal=facts
            | {
                "settings": settings_digest(self.settings),
                "layers": str([layer.name for layer in self.layers]),
                "experts": str(self.ledger.num_experts),
                "on_lost_expert": str([layer.on_lost_expert for layer in self.layers]),
            },
            step=self._step,
            flips=self._flips,
            plan_id=self._plan_id,
            epochs=[layer.epoch for layer in self.layers],
            machine={"topology": machine, "initial_slots": self._initial_slots_W} if serves else None,
        )
        peers = self.peers.renewed(group)
        work = Regrouping(self.layers, peers, self.settings, rank_state, self._follow, target)
        yield from work.steps()
        return work

    def _machine_of(self, rank_states: Sequence[RankState]) -> tuple[Topology, list[int]]:
        """The machines that served, as all ranks that served with them state them, and the slots they started with."""
        stated = [each.machine for each in rank_states if each.machine is not None]
        if any(each != stated[0] for each in stated):
            raise ConfigError(f"ranks come from different groups: {stated}; end the processes and start anew")
        return Topology(**stated[0]["topology"]), list(stated[0]["initial_slots"])

    def _follow(self, flips: int) -> None:
        """Flip what all ranks have voted for: the loss may have come between two ranks' last votes."""
        if flips > self._flips and self._migration is not None and self._migration.staged is not None:
            self._migration.flip()
            self._flips += 1

    def _commit(self, work: Regrouping, initial_slots_W: list[int]) -> None:
        """Serve in the new group. Warnings that are errors here are raised when all is done."""
        assert work.ledger is not None
        raised: list[Warning] = []
        for layer, half in zip(self.layers, work.halves, strict=True):
            try:
                layer.flip(half)
            except Warning as warning:
                raised.append(warning)
        self.ledger, self.peers, self._initial_slots_W = work.ledger, work.peers, initial_slots_W
        self._migration, self._load_flight, self._halted = None, None, False
        self._step = max(each.step for each in work.rank_states)
        self._flips = max(each.flips for each in work.rank_states) + 1
        self._plan_id = max(each.plan_id for each in work.rank_states) + 1
        self._received_bytes += work.received_bytes
        self._read_bytes += work.read_bytes
        self.balance = None
        self._planner.restart()
        self._sync_now = True
        if raised:
            raise raised[0]

    def _gone(self, members: Iterable[int]) -> int:
        """How many experts of all layers are only on these ranks of the machine."""
        dead_P = np.isin(self.ledger.topology.gpu_P, list(members))
        return sum(
            len(set(row[dead_P & (row >= 0)].tolist()) - set(row[~dead_P].tolist())) for row in self.ledger.phy2log
        )

    def _view_of(self, group: Group | None) -> Communicator:
        timeout_s = getattr(self.comm, "timeout_s", DEFAULT_TIMEOUT_S)
        return communicator(group, timeout_s=timeout_s, layer=f"{len(self.layers)} layers")

    # What it is doing.

    def _lost_numbers(self) -> dict[str, float]:
        """What is lost, for a metrics system; nothing while nothing is and was."""
        experts = sum(len(layer.expert_map.lost) for layer in self.layers)
        dropped = sum(layer.dropped_assignments for layer in self.layers)
        return {"lost.experts": experts, "lost.dropped_assignments": dropped} if experts or dropped else {}

    @property
    def state(self) -> State:
        """In one word."""
        if self._halted:
            return "halted"
        if self._migration is not None:
            return "backing off" if self._step < self._migration.resumes_at else "moving"
        if self._planner.busy:
            return "planning"
        return "degraded" if any(layer.expert_map.lost for layer in self.layers) else "watching"

    def status(self) -> RebalanceStatus:
        """Everything worth knowing, at no cost to other ranks; counters are read from the device."""
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
            balance=(self.balance.as_dict() if self.balance else {}) | self._lost_numbers(),
            lost_experts=lost,
            on_lost_expert=self.layers[0].on_lost_expert,
            dropped_assignments=sum(layer.dropped_assignments for layer in self.layers),
            incidents=tuple(self.journal.incidents),
        )


def _fatal_ranks(layer: LiveLayer) -> list[int]:
    """Ranks that hold the only copy of an expert which cannot be read again."""
    placed = layer.expert_map
    if layer.can_read_experts or placed.num_ranks == 1:
        return []
    ranks_E = ({placed.rank_of_physical[p] for p in replicas} for replicas in placed.physical_of_logical)
    return sorted({min(ranks) for ranks in ranks_E if len(ranks) == 1})


def _check(layers: Sequence[LiveLayer]) -> None:
    if not layers:
        raise ConfigError("there are no layers to rebalance; pass at least one")
    slices = {layer.tp.size for layer in layers}
    if len(slices) > 1:
        raise ConfigError(f"experts of the layers are cut into {sorted(slices)} slices; they must all be cut alike")
    ranks = {layer.expert_map.num_ranks for layer in layers} | {layer.ep.size for layer in layers}
    if len(ranks) > 1:
        raise ConfigError(f"layers and their groups have {sorted(ranks)} ranks; they must all have the same")
