"""Workers on a device: each on its own stream, every step after the marks of what it needs, the caller after all."""

import threading
from typing import Any

import pytest
import torch

from moe_mk.external.device import Queues
from moe_mk.flight import wait
from moe_mk.lab.testing.cases import hostile_routings
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.runner import MicroBatch, TilePlan, TileRecord, TileWork, cut, on_workers, plan_for
from tests.runner.named_workers import NamedWorkers
from tests.runner.tile_ranks import Ranks, no_thread_is_left
from tests.support.library_layers import Model, batch, expect_exact, flight_of


class Listed(NamedWorkers):
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


@pytest.mark.row(42, 49)
def test_streams_wait_for_marks_of_what_steps_need() -> None:
    work, plan, serial = work_of(4)
    queues, record = Listed(), TileRecord()
    outputs = wait(on_workers(work, plan, record, queues))
    assert torch.equal(torch.cat(outputs), serial) and no_thread_is_left()
    assert queues.marks == 1 + len(plan.order), "where the caller was, and the end of every step"
    assert queues.waits["comm"][0] == 1, "nothing is read before the caller has written it"
    needed = {worker: sum(len(plan.needs(step)) for step in steps) for worker, steps in plan.workers.items()}
    assert len(queues.waits["comm"]) == 1 + needed["comm"]
    # The calling thread multiplies, and waits for everything at the end.
    caller = queues.waits["caller"]
    assert len(caller) == needed["experts"] + len(plan.order) and set(caller[-len(plan.order) :]) == set(range(2, 22))
    assert len(work.kept) == 4, "outputs are not freed while another stream may read them"


def test_on_a_cpu_nothing_is_kept_and_nothing_waits() -> None:
    work, plan, serial = work_of(4)
    queues = Queues(torch.device("cpu"))
    assert torch.equal(torch.cat(wait(on_workers(work, plan, TileRecord(), queues))), serial)
    assert queues.mark() is None and not queues.run_later and not work.kept
    with queues.on_stream("comm"):
        queues.after(None)


def test_a_device_without_another_stream_is_an_error_and_not_a_hang() -> None:
    work, plan, _ = work_of(2)
    with pytest.raises(RuntimeError, match="no more streams"):
        wait(on_workers(work, plan, TileRecord(), Listed(broken=True)))
    assert no_thread_is_left()


@pytest.mark.row(49)
@pytest.mark.parametrize("name", ["deepep_ht", "deepep_ll", "deepep_v2", "nvlink_two_sided", "mori", "all_to_all"])
def test_outputs_of_several_batches_are_those_of_one_after_the_other(name: str) -> None:
    model = Model(name, layers=1)

    def both(mine: list[Any], rank: int) -> None:
        kernel = mine[0]
        for count in (1, 2, 5):
            given = [batch(100 * count + 10 * number + rank) for number in range(count)]
            serial = [wait(flight_of(kernel, own)) for own in given]
            work = TileWork(
                kernel.prepare_finalize,
                lambda tokens: kernel.multiply(tokens, NO_WEIGHTS),
                [MicroBatch(x_TH, routing) for x_TH, routing in given],
            )
            outputs = wait(on_workers(work, plan_for(kernel.prepare_finalize, count), TileRecord()))
            for y_TH, one_TH, own in zip(outputs, serial, given, strict=True):
                expect_exact(y_TH, own)
                assert torch.equal(y_TH, one_TH)

    model.each(both, model.layers, range(2))
    assert no_thread_is_left()
