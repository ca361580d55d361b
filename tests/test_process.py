"""A process is seen to end, and is never taken for ended where that cannot be seen."""

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from moe_mk.process import Process, WatchedProcess

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EIO)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as started:
        yield started
        started.kill()


@contextmanager
def without_descriptors() -> Iterator[None]:
    """No file can be opened; those that are open stay."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, limits[1]))  # every lower number is taken
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(taken)


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still there as a zombie


def test_a_process_is_distinguished_from_a_later_one_of_its_number() -> None:
    me = Process.this()
    assert not WatchedProcess.of(me).is_gone()
    assert WatchedProcess.of(Process(me.number, "1", me.namespace)).is_gone()
    assert WatchedProcess.of(Process(2**22 + 1, "1", me.namespace)).is_gone()
    other = WatchedProcess.of(Process(2**22 + 1, "1", me.namespace + 1))
    assert not other.is_gone(), "nothing is known of another namespace"


def test_a_killed_process_is_gone_before_anybody_has_reaped_it(child: subprocess.Popen[bytes]) -> None:
    seen = WatchedProcess.of(Process.of(child.pid))
    assert not seen.is_gone()
    end(child)
    assert seen.is_gone()
    child.wait()
    assert seen.is_gone()


@pytest.mark.parametrize("reaped", [False, True])
def test_an_end_is_seen_without_a_descriptor_left(child: subprocess.Popen[bytes], reaped: bool) -> None:
    seen = WatchedProcess.of(Process.of(child.pid))
    with without_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            open(os.devnull).close()
        assert not seen.is_gone() and Process.this().number == os.getpid()
        end(child)
        if reaped:
            child.wait()
        assert seen.is_gone()


def test_one_that_was_first_looked_at_without_a_descriptor_is_seen_later(child: subprocess.Popen[bytes]) -> None:
    process = Process.of(child.pid)
    with without_descriptors():
        seen = WatchedProcess.of(process)
        end(child)
        assert not seen.is_gone(), "it cannot be seen now"
    assert seen.is_gone()


@pytest.mark.parametrize("lacks", [*SHORTAGES, None])
def test_what_a_look_lacks_for_a_moment_is_no_end(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, lacks: int | None
) -> None:
    seen = WatchedProcess.of(Process.of(child.pid))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", Mock(side_effect=MemoryError if lacks is None else OSError(lacks, "none left")))
        end(child)
        assert not seen.is_gone()
    assert seen.is_gone()


def test_a_process_that_is_hidden_is_not_gone(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:  # as /proc is mounted with hidepid
    process, opened = Process.of(child.pid), os.open
    hidden: Callable[..., int] = lambda path, *how: opened(str(path).replace(str(child.pid), str(2**22 + 1)), *how)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", hidden)
        seen = WatchedProcess.of(process)
        assert not seen.is_gone()
        child.kill()
        child.wait()
        assert seen.is_gone()


def test_views_of_a_process_share_one_descriptor_that_ends_with_them(child: subprocess.Popen[bytes]) -> None:
    def is_open() -> int:
        names = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return sum(os.path.exists(name) and f"/{child.pid}/stat" in os.readlink(name) for name in names)

    views = [WatchedProcess.of(Process.of(child.pid)) for _ in range(3)]
    assert views[0] is views[1] is views[2] and is_open() == 1
    views.clear()
    assert is_open() == 0
