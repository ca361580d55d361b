"""Waiting for a process: a last look, and telling the dead from the late."""

from __future__ import annotations

import os
import subprocess

import pytest

from moe_mk.comm.symmetric.flags import Process, WaitingForProcess
from moe_mk.errors import CommError


def test_a_wait_looks_once_more_before_it_gives_up() -> None:
    me, ticks = Process.this(), iter(range(1, 1000))
    waiting = WaitingForProcess(0, "combine", 3, "layers.1", peers=[me, me], timeout_s=5, clock=lambda: next(ticks))
    for _ in range(1000):
        waiting.pause(1)
        if waiting._verdict:
            break
    with pytest.raises(CommError, match=r"rank 0, phase 'combine', layer 'layers.1', peer 1: epoch 3: .* within 5 s"):
        waiting.pause(1)


def test_a_process_is_distinguished_from_a_later_one_of_its_number() -> None:
    me = Process.this()
    assert not me.is_gone(me)
    assert Process(me.number, "1", me.namespace).is_gone(me)
    assert Process(2**22 + 1, "1", me.namespace).is_gone(me)
    assert not Process(2**22 + 1, "1", me.namespace + 1).is_gone(me), "nothing is known of another namespace"


def test_a_killed_process_is_gone_before_anybody_has_reaped_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        seen = Process.of(child.pid)
        assert not seen.is_gone(Process.this())
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still there as a zombie
        assert seen.is_gone(Process.this())
        child.wait()
        assert seen.is_gone(Process.this())
