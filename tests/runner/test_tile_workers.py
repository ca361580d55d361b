"""Lanes on a device: each on a stream of its own, every step after the marks of what it needs, the caller after all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from moe_mk.external.device import Queues
from moe_mk.flight import wait
from moe_mk.runner import MicroBatch, TilePlan, TileRecord, TileWork, cut, on_lanes, plan_for
from moe_mk.testing.cases import hostile_routings
from moe_mk.testing.transports import NO_WEIGHTS
from tests.runner.named_workers import NamedLanes
from tests.runner.tile_ranks import Ranks, no_thread_is_left


class Listed(NamedLanes):
    """Queues that say what they would do on a device: marks are numbers."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__(broken=broken)
        self.marks, self._lock = 0, threading.Lock()
        self.waits: dict[str, list[int]] = {}

    def mark(self) -> Any:
        with self._lock:
            self.marks += 1
            return self.marks

    def after(self, mark: Any) -> None:
        self.waits.setdefault(self.stream, []).append(mark)


def work_of(tiles: int) -> tuple[TileWork, TilePlan, Any]:
    made = Ranks("no_ep", hostile_routings(1)[0], threads=False)
    kernel, batch = made.kernels[0], MicroBatch(made.tokens()[0], made.case.routings[0])
    work = TileWork(kernel.prepare_finalize, lambda tokens: kernel.multiply(tokens, NO_WEIGHTS), cut(batch, tiles))
    return work, plan_for(kernel.prepare_finalize, tiles), made.forward([kernel])[0]


@pytest.mark.row(42)
def test_streams_wait_for_marks_of_what_steps_need() -> None:
    work, plan, serial = work_of(4)
    queues, record = Listed(), TileRecord()
    outputs = wait(on_lanes(work, plan, record, queues))
    assert torch.equal(torch.cat(outputs), serial) and no_thread_is_left()
    assert queues.marks == 1 + len(plan.order), "where the caller was, and the end of every step"
    assert queues.waits["carry"][0] == 1, "nothing is read before the caller has written it"
    needed = {lane: sum(len(plan.needs(step)) for step in steps) for lane, steps in plan.lanes.items()}
    assert len(queues.waits["carry"]) == 1 + needed["carry"]
    # The calling thread multiplies, and waits for everything at the end.
    caller = queues.waits["caller"]
    assert len(caller) == needed["experts"] + len(plan.order) and set(caller[-len(plan.order) :]) == set(range(2, 22))
    assert len(work.kept) == 4, "outputs are not freed while another stream may read them"


def test_on_a_cpu_nothing_is_kept_and_nobody_waits() -> None:
    work, plan, serial = work_of(4)
    queues = Queues(torch.device("cpu"))
    assert torch.equal(torch.cat(wait(on_lanes(work, plan, TileRecord(), queues))), serial)
    assert queues.mark() is None and not queues.run_later and not work.kept
    with queues.lane("carry"):
        queues.after(None)


def test_a_device_without_another_stream_is_an_error_and_not_a_hang() -> None:
    work, plan, _ = work_of(2)
    with pytest.raises(RuntimeError, match="no more streams"):
        wait(on_lanes(work, plan, TileRecord(), Listed(broken=True)))
    assert no_thread_is_left()
