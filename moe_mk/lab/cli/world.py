"""The ranks of one command: processes started here, those started by torchrun, or a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import Absent, ParallelGroups, communicator
from moe_mk.comm.single import SingleRank
from moe_mk.errors import CommError, ConfigError, MoEMKError
from moe_mk.flight import wait
from moe_mk.lab.cli import environment
from moe_mk.lab.cli.environment import Launched
from moe_mk.lab.cli.exits import RanksFailed, exit_code_of

MOST_RANKS = 1 << 16
S = TypeVar("S")
T = TypeVar("T")
Job = Callable[[S, "Place"], int]
START_TIMEOUT_S = 120.0
"""Seconds that ranks may take to import torch and connect."""


@dataclass(frozen=True)
class Place:
    """The rank of this process among those of the command."""

    rank: int
    size: int
    tp: int = 1
    """Neighbouring ranks share a TP group: rank = ep_rank * tp + tp_rank."""
    local_rank: int = 0
    """Its index among the ranks of this machine."""

    @property
    def ep_rank(self) -> int:
        """Index of its experts and of its batch of tokens."""
        return self.rank // self.tp


@dataclass(frozen=True)
class World:
    """All ranks of the command."""

    size: int
    tp: int
    launched: Launched | None = None
    """The place of this process, if a launcher started the ranks."""

    @property
    def ep(self) -> int:
        """Ranks that share out the experts."""
        return self.size // self.tp

    @property
    def prints(self) -> bool:
        """Whether this process prints."""
        return self.launched is None or self.launched.rank == 0

    @property
    def local_size(self) -> int:
        """Ranks on this machine; they share its cores and its GPUs."""
        return self.size if self.launched is None else self.launched.local_size

    @property
    def threads(self) -> int:
        """Threads per rank, so that the ranks of this machine share its cores."""
        return max(1, environment.usable_cores() // self.local_size)

    def place(self, rank: int) -> Place:
        """The place of a rank that is started here, or the one that the launcher assigned to this process."""
        if self.launched is not None:
            return Place(self.launched.rank, self.size, self.tp, self.launched.local_rank)
        return Place(rank, self.size, self.tp, rank)


def world_of(ranks: int | None, tp: int) -> World:
    """The ranks of the command. ranks: None: as under torchrun, else 1.

    Raises ConfigError if --ranks is not what torchrun started, or --tp does not divide them.
    """
    launched = environment.launched()
    if launched and ranks not in (None, launched.world_size):
        raise ConfigError(f"--ranks {ranks}, but torchrun started {launched.world_size} ranks; drop --ranks")
    size = launched.world_size if launched else ranks or 1
    if size > MOST_RANKS:
        raise ConfigError(f"--ranks {size} exceeds {MOST_RANKS}, the maximum number of processes; use fewer")
    if size % tp:
        raise ConfigError(f"--tp {tp} does not divide {size} ranks; use a divisor of {size}")
    return World(size, tp, launched)


def groups_of(place: Place) -> ParallelGroups:
    """The EP and TP groups of a place; every rank must call this, because making a group is collective."""
    if place.size == 1:
        return ParallelGroups()
    if place.tp == 1:
        return ParallelGroups(ep=dist.group.WORLD)
    everyone = list(range(place.size))
    shares = [everyone[t :: place.tp] for t in range(place.tp)]
    ep = _subgroup(shares) if place.size > place.tp else Absent.ABSENT
    return ParallelGroups(ep=ep, tp=_subgroup([everyone[i : i + place.tp] for i in everyone[:: place.tp]]))


def _subgroup(members: list[list[int]]) -> dist.ProcessGroup:
    mine: dist.ProcessGroup = dist.new_subgroups_by_enumeration(members)[0]  # type: ignore[no-untyped-call]
    return mine


def team_of(place: Place, timeout_s: float, layer: str) -> Communicator:
    """A communicator of all ranks of the command, for communication outside the layer."""
    return communicator(dist.group.WORLD if place.size > 1 else SingleRank(), timeout_s=timeout_s, layer=layer)


def together(team: Communicator, step: Callable[[], T]) -> T:
    """Run a step on every rank; if it fails on any, every rank raises the error of the first one.

    CommError is raised immediately, because peers cannot be notified.
    """
    result, message, code = None, "", 0
    try:
        result = step()
    except CommError:
        raise
    except MoEMKError as problem:
        message, code = str(problem), exit_code_of(problem)
    everyone = wait(team.gather_texts(f"{code} {message}", "report"))
    failed = [rank for rank, words in enumerate(everyone) if words[0] != "0"]
    if failed:
        first_code, words = everyone[failed[0]].split(" ", 1)
        prefix = "" if len(failed) == team.size else f"rank {failed[0]}: "
        raise RanksFailed(prefix + words, int(first_code))
    assert result is not None
    return result


def join(place: Place, backend: str, meeting: str | None = None) -> None:
    """Connect to the other ranks. meeting: a URL, or None under a launcher. Raises CommError on a timeout."""
    timeout = timedelta(seconds=START_TIMEOUT_S)
    try:
        dist.init_process_group(backend, meeting, timeout=timeout, rank=place.rank, world_size=place.size)
        if (
            backend == "gloo"
        ):  # gloo returns before its peers are connected: a rank that left now would make their start fail
            dist.monitored_barrier(timeout=timeout)
    except (RuntimeError, ValueError) as problem:
        first_line = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise CommError(
            f"{place.size} ranks failed to connect: {first_line}", rank=place.rank, phase="start"
        ) from problem


def run_and_leave(job: Job[S], settings: S, place: Place) -> int:
    """Run the job of one connected rank, and destroy the group after success."""
    code = job(settings, place)
    with contextlib.suppress(RuntimeError):  # a peer that has already exited is no error
        dist.destroy_process_group()
    return code
