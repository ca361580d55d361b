"""A thread for each lane of a plan: steps wait for those that they need, whoever takes them.

    carry     D0  D1  C0 D2  C1 D3  C2  C3
    experts       M0  M1     M2     M3            the caller's thread
    onward               S0     S1      S2  S3

On a device each lane has a stream too, and steps wait for marks of those that they need, on the device alone. What a
lane frees, its own stream uses next; outputs of experts are kept until the end, because another stream reads them.

A lane that fails stops the others at their next step. The caller hears of the first failure once all threads have
ended, which they do within the time that a transport waits for a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

from torch import Tensor

from moe_mk.external.device import Queues
from moe_mk.flight import Flight, InFlight, wait
from moe_mk.runner.overlap import with_modes_of_here
from moe_mk.runner.tiles import Lane, Step, TilePlan, TileRecord, TileWork


class Crew:
    """What lanes know of each other: which steps have ended, their marks on the device, and the first failure."""

    def __init__(self, work: TileWork, plan: TilePlan, record: TileRecord, queues: Queues) -> None:
        self._work, self._plan, self._record, self._queues = work, plan, record, queues
        self._begin = queues.mark()
        self._marks: dict[Step, Any] = {}
        """Of the steps that have ended."""
        self._changed = Condition()
        self.stopped = False
        self.failure: BaseException | None = None

    def serve(self, lane: Lane) -> None:
        """Walk a lane in a thread of its own, on a stream of its own."""
        try:
            with self._queues.lane(lane):
                self._queues.after(self._begin)
                self.walk(self._plan.lanes[lane])
        except BaseException as failure:  # a device without another stream: nobody may wait for this lane
            self.stop(failure)

    def walk(self, lane: Sequence[Step]) -> None:
        """Take the steps of a lane, each as soon as it can be, until the end or until somebody fails."""
        try:
            for step in lane:
                if not self._ready(step):
                    return
                self._record.note(step, "begins")
                wait(self._work.perform(step))
                self._record.note(step, "ends")
                with self._changed:
                    self._marks[step] = self._queues.mark()
                    self._changed.notify_all()
        except BaseException as failure:  # told to the caller by `failure`, whatever it is
            self.stop(failure)

    def stop(self, failure: BaseException | None = None) -> None:
        """Let no lane begin another step."""
        with self._changed:
            self.stopped = True
            self.failure = self.failure or failure
            self._changed.notify_all()

    def meet(self) -> None:
        """Let what the caller queues next come after all that was queued here."""
        for mark in self._marks.values():
            self._queues.after(mark)

    def _ready(self, step: Step) -> bool:
        """Wait for what a step needs; False if it will not come."""
        needs = self._plan.needs(step)
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or all(need in self._marks for need in needs))
            if self.stopped:
                return False
            marks = [self._marks[need] for need in needs]
        for mark in marks:
            self._queues.after(mark)
        return True


def on_lanes(work: TileWork, plan: TilePlan, record: TileRecord, queues: Queues | None = None) -> Flight[list[Tensor]]:
    """Run the lanes side by side; a flight with one hop, during which the first tile is on its way.

    queues: streams of the device, best the same ones for every call; None makes them. Threads live as long as the call.
    Nobody else may use the transport meanwhile, other micro-batches included: two carriers would meet peers in another
    order on every rank. Raises what the first lane that failed raised.
    """
    queues = queues or Queues(work.tiles[0].x_TH.device)
    crew, work.keeps = Crew(work, plan, record, queues), queues.run_later
    others = [lane for lane in plan.lanes if lane != "experts"]
    threads = ThreadPoolExecutor(len(others), thread_name_prefix="tiles")
    try:
        for lane in others:
            threads.submit(with_modes_of_here(crew.serve), lane)
        yield InFlight("dispatch")
        crew.walk(plan.lanes["experts"])
    except BaseException:
        crew.stop()  # the caller gives up: no lane may go on without it
        raise
    finally:
        threads.shutdown()
        work.give_up()
        crew.meet()
    if crew.failure is not None:
        raise crew.failure
    return work.outputs()
