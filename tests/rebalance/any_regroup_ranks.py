"""Three ranks, of which the last is lost or joins, and one meets an exception at any step of that."""

import random
import warnings
from collections.abc import Callable
from types import CodeType

import torch
import torch.distributed as dist

from moe_mk import MoELayer, ParallelGroups
from moe_mk.comm import Communicator, DistributedCommunicator
from moe_mk.errors import MoEMKWarning
from moe_mk.flight import wait
from moe_mk.rebalance import RebalanceManager, RebalanceSettings
from tests.layer.any_verb_ranks import AT_ONCE_S, COUNT, TIMEOUT_S, Throw, control_plane, places_in
from tests.layer.failing_ranks import built, outcome, references, tokens

NUMBER = 2
"""Of the rank that is lost or joins."""
PLACEMENT = (0, 1, 2, 3, 4, 5, 6, 7, 0)
AGAIN = 4
"""How often a call may have to be made again: one ends, others learn of it in theirs."""


class Serving:
    """One layer over the ranks that serve before the change; it is made once."""

    def __init__(self, rank: int, transport: str, verb: str) -> None:
        whole, pair = dist.new_group(), dist.new_group([0, 1])
        self.rank, self.joins, self.left = rank, verb == "join", None
        before, after = (pair, whole) if self.joins else (whole, pair)
        self.takes_part = self.joins or rank != NUMBER
        self.after: Communicator | None = None
        if self.takes_part:
            self.after = DistributedCommunicator(after, timeout_s=TIMEOUT_S)
        is_new = self.joins and rank == NUMBER
        settings = {"placement": PLACEMENT} if is_new or not self.joins else {}
        serves = self.after if is_new else DistributedCommunicator(before, timeout_s=TIMEOUT_S)
        assert serves is not None
        groups = ParallelGroups(ep=serves)
        self.layer: MoELayer = built(transport, groups, timeout_s=TIMEOUT_S, experts="torch_cpu", **settings)
        self.manager = RebalanceManager([self.layer], RebalanceSettings(sync_every=2, inline=True))
        self.before = serves
        if not is_new:
            self.serve()
        dist.barrier()  # else a change may reach a first call that has not ended

    def serve(self) -> None:
        self.layer(tokens(self.rank, COUNT))
        self.manager.step()

    def lose(self) -> None:
        self.manager.rank_lost(NUMBER, self.after)

    def leave(self) -> None:
        """The same over the connections that there are."""
        if self.left is None:
            self.left = wait(self.before.without([NUMBER]))
        self.manager.rank_lost(NUMBER, self.left)

    def join(self) -> None:
        self.manager.rank_joined(NUMBER, self.after)


VERBS = ("lose", "leave", "join")


def _code_of(verb: str) -> CodeType:
    function: Callable[..., None] = getattr(Serving, verb)
    return function.__code__


def thrown(rank: int, transport: str, verb: str, draws: int, seed: int) -> list[str]:
    """One rank meets an exception at a drawn place of a change, over and over; returns what went wrong."""
    warnings.simplefilter("ignore", MoEMKWarning)
    draw, expected, code = random.Random(f"{seed} {transport} {verb}"), references(rank, 2, COUNT), _code_of(verb)
    serving = Serving(rank, transport, verb)
    places = places_in(getattr(serving, verb) if serving.takes_part else int, code)
    for number in range(draws):
        serving, throw = Serving(rank, transport, verb), Throw(draw, places)
        call = getattr(serving, verb) if serving.takes_part else int
        failed, wrong = throw.into(rank, call, code)
        for _ in range(AGAIN):
            if not any(each for (each,) in control_plane(failed)):
                break
            again = outcome(lambda s=serving, f=failed: _again(s, verb, failed=f) or torch.zeros(0))  # type: ignore[misc]
            failed = again["is"] != "right"
            if again["seconds"] > AT_ONCE_S:
                wrong.append(f"then it took {again}")
        if failed:
            wrong.append(f"not made in the end: {again}")
        for seed in (0, 1) if serving.takes_part and not failed else ():
            found = outcome(lambda s=serving, n=seed: s.layer(tokens(rank, COUNT, n)), expected[seed])  # type: ignore[misc]
            if found["is"] != "right":
                wrong.append(f"then {found}")
        if serving.takes_part and serving.manager.comm.size != (3 if verb == "join" else 2):
            wrong.append(f"the group has {serving.manager.comm.size} ranks")
        every = control_plane(
            [f"{number}: {throw}: {each}" for each in wrong], serving.layer.expert_map.experts_of_rank
        )
        if len({rows for _, rows in every if len(rows) == (3 if verb == "join" else 2)}) > 1:
            return [f"{number}: {throw}: ranks serve with {every}"]
        if lines := [line for lines, _ in every for line in lines]:
            return lines
    return []


def _again(serving: Serving, verb: str, *, failed: bool) -> None:
    """What an engine does: the same call where it has failed, and `recover` where a later call does."""
    if failed:
        getattr(serving, verb)()
    elif serving.takes_part:
        serving.layer.recover()
