"""Ranks as processes of this machine, monitored by their parent.

The parent is not a rank: it only monitors, so that a dead rank, Ctrl-C or its own end always ends all ranks. Ranks
connect over loopback. A rank that fails sends its error through a pipe; one that is killed only closes it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from moe_mk.errors import MoEMKError
from moe_mk.lab.cli import environment
from moe_mk.lab.cli.exits import MISMATCH, OK, RanksFailed, exit_code_of, leave_at_once, named, print_error
from moe_mk.lab.cli.world import Job, Place, World, join, run_and_leave
from moe_mk.trace.clock import now

S = TypeVar("S")
GRACE_S = 10.0
"""Seconds that the other ranks may continue after the first error."""
JOINED = b"joined"


@dataclass(frozen=True)
class Task(Generic[S]):
    """The task of a started process."""

    job: Job[S]
    settings: S
    place: Place
    meeting: str
    backend: str


@dataclass
class Rank:
    """The state of a started process."""

    number: int
    process: BaseProcess
    pipe: Connection
    joined: bool = False
    gone: bool = False
    code: int | None = None
    """Its exit code; None until it has reported one."""
    words: str = ""
    """Its error message."""

    def listen(self) -> None:
        """Receive its messages, and detect its end."""
        while not self.gone and self.pipe.poll():
            try:
                stated = self.pipe.recv_bytes()
            except (EOFError, OSError):
                self.gone = True
                self.process.join()
                return
            if stated == JOINED:
                self.joined = True
            else:
                code, self.words = stated.decode().split("\n", 1)
                self.code = int(code)

    @property
    def died(self) -> bool:
        """Whether it ended without a report."""
        return self.gone and self.code is None

    @property
    def death(self) -> str:
        """How it ended, from its exit code."""
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {self.number} {how}"

    @property
    def is_silent(self) -> bool:
        """Whether it is running and has not reported an exit code."""
        return not self.gone and self.code is None


def run_ranks(job: Job[S], settings: S, world: World, backend: str, timeout_s: float) -> int:
    """Run `job(settings, place)` on every rank of this machine, and return the worst exit code.

    timeout_s: seconds to wait for a peer. Raises RanksFailed if ranks that were started here failed. A rank that a
    launcher started prints its error and exits.
    """
    if world.launched is not None:
        try:
            join(world.place(0), backend)
            code = run_and_leave(job, settings, world.place(0))
        except MoEMKError as problem:
            code = print_error(problem)
        leave_at_once(code)
    if world.size == 1:
        return job(settings, world.place(0))
    return run_processes(job, settings, world, backend, timeout_s)


def run_processes(job: Job[S], settings: S, world: World, backend: str, timeout_s: float) -> int:
    """Start every rank, wait for all, and return the worst exit code. timeout_s: seconds to wait for a peer.

    Raises RanksFailed with the messages of the ranks if any failed or died; no rank is left running.
    """
    environment.stay_on_this_machine()
    with tempfile.TemporaryDirectory(prefix="moe-mk-") as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        tasks = [Task(job, settings, world.place(rank), meeting, backend) for rank in range(world.size)]
        ranks: list[Rank] = []
        with _ending(ranks):
            for task in tasks:
                ranks.append(_start(task))
            _watch(ranks, timeout_s)
    return _verdict(ranks)


def _start(task: Task[S]) -> Rank:
    """Start a process that ignores Ctrl-C."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_main_of_rank, args=(task, theirs), daemon=True)
    with _ignoring_interrupts():
        process.start()
    theirs.close()
    return Rank(task.place.rank, process, ours)


def _watch(ranks: Sequence[Rank], timeout_s: float) -> None:
    """Return when all ranks have ended, or the deadline after a failure has passed."""
    deadline = float("inf")
    while listening := [rank.pipe for rank in ranks if not rank.gone]:
        wait(listening, None if deadline == float("inf") else max(0.0, deadline - now()))
        for rank in ranks:
            rank.listen()
        died, failed = any(rank.died for rank in ranks), any(rank.words for rank in ranks)
        if died and not all(rank.joined for rank in ranks):
            return  # the others would wait for it without a deadline
        if failed or all(rank.code is not None for rank in ranks):
            deadline = min(deadline, now() + min(GRACE_S, timeout_s))
        elif died or ranks[0].code is not None:  # the first rank verifies when the others are done, so it ends last
            deadline = min(deadline, now() + timeout_s + GRACE_S)
        if now() >= deadline:
            return


def _verdict(ranks: Sequence[Rank]) -> int:
    deaths = [rank.death for rank in ranks if rank.died]
    failed = [rank for rank in ranks if rank.words]
    late = [rank.number for rank in ranks if rank.is_silent and not deaths]
    if deaths or failed or late:
        code = MISMATCH if deaths or not failed else failed[0].code or MISMATCH
        silent = [f"rank {number} was still running after the others had ended, and was terminated" for number in late]
        raise RanksFailed("\n".join([*deaths, *(rank.words for rank in failed[:1]), *silent]), code)
    return max(rank.code or OK for rank in ranks)


def _main_of_rank(task: Task[S], pipe: Connection) -> NoReturn:
    """The main function of a rank."""
    _end_with_parent()
    try:
        join(task.place, task.backend, task.meeting)
        pipe.send_bytes(JOINED)
        code, words = run_and_leave(task.job, task.settings, task.place), ""
    except MoEMKError as problem:
        code, words = exit_code_of(problem), str(problem)
    except Exception as problem:
        error = named(problem)
        if error is None:
            traceback.print_exc()
            leave_at_once(MISMATCH)
        code, words = exit_code_of(error), str(error)
    pipe.send_bytes(f"{code}\n{words}".encode())
    leave_at_once(code)


def _end_with_parent() -> None:
    """End this process when its parent ends, in any way."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(MISMATCH)

    threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Processes started in this context ignore Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _ending(ranks: list[Rank]) -> Iterator[None]:
    try:
        yield
    finally:
        for rank in ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in ranks:
            rank.process.join()
