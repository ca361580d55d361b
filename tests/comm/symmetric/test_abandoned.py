"""Processes that are killed while they open a heap leave no file behind, at the latest at the next one."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch.distributed as dist
from _pytest.mark import ParameterSet

from moe_mk.comm import DistributedCommunicator
from moe_mk.comm.symmetric import setup as symmetric_setup
from moe_mk.comm.symmetric.memory import FOLDER, OURS_ALONE, PREFIX, attach, create, remove_abandoned, unlink
from moe_mk.comm.symmetric.setup import open_heap
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.trace.clock import now
from tests.support.networked_heaps import opened
from tests.support.worlds import world_of

ORPHAN = """
import os, signal, sys
from pathlib import Path
from moe_mk.comm.symmetric import memory
if sys.argv[2] == "unlocked":
    memory.fcntl.flock = lambda descriptor, how: os.kill(os.getpid(), signal.SIGKILL)
memory.create(4096, Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of shared memory that no other process of this machine uses."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        yield Path(name)


world = world_of(2)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("how", ["locked", "unlocked"])
def test_the_file_of_a_killed_process_is_removed_by_the_next_one(folder: Path, how: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ORPHAN, str(folder), how], check=False)
    assert ended.returncode == -signal.SIGKILL and len(names_in(folder)) == 1
    name, _memory = create(4096, folder)
    assert names_in(folder) == [name]


def test_files_of_living_processes_and_foreign_ones_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _memory = create(4096, folder)
    (folder / "somebody-elses").touch()
    (folder / f"{PREFIX}folder").mkdir()
    (folder / f"{PREFIX}link").symlink_to(folder / "somebody-elses")
    os.mkfifo(folder / f"{PREFIX}pipe")
    kept = names_in(folder)
    assert remove_abandoned(folder) == [] and names_in(folder) == kept
    foreign = folder / f"{PREFIX}of-another-user"
    foreign.touch(OURS_ALONE)
    me = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: me + 1)
    assert remove_abandoned(folder) == [] and foreign.exists()
    monkeypatch.undo()
    assert remove_abandoned(folder) == [foreign.name] and (folder / name).exists()


def test_a_file_that_was_removed_before_it_was_locked_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    removed: list[str] = []

    def late(descriptor: int, how: int) -> None:
        if not removed:
            removed.append("")
            removed[:] = remove_abandoned(folder)
        lock(descriptor, how)

    monkeypatch.setattr("fcntl.flock", late)
    name, _memory = create(4096, folder)
    assert len(removed) == 1 and removed != [name] and names_in(folder) == [name]


def test_only_names_that_were_given_here_are_removed(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "mine").touch()
    unlink("mine", folder)
    unlink(f"{PREFIX}x/../mine", folder)
    unlink("../mine", folder / "inner")
    assert names_in(folder) == ["inner", "mine"]


def end_at(step: str, patch: pytest.MonkeyPatch) -> None:
    """End this process by SIGKILL before or after it creates or attaches a file, or its n-th gather."""
    when, what = step.split()
    target, turns = (what, 1) if what in ("create", "attach") else ("wait", int(what[-1]))
    patch.setattr(symmetric_setup, target, killing(getattr(symmetric_setup, target), when, turns))


def killing(inner: Callable[..., object], when: str, turns: int) -> Callable[..., object]:
    """A function that ends its process before or after its n-th call."""
    calls = count(1)

    def called(*args: object) -> object:
        last = next(calls) == turns
        if last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        made = inner(*args)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    return called


def open_in(rank: int, folder: str, step: str, ending: list[int]) -> list[str]:
    """Open a heap whose files lie in a folder, over the network if there are 4 ranks; the names left meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_setup, "create", lambda size: create(size, Path(folder)))
        patch.setattr(symmetric_setup, "attach", lambda name, size: attach(name, size, Path(folder)))
        patch.setattr(symmetric_setup, "unlink", lambda name: unlink(name, Path(folder)))
        if rank in ending:
            end_at(step, patch)
        group = dist.group.WORLD
        assert group is not None
        comm = DistributedCommunicator(group, timeout_s=5.0)
        heap = opened(comm, per_node=2) if comm.size == 4 else open_heap(comm, 1, 8, now)
        heap.barrier()
        return os.listdir(folder)


def rarely(step: str, ending: list[int]) -> ParameterSet:
    return pytest.param(step, ending, marks=pytest.mark.stress)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step,ending",
    [
        ("after create", [0]), rarely("before gather1", [0]), rarely("after gather1", [0]),
        rarely("before gather2", [0]), rarely("before attach", [1]), ("after attach", [1]),
        rarely("before gather1", [0, 1]), ("after gather1", [0, 1]),
    ],
)  # fmt: skip
def test_ranks_killed_while_they_open_a_heap(world: RankWorld, folder: Path, step: str, ending: list[int]) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        world.call(open_in, str(folder), step, ending)
    survived = len(ending) == 1 and step not in ("after create", "before gather1")
    assert (names_in(folder) == []) is survived  # a rank that knows the name removes it
    assert world.call(open_in, str(folder), step, []) == [[], []]
    assert names_in(folder) == []


@pytest.mark.stress
@pytest.mark.parametrize(
    "step,ending",
    [("after create", [2]), ("after gather1", [2]), ("before attach", [1]), ("after gather1", [0, 1, 2, 3])],
)
def test_ranks_of_two_hosts_killed_while_they_open_a_heap(folder: Path, step: str, ending: list[int]) -> None:
    with RankWorld(4) as ranks:
        with pytest.raises(RankError, match="exit code -9"):
            ranks.call(open_in, str(folder), step, ending)
        assert ranks.call(open_in, str(folder), step, []) == [[]] * 4
    assert names_in(folder) == []
