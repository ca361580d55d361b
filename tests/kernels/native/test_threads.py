"""Native threads may be moved to another processor when they wake up, and keep the processors they may use."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk.kernels.native import Native, experts_rows
from tests.kernels.native.layers import Layer, Storage, batch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are moved on Linux only")

THREADS = 3


def workers() -> list[int]:
    """The native threads of this process besides its own."""
    tasks = Path("/proc/self/task")
    return [int(task.name) for task in tasks.iterdir() if (task / "comm").read_text().strip() == "moe_mk"]


def calls(native: Native, number: int) -> list[Tensor]:
    """The same call again and again; before each one the threads fall asleep."""
    w13, w2 = Layer(4, 192, 288, Storage.FP8).pack(native)
    made = []
    for _ in range(number):
        time.sleep(0.002)
        made.append(experts_rows(native, *batch(19, 192, 4, 3), w13, w2, threads=THREADS))
    return made


@pytest.fixture
def processors() -> Iterator[set[int]]:
    """Those that the process may use, which every thread of it may use again after the test."""
    all_of_them = os.sched_getaffinity(0)
    yield all_of_them
    for thread in (0, *workers()):
        os.sched_setaffinity(thread, all_of_them)


def test_threads_may_use_the_same_processors_after_calls(native: Native, processors: set[int]) -> None:
    torch.manual_seed(0)
    calls(native, 20)
    assert len(workers()) >= THREADS - 1
    assert all(os.sched_getaffinity(worker) == processors for worker in workers())


def test_threads_that_the_user_has_bound_stay_where_they_are(native: Native, processors: set[int]) -> None:
    calls(native, 1)
    own = min(processors)
    for thread in (0, *workers()):  # all of them on the processor of the caller: there is no other one
        os.sched_setaffinity(thread, {own})
    torch.manual_seed(0)
    bound = calls(native, 10)
    assert all(os.sched_getaffinity(thread) == {own} for thread in (0, *workers()))

    for thread in (0, *workers()):
        os.sched_setaffinity(thread, processors)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(bound, calls(native, 10), strict=True))
