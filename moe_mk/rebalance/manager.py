"""Online rebalancing: count expert loads, plan in the background, move weights in chunks, switch all ranks together.

    manager = RebalanceManager(layers)
    while serving:
        for layer in layers: ...                 one forward of the model
        manager.step("decode")                   between two forwards, on every rank
    manager.close()                              or: with RebalanceManager(layers) as manager

    watching   one small all-reduce every `sync_every` steps, which also announces a plan made by the first rank
    moving     one chunk of weights and one vote a step, then the switch; see `migration`

Every rank calls `step` equally often. Decisions depend only on data that all ranks receive, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Self

import numpy as np
import torch
from torch import Tensor

from moe_mk.comm.agreement import digest
from moe_mk.comm.collective import CallGroups, collective
from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S
from moe_mk.comm.failure import Change, GroupStatus
from moe_mk.comm.groups import Group, communicator
from moe_mk.comm.single import SingleRank
from moe_mk.errors import CommError, ConfigError
from moe_mk.flight import Flight, wait
from moe_mk.layer.moe_layer import MoELayer
from moe_mk.placement.eplb import Topology
from moe_mk.rebalance.ledger import Balance, Ledger, measure_balance
from moe_mk.rebalance.load import LoadHistory, LoadWindow, Phase, number_of
from moe_mk.rebalance.migration import Migration, Vote
from moe_mk.rebalance.peers import Peers, expect_equal_groups
from moe_mk.rebalance.planner import DIGEST, BadPlanMessage, PlacementPlanner, PlanMessage, Planner
from moe_mk.rebalance.regroup import RankState, Regrouping, Rows, after_join, after_loss, fit, machine_of
from moe_mk.rebalance.settings import Hysteresis, RebalanceSettings
from moe_mk.rebalance.status import IncidentLog, RebalanceStatus, State, warn_of_fatal_ranks
from moe_mk.rebalance.transfer import ExpertBytes


def _groups_of(manager: RebalanceManager, /, *_: object, **__: object) -> CallGroups:
    return manager.peers


def _new_groups_of(manager: RebalanceManager, ranks: object, comm: Group | None) -> CallGroups:
    return manager.peers_in(comm)


class RebalanceManager:
    """Balances the experts of layers of equal sizes over the ranks of a group."""

    def __init__(
        self,
        layers: Sequence[MoELayer],
        settings: RebalanceSettings | None = None,
        *,
        comm: Communicator | None = None,
        tp: Communicator | None = None,
        planner: Planner | None = None,
    ) -> None:
        """comm, tp: communicators of the EP ranks and of the ranks with slices of the same experts; the layers' groups
        by default. planner: the placement function of the first rank. Raises ConfigError for layers of different sizes.
        """
        self.settings = settings or RebalanceSettings()
        self.layers = tuple(layers)
        expect_equal_groups(self.layers)
        self.peers = Peers(comm or self.layers[0].ep, tp or self.layers[0].tp)
        self._maps = [layer.expert_map for layer in layers]
        """Placements that the ledger follows, as the last step has found them."""
        self.ledger = Ledger.of(self._maps, self.settings.nodes, self.settings.speeds)
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
        self._epochs = self.peers.epochs
        self._formed: GroupStatus | None = None
        """That of the group that `rank_lost` or `rank_joined` has formed last."""
        self._step = self._plan_id = self._flips = 0
        self._predicted_bytes, self._counts = 0, ExpertBytes()
        self._reason, self._halted, self._sync_now, self._closed = "no plan yet", False, False, False
        self._initial_slots_W: list[int] = self.ledger.topology.slots_W.tolist()
        """Initial slots of each rank; slots added after a loss are released when ranks join."""
        warn_of_fatal_ranks(self.layers)

    @property
    def comm(self) -> Communicator:
        """The ranks that share out the experts."""
        return self.peers.ep

    @collective(_groups_of)
    def step(self, phase: Phase = "decode") -> None:
        """Advance by one step. phase: of the preceding forward. A failed rebalance is recorded and never raises.

        The first step after the ranks have recovered from a failed call drops what was under way before it. Raises
        ConfigError after `close`.
        """
        wait(self.steps(phase))

    def close(self) -> None:
        """End rebalancing, on every rank between the same two forwards. The layers serve on with their placements.

        Nothing is sent or waited for: a sum of loads or a chunk of weights that is in flight is dropped. May be called
        again, also after a peer was lost; a manager that is deleted or outlives its group leaves nothing either.
        """
        self._drop_work()
        self._planner.restart(wanted=False)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _drop_work(self) -> None:
        """Drop what is in flight: peers that drop it too go on, and those that do not meet another call."""
        if self._migration is not None:
            self._migration.drop()
        self._migration = self._load_flight = None

    def plan_soon(self) -> None:
        """Request a plan regardless of the thresholds; the first rank makes it and announces it at the next sync."""
        self._planner.wanted = True

    def steps(self, phase: Phase = "decode") -> Flight[None]:
        """`step` as a flight, for several ranks in one process."""
        self._expect_open()
        number_of(phase)  # raises ConfigError
        try:
            yield from self._steps(phase)
        finally:
            self.journal.warn()

    @collective(_groups_of)
    def _steps(self, phase: Phase) -> Flight[None]:
        self._step += 1
        self.window.gather([layer.expert_load for layer in self.layers], phase)
        if self._halted and self._epochs == self.peers.epochs:
            return
        try:
            if self._epochs != self.peers.epochs:
                yield from self._resume()
            self._follow_callers()
            yield from self._work()
        except CommError as problem:
            self._halted, self._load_flight = True, None
            then = "rebalancing stops here until recover() of a layer, or until rank_lost() brings a new group"
            self.journal.record(self._step, str(problem), then)

    def _expect_open(self) -> None:
        if self._closed:
            raise ConfigError("the manager is closed; create another one for these layers")

    def _follow_callers(self) -> None:
        """Continue from placements that callers have set since the last step, on every rank; see `set_placement`."""
        seen, self._maps = self._maps, [layer.expert_map for layer in self.layers]
        slots, shares = self.ledger.phy2log, self.ledger.share
        if all(
            now is before or now == self.ledger.map_of(slots[x], shares[x])
            for x, (before, now) in enumerate(zip(seen, self._maps, strict=True))
        ):
            return
        self.ledger = self.ledger.placed(self._maps)
        if self.ledger.topology.alive_W.all():
            self._initial_slots_W = self.ledger.topology.slots_W.tolist()
        self._planner.restart(wanted=self._planner.wanted or self._planner.busy or self._migration is not None)
        self._drop_work()
        self.balance, self._sync_now = None, True

    def _resume(self) -> Flight[None]:
        """Go on after a recovery, from where the furthest rank stood: the failed call may have ended on some ranks."""
        self._epochs = self.peers.epochs
        yield from self.peers.settle()
        self._count_flips()
        self._plan_id = max((yield from self.peers.gather(self._plan_id, "rebalance resume")))
        self._step = max((yield from self.peers.gather(self._step, "rebalance resume")))
        self._planner.restart(wanted=self._planner.wanted or self._planner.busy or self._migration is not None)
        self._drop_work()
        self._halted, self._sync_now = False, True

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
        """Start the all-reduce of this window's loads, completed at the next step, with the size of a finished plan."""
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
        if self.peers.tp.size > 1:  # only the leader's EP group has received the size
            size = max((yield from self.peers.tp.gather_count(size, "rebalance load")))
        if size:
            yield from self._receive_plan(size)

    def _receive_plan(self, size: int) -> Flight[None]:
        """Receive the leader's plan; start it if all ranks received it and serve the placement it starts from."""
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
            trouble = trouble or "ranks received different plans; check that all of them have the same leader"
        votes = yield from self.peers.gather(Vote.REFUSE if trouble else Vote.READY, "rebalance vote")
        if max(votes) != Vote.READY:
            against = [rank for rank, vote in enumerate(votes) if vote != Vote.READY]
            self.journal.record(self._step, trouble or f"ranks {against} refuse the plan", "a new plan will be made")
            self._planner.wanted = True
            return
        self._planner.announced(full=message.full)
        self._plan_id, self._reason = message.plan_id, message.reason
        self._migration = Migration(
            message, self.ledger, self.layers, self.peers, self.settings, self.journal, self._counts
        )
        self._predicted_bytes += self._migration.predicted_bytes

    def _migrate(self, migration: Migration) -> Flight[None]:
        yield from migration.steps(self._step)
        self._count_flips()
        if migration.finished:
            self._migration = None
            self.balance = measure_balance(self.history.load(self.settings.phase), self.ledger)

    # Lost and joining ranks.

    @collective(_new_groups_of)
    def rank_lost(self, ranks: int | Sequence[int], comm: Group | None) -> None:
        """Continue without lost ranks. Every remaining rank calls this before its next forward.

        ranks: the lost ranks, numbered in the previous group. comm: the group of the remaining ranks, in the same
        order: a process group, a communicator, or None for one rank. With tensor-parallel experts, all ranks with
        slices of the same experts must leave together.

        With `parallel.on_lost_expert` = raise, experts without a copy on the remaining ranks are read from the source
        of the layers before this returns, and slots are added where there are too few. With drop and renormalise the
        layers serve at once without these experts, which are read in the background, step by step. The transport is
        selected anew for the new group size.

        Raises RegroupError on every rank, with the reasons of each rank, if ranks report different losses or any of
        them cannot continue; CommError if a rank of the new group does not answer. In both cases nothing has changed,
        and the same call may be made again. Meanwhile every layer holds its experts twice.
        """
        wait(self.rank_lost_steps(ranks, comm))

    def rank_lost_steps(self, ranks: int | Sequence[int], comm: Group | None) -> Flight[None]:
        """`rank_lost` as a flight."""
        yield from self._go_on(self._lose(ranks, comm))

    def _go_on(self, change: Flight[list[Warning]]) -> Flight[None]:
        """Warn of a change, or raise what was turned into errors, once all ranks have made it."""
        raised = yield from change
        self.journal.warn()
        if raised:
            raise raised[0]

    @collective(_new_groups_of)
    def _lose(self, ranks: int | Sequence[int], comm: Group | None) -> Flight[list[Warning]]:
        self._expect_open()
        peers, living, size = self.peers_in(comm), self.ledger.living, self.comm.size
        group = peers.ep
        if (yield from self._has_committed(peers)):
            return []
        lost = sorted({ranks} if isinstance(ranks, int) else set(ranks))
        members = tuple(member for rank, member in enumerate(living) if rank not in lost)
        problem = ""
        if not lost or not all(0 <= rank < size for rank in lost):
            problem = f"lost ranks {lost} are out of range; pass at least one, 0 <= rank < {size}"
        elif self.comm.rank in lost:
            problem = f"rank {self.comm.rank} is itself among the lost ranks {lost}"
        elif group.size != len(members):
            problem = f"without ranks {lost}, {len(members)} ranks are left; the new group has {group.size}"

        def target(rank_states: Sequence[RankState], rows: Rows) -> tuple[Topology, Rows]:
            return self._placed_on(machine_of(rank_states)[0], members, rows)

        before = self.ledger.only_on(living[rank] for rank in lost if 0 <= rank < size)
        facts = {"call": "rank_lost"}
        raised = yield from self._regroup(peers, members, problem, facts, target, self._initial_slots_W)
        what = f"ranks {lost} are lost and with them the only copies of {before} experts in {len(self.layers)} layers"
        left = sum(len(layer.expert_map.lost) for layer in self.layers)
        policy = f"on_lost_expert = {self.layers[0].on_lost_expert} holds for {left} experts until they are repaired"
        self.journal.record(self._step, what, policy if left else f"all experts serve in the group of {self.comm.size}")
        return raised

    @collective(_new_groups_of)
    def rank_joined(self, ranks: int | Sequence[int], comm: Group | None) -> None:
        """Continue with additional ranks. Every rank of the new group calls this between two forwards, new ones too.

        ranks: the new processes, numbered in the new group. comm: the new group, in which previous ranks keep their
        order. A new process builds its layers for that group, loads them, creates a manager with equal settings and
        calls this first. Experts loaded by the new ranks are served there too; slots added after a loss are released,
        and a plan that spreads the load follows. Raises the errors of `rank_lost`.
        """
        wait(self.rank_joined_steps(ranks, comm))

    def rank_joined_steps(self, ranks: int | Sequence[int], comm: Group | None) -> Flight[None]:
        """`rank_joined` as a flight."""
        yield from self._go_on(self._join(ranks, comm))

    @collective(_new_groups_of)
    def _join(self, ranks: int | Sequence[int], comm: Group | None) -> Flight[list[Warning]]:
        self._expect_open()
        peers, living = self.peers_in(comm), self.ledger.living
        group = peers.ep
        if (yield from self._has_committed(peers)):
            return []
        new = sorted({ranks} if isinstance(ranks, int) else set(ranks))
        joins, problem, served = group.rank in new, "", iter(living)
        if not new or not all(0 <= rank < group.size for rank in new):
            problem = f"new ranks {new} are out of range; pass at least one, 0 <= rank < {group.size}"
        elif not joins and group.size != len(living) + len(new):
            problem = f"{len(living)} ranks serve and {len(new)} join; the new group has {group.size}"
        members: tuple[int | None, ...] = ()
        if not joins and not problem:
            members = tuple(None if rank in new else next(served) for rank in range(group.size))
        initial_slots: list[int] = []

        def target(rank_states: Sequence[RankState], rows: Rows) -> tuple[Topology, Rows]:
            stated = next(each.members for each in rank_states if each.member is not None)
            most = [max(len(rows_WL[rank]) for rows_WL in rows) for rank in new]
            topology, initial_slots[:] = after_join(*machine_of(rank_states), stated, most)
            return self._placed_on(topology, np.flatnonzero(topology.alive_W).tolist(), rows)

        facts = {"call": "rank_joined", "ranks that join": str(new)}
        return (yield from self._regroup(peers, members, problem, facts, target, initial_slots))

    def _placed_on(self, machine: Topology, members: Sequence[int], rows: Rows) -> tuple[Topology, Rows]:
        """The machine with these ranks alone alive, and what each of them shall hold. rows: what they hold."""
        num_experts, repairs = self.ledger.num_experts, self.layers[0].on_lost_expert == "raise"
        topology = after_loss(machine, members, num_experts, self.settings.min_copies)
        slots = topology.slots_W[list(members)].tolist()
        return topology, [fit(rows_WL, slots, num_experts, reads=repairs) for rows_WL in rows]

    def _has_committed(self, peers: Peers) -> Flight[bool]:
        """Go on over a group in which an earlier attempt has failed; whether that one was made, here or elsewhere."""
        if peers.ep.status.failure is not None or peers.tp.status.failure is not None:
            yield from peers.recover()
        return self._formed is peers.ep.status and self.comm.size == peers.ep.size

    def _regroup(
        self,
        peers: Peers,
        members: tuple[int | None, ...],
        problem: str,
        facts: dict[str, str],
        target: Callable[[Sequence[RankState], Rows], tuple[Topology, Rows]],
        initial_slots_W: list[int],
    ) -> Flight[list[Warning]]:
        """Form a group, and serve in it once no rank objects. initial_slots_W: set by `target`, if that changes them.

        Returns warnings of the change that were turned into errors.
        """
        serves = bool(members) or facts["call"] == "rank_lost"
        machine = {"topology": asdict(self.ledger.topology), "initial_slots": self._initial_slots_W}
        rank_state = RankState(
            member=self.ledger.living[self.comm.rank] if serves else None,
            members=members,
            problem=problem,
            must_equal=facts
            | {
                "settings": digest({"": repr(self.settings)}).hex()[:16],
                "layers": str([layer.name for layer in self.layers]),
                "experts": str(self.ledger.num_experts),
                "on_lost_expert": str([layer.on_lost_expert for layer in self.layers]),
            },
            step=self._step,
            flips=self._flips,
            plan_id=self._plan_id,
            epochs=[layer.epoch for layer in self.layers],
            machine=machine if serves else None,
        )
        work = Regrouping(self.layers, peers, self.settings, rank_state, self._follow, target, self._counts)
        before, former = dict(vars(self)), [layer.state for layer in self.layers]

        def back() -> None:
            vars(self).update(before)
            for layer, state in zip(self.layers, former, strict=True):
                if layer.state is not state:
                    layer.use(state)

        yield from work.steps(Change(lambda: self._commit(work, initial_slots_W), back))
        return work.warnings

    def _follow(self, flips: int) -> None:
        """Apply the flip that all ranks voted for, if the loss occurred between the last votes of two ranks."""
        migration = self._migration
        if flips > self._flips and migration is not None and migration.staged is not None and migration.is_current:
            migration.flip()
            self._count_flips()

    def _count_flips(self) -> None:
        """Count those of the migration that are not counted yet: a recovery may have made one."""
        if self._migration is not None:
            self._flips, self._migration.flips = self._flips + self._migration.flips, 0

    def _commit(self, work: Regrouping, initial_slots_W: list[int]) -> None:
        """Switch to the new group. Warnings turned into errors are raised once that has ended."""
        assert work.ledger is not None
        for layer, state in zip(self.layers, work.staged_states, strict=True):
            try:
                layer.live.flip(state)
            except Warning as warning:
                work.warnings.append(warning)
        self.ledger, self.peers, self._initial_slots_W = work.ledger, work.peers, initial_slots_W
        self._drop_work()
        self._epochs, self._halted, self._formed = self.peers.epochs, False, work.peers.ep.status
        self._step = max(each.step for each in work.rank_states)
        self._flips = max(each.flips for each in work.rank_states) + 1
        self._plan_id = max(each.plan_id for each in work.rank_states) + 1
        self.balance = None
        self._planner.restart()
        self._sync_now = True

    def peers_in(self, group: Group | None) -> Peers:
        """The communicators of this rank in another EP group."""
        timeout_s = getattr(self.comm, "timeout_s", DEFAULT_TIMEOUT_S)
        ep = SingleRank() if group is None else group
        return Peers(communicator(ep, timeout_s=timeout_s, layer=f"{len(self.layers)} layers"), self.peers.tp)

    # Status.

    def _lost_numbers(self) -> dict[str, float]:
        """Metrics of lost experts; empty if no expert is or was lost."""
        experts = sum(len(layer.expert_map.lost) for layer in self.layers)
        dropped = sum(layer.dropped_assignments for layer in self.layers)
        return {"lost.experts": experts, "lost.dropped_assignments": dropped} if experts or dropped else {}

    @property
    def state(self) -> State:
        """The current state of the manager."""
        if self._closed or self._halted:
            return "closed" if self._closed else "halted"
        if self._migration is not None:
            return "backing off" if self._step < self._migration.resumes_at else "moving"
        if self._planner.busy:
            return "planning"
        return "degraded" if any(layer.expert_map.lost for layer in self.layers) else "watching"

    def status(self) -> RebalanceStatus:
        """A snapshot of this rank, without communication; counters are read from the device."""
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
            received_bytes=self._counts.received,
            read_bytes=self._counts.read,
            retries=migration.retries if migration else 0,
            resumes_at=migration.resumes_at if migration and self._step < migration.resumes_at else None,
            balance=(self.balance.as_dict() if self.balance else {}) | self._lost_numbers(),
            lost_experts=lost,
            on_lost_expert=self.layers[0].on_lost_expert,
            dropped_assignments=sum(layer.dropped_assignments for layer in self.layers),
            incidents=tuple(self.journal.incidents),
        )
