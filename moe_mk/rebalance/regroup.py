"""Changing the group of ranks after a loss or a join: agreed, staged, tried out, then committed at once.

    agree      every rank reports its state; a difference ends the attempt on every rank
    place      all ranks compute the same placement from the experts that all of them hold
    move       experts with a living copy are sent, the others are read from the source of the layers
    stage      every layer builds its placement state for the new group: transport selected, weights in their layout
    try out    every staged state runs once without tokens, which opens its windows
    commit     assignments that cannot fail

Each stage ends with a vote; the reasons of one rank are raised on all ranks. Nothing that serves is changed before the
commit, so the same call may be made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moe_mk.comm.failure import REPORTED, Change, describe
from moe_mk.errors import CommError, ConfigError, RegroupError, unless_signalled
from moe_mk.flight import Flight, InFlight
from moe_mk.layer.moe_layer import MoELayer
from moe_mk.placement.eplb import Topology
from moe_mk.rebalance.background import BackgroundJob
from moe_mk.rebalance.ledger import Ledger
from moe_mk.rebalance.migration import moves_of
from moe_mk.rebalance.peers import Peers
from moe_mk.rebalance.planner import PlanMessage
from moe_mk.rebalance.settings import RebalanceSettings
from moe_mk.rebalance.transfer import ExpertBytes, ExpertTransfer, LayerMoves
from moe_mk.weights.expert_weights import SlotWeights

PHASE = "regroup"
Rows = list[list[list[int]]]
"""[layer][rank of the new group]: the experts in the slots of that rank."""


@dataclass(frozen=True)
class RankState:
    """The state of one rank at the start of an attempt. Equal on all ranks but for `member`, counts and rows."""

    member: int | None
    """Its rank in the machine; None for a process that joins."""
    members: tuple[int | None, ...]
    """Rank in the machine, by rank of the new group; None for processes that join."""
    problem: str
    """The problem with the arguments of the call on this rank; empty if there is none."""
    must_equal: dict[str, str]
    """Values that must be equal on every rank, by name."""
    step: int
    flips: int
    plan_id: int
    epochs: list[int]
    machine: dict[str, Any] | None
    """Topology of the previous group; None on processes that join."""

    def encode(self) -> str:
        """JSON on one line."""
        return json.dumps(vars(self))

    @classmethod
    def decode(cls, text: str) -> RankState:
        """Decode the state of one rank; of several TP slices the first is used if all checked values are equal."""
        each = [cls(**json.loads(line)) for line in text.splitlines()]
        each = [replace(one, members=tuple(one.members)) for one in each]
        checked = {json.dumps([one.member, one.members, one.must_equal]) for one in each}
        problem = "; ".join(one.problem for one in each if one.problem)
        if len(checked) > 1:
            problem = problem or "its slices of the same experts state different ranks"
        return replace(
            each[0],
            problem=problem,
            step=max(one.step for one in each),
            flips=max(one.flips for one in each),
            plan_id=max(one.plan_id for one in each),
            epochs=[max(column) for column in zip(*(one.epochs for one in each), strict=True)],
        )


def disagreements(rank_states: Sequence[RankState]) -> list[str]:
    """The reasons for which these ranks cannot form a group; equal on every rank, empty if they can."""
    lines = [f"rank {rank}: {each.problem}" for rank, each in enumerate(rank_states) if each.problem]
    served = [each for each in rank_states if each.member is not None]
    if len({each.members for each in served}) > 1:
        lines += [
            f"rank {rank} (rank {each.member} of the machine) goes on with ranks {_named(each.members)}"
            for rank, each in enumerate(rank_states)
            if each.member is not None
        ]
    elif not lines and not served:
        lines = ["every rank joins; one that has served must be among them"]
    elif not lines:
        lines = [
            f"rank {rank} of the new group is {_named([each.member])} of the machine, not {_named([wanted])}"
            for rank, (each, wanted) in enumerate(zip(rank_states, served[0].members, strict=False))
            if each.member != wanted
        ]
    for name in rank_states[0].must_equal:
        values = [each.must_equal.get(name, "(nothing)") for each in rank_states]
        if len(set(values)) > 1:
            lines += [f"{name} of rank {rank}: {value}" for rank, value in enumerate(values)]
    return lines


def _named(members: Sequence[int | None]) -> str:
    return "[" + ", ".join("a new one" if member is None else str(member) for member in members) + "]"


def slots_for(slots_W: Sequence[int], needed: int) -> list[int]:
    """Slots of each rank, increased one by one on the rank with the fewest until there are `needed` in total."""
    grown = list(slots_W)
    while sum(grown) < needed:
        grown[grown.index(min(grown))] += 1
    return grown


def fit(rows_WL: Sequence[Sequence[int]], slots_W: Sequence[int], num_experts: int, *, reads: bool) -> list[list[int]]:
    """Place the experts of one layer on slots with few moves: an expert stays where it is if there is room.

    rows_WL: what each rank holds. slots_W: how many it may hold. reads: whether experts that no rank holds are placed
    too. Worked example, 4 -> 3 ranks: 0 1 | 2 3 | 4 5 with 3, 3, 2 slots -> 0 1 6 | 2 3 7 | 4 5.
    """
    held = {expert for row in rows_WL for expert in row}
    placed = [list(dict.fromkeys(row)) for row in rows_WL]
    copies = np.bincount([expert for row in placed for expert in row], minlength=num_experts)
    for spare_only in (True, False):
        for row, slots in zip(placed, slots_W, strict=True):
            # The last ones first: those came last, when other ranks were lost.
            for at in reversed(range(len(row))):
                if len(row) > slots and (copies[row[at]] > 1 or not spare_only):
                    copies[row.pop(at)] -= 1
    for expert in np.flatnonzero(copies == 0).tolist():
        if not reads and expert not in held:
            continue
        room = [slots - len(row) for row, slots in zip(placed, slots_W, strict=True)]
        if max(room) > 0:
            placed[room.index(max(room))].append(expert)
        else:
            rank, at = next(
                (rank, at) for rank, row in enumerate(placed) for at, other in enumerate(row) if copies[other] > 1
            )
            copies[placed[rank][at]] -= 1
            placed[rank][at] = expert
        copies[expert] += 1
    return placed


@dataclass
class Regrouping:
    """One attempt of one rank. `steps` ends with the change made, or raises and releases what it staged."""

    layers: Sequence[MoELayer]
    peers: Peers
    """The communicators of the new group."""
    settings: RebalanceSettings
    rank_state: RankState
    follow: Callable[[int], None]
    """Given the flips of the furthest rank: flips the layers that all ranks had voted for before the loss."""
    target: Callable[[Sequence[RankState], Rows], tuple[Topology, Rows]]
    """From what all ranks state and hold: the machines that go on, and what each shall hold."""
    counts: ExpertBytes
    ledger: Ledger | None = None
    staged_states: list[Any] = field(default_factory=list)
    rank_states: list[RankState] = field(default_factory=list)
    warnings: list[Warning] = field(default_factory=list)
    """Those of the commit that were turned into errors."""

    def steps(self, commit: Change) -> Flight[None]:
        """Agree, place, move, stage, try out and commit. Raises RegroupError on every rank, CommError if one is lost.

        What was staged is kept until the next attempt: a recovery may commit it, if the other ranks had done so.
        """
        kept = self.peers.ep.kept
        before = dict(kept)
        try:
            yield from self._steps(commit)
        except BaseException:
            kept.clear()  # windows of this attempt: some ranks may have opened them and others not
            kept.update(before)
            raise

    def _steps(self, commit: Change) -> Flight[None]:
        yield from self.peers.settle()  # counts of votes are those of the groups before, or none of ranks that join
        texts = yield from self.peers.gather_texts(self.rank_state.encode(), PHASE)
        self.rank_states = [RankState.decode(text) for text in texts]
        if lines := disagreements(self.rank_states):
            raise RegroupError("ranks disagree about the group that goes on; nothing was changed", lines)
        self.follow(max(each.flips for each in self.rank_states))
        rows = yield from self._rows()
        problem: Exception | None = None
        moves: dict[int, LayerMoves] = {}
        try:
            base, message = self._plan(rows)
            moves = moves_of(base, message) if base.topology.alive_W.any() else {}
        except unless_signalled(Exception) as error:
            problem = error
        yield from self._vote("placing experts", problem)
        arrived = yield from self._move(moves)
        try:
            self._stage(arrived)
        except unless_signalled(Exception) as error:
            problem = error
        yield from self._vote("staging", problem)
        yield from self._try_out()
        yield from self.peers.decide(self.peers.gather(0, PHASE), commit, accepts=bool)

    def _rows(self) -> Flight[Rows]:
        """Gather the experts of every rank, layer by layer."""
        own = [layer.expert_map.local_to_global(layer.ep.rank) for layer in self.layers]
        texts = yield from self.peers.gather_texts(json.dumps(own), PHASE)
        of_rank = [json.loads(text.splitlines()[0]) for text in texts]
        return [[of_rank[rank][x] for rank in range(len(texts))] for x in range(len(self.layers))]

    def _plan(self, rows: Rows) -> tuple[Ledger, PlanMessage]:
        """The placement in numbers of a machine that has room for old and new rows, and the ledger that will serve."""
        topology, wanted = self.target(self.rank_states, rows)
        num_experts = self.layers[0].expert_map.num_experts
        slots = topology.slots_W.copy()
        living = np.flatnonzero(topology.alive_W)
        for group_rank, rank in enumerate(living):
            slots[rank] = max(slots[rank], *(len(layer_rows[group_rank]) for layer_rows in rows))
        wide = replace(topology, slots=tuple(slots.tolist()))
        base, after = (Ledger.of_rows(wide, num_experts, each) for each in (rows, wanted))
        self.ledger = Ledger.of_rows(topology, num_experts, wanted)
        plan_id = max(each.plan_id for each in self.rank_states) + 1
        return base, PlanMessage(plan_id, 0, after.phy2log, after.share, "another group")

    def _move(self, moves: dict[int, LayerMoves]) -> Flight[dict[int, dict[int, SlotWeights]]]:
        """Transfer the experts of all layers to their new ranks; returns them by layer and slot."""
        arrived: dict[int, dict[int, SlotWeights]] = {}
        for x, each in sorted(moves.items()):
            reader: BackgroundJob[dict[int, SlotWeights]] = BackgroundJob(
                "expert reader", limit_s=float("inf"), inline=True
            )
            problem, transfer, size = None, None, self.settings.bytes_per_step
            try:
                transfer = ExpertTransfer(self.peers.ep, self.layers[x], each, x, size, reader, self.counts)
                transfer.waits_for_reading()
            except unless_signalled(Exception) as error:
                problem = error
            read = transfer.trouble if transfer is not None else ""
            yield from self._vote("reading experts", problem, read)
            assert transfer is not None
            while not transfer.all_sent:
                transfer.post()
                yield InFlight(PHASE)
                yield from transfer.land()
                yield from self._vote("moving experts", None, transfer.trouble)
                transfer.accept()
            arrived[x] = transfer.arrived
        return arrived

    def _stage(self, arrived: dict[int, dict[int, SlotWeights]]) -> None:
        assert self.ledger is not None
        epochs = [max(column) + 1 for column in zip(*(each.epochs for each in self.rank_states), strict=True)]
        for x, layer in enumerate(self.layers):
            placed = self.ledger.map_of(self.ledger.phy2log[x], self.ledger.share[x])
            self.staged_states.append(layer.live.stage(placed, arrived.get(x), ep=self.peers.ep, epoch=epochs[x]))

    def _try_out(self) -> Flight[None]:
        """Run every staged state, and vote. A failed call ends those of all ranks, and the next attempt recovers."""
        problem: Exception | None = None
        try:
            for layer, state in zip(self.layers, self.staged_states, strict=True):
                yield from layer.live.try_out(state)
        except unless_signalled(Exception) as error:
            problem = error
        try:
            yield from self._vote("trying out", problem)
        except CommError as error:
            failure = self.peers.ep.status.failure or self.peers.tp.status.failure
            if failure is None or not (failure.here or failure.text.startswith(REPORTED)):
                raise  # a rank does not answer
            line = f"rank {failure.culprit}: {failure.text.removeprefix(REPORTED)}"
            raise self._refusal("trying out", [line]) from problem or error

    def _vote(self, what: str, problem: Exception | None, trouble: str = "") -> Flight[None]:
        """Raise RegroupError on every rank, with the problems of each, if any rank has one."""
        text = trouble if problem is None else describe(problem)
        texts = yield from self.peers.gather_texts(text, PHASE)
        if lines := [f"rank {rank}: {each}" for rank, each in enumerate(texts) if each]:
            raise self._refusal(what, lines) from problem

    def _refusal(self, what: str, lines: list[str]) -> RegroupError:
        text = f"{what} failed, so the group of {self.peers.ep.size} cannot be formed yet; nothing was changed, and "
        return RegroupError(f"{text}the same call may be made again", lines)


def after_loss(machine: Topology, members: Sequence[int], num_experts: int, copies: int) -> Topology:
    """The machine with `members` alone alive, and room on them for all experts. copies: as far as ranks allow."""
    slots = machine.slots_W.tolist()
    needed = num_experts * min(copies, len(members))
    for rank, grown in zip(members, slots_for([slots[rank] for rank in members], needed), strict=True):
        slots[rank] = grown
    return replace(machine, slots=tuple(slots), alive=tuple(rank in members for rank in range(machine.gpus)))


def after_join(
    machine: Topology, initial_slots_W: Sequence[int], members: Sequence[int | None], slots_of_new: Sequence[int]
) -> tuple[Topology, list[int]]:
    """The machine with ranks that join, and the slots of each rank as it was set up.

    machine, initial_slots_W: before the join, and the slots each rank started with: ranks that grew after a loss shrink
    to them.
    members: by rank of the new group, None for who joins. slots_of_new: what each of those holds, in order.
    A rank that joins takes the place of a lost one between the same neighbours; where there is none, ranks are numbered
    anew, which raises ConfigError if they do not divide over the nodes.
    """
    new, numbers, last = list(slots_of_new), list(members), -1
    dead = [rank for rank in range(machine.gpus) if not machine.alive_W[rank]]
    for at, member in enumerate(members):
        if member is None:
            later = next((m for m in members[at:] if m is not None), machine.gpus)
            numbers[at] = next((rank for rank in dead if last < rank < later), None)
        if (number := numbers[at]) is not None:
            last = number
    initial_slots = dict(enumerate(initial_slots_W))
    if any(number is None for number in numbers):
        if len(members) % machine.nodes:
            raise ConfigError(
                f"{len(members)} ranks do not divide over {machine.nodes} nodes, and no lost rank has the place of "
                f"those that join in {_named(members)}; give the new process the place of a lost rank in the group: "
                f"lost are {dead}"
            )
        speeds = tuple(1.0 if member is None else float(machine.speed_W[member]) for member in members)
        initial_slots = {at: 0 if member is None else initial_slots_W[member] for at, member in enumerate(members)}
        machine = Topology(len(members), machine.nodes, 1, speeds)
        numbers = list(range(len(members)))
    living = [number for number in numbers if number is not None]
    for number, member in zip(living, members, strict=True):
        if member is None:
            initial_slots[number] = new.pop(0)
    slots = tuple(initial_slots[rank] for rank in range(machine.gpus))
    return replace(machine, slots=slots, alive=tuple(rank in living for rank in range(machine.gpus))), list(slots)


def machine_of(rank_states: Sequence[RankState]) -> tuple[Topology, list[int]]:
    """The topology of the previous group, which all its ranks must report equally, and its initial slots."""
    stated = [each.machine for each in rank_states if each.machine is not None]
    if any(each != stated[0] for each in stated):
        raise ConfigError(f"ranks come from different groups: {stated}; end the processes and start anew")
    return Topology(**stated[0]["topology"]), list(stated[0]["initial_slots"])
