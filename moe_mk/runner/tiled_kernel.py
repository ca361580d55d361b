"""A kernel that runs tile by tile, where `kernel.tiles` asks for it: the same pair, the same `steps`.

Workers execute a plan of tiles concurrently, a thread each; a step waits for the steps that it needs:

    comm      D0  D1  C0 D2  C1 D3  C2  C3
    experts       M0  M1     M2     M3            the caller's thread
    onward               S0     S1      S2  S3

On a device each worker has a stream too, and steps wait for marks of those that they need, on the device alone. Memory
that a worker frees is used again by its own stream; outputs of experts are kept to the end, because another stream
reads them. A worker that fails stops the others at their next step. The caller gets the first failure once all threads
have ended, which they do within the timeout of the transport. An interrupt of the caller stops them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.config.moe import KernelConfig
from moe_mk.errors import CommError, ConfigError
from moe_mk.experts.monolithic import MonolithicKernel
from moe_mk.external.device import Queues
from moe_mk.flight import Flight, InFlight, wait
from moe_mk.jobs import Bell, Job, Threads, listen
from moe_mk.kernel import FusedMoEKernel
from moe_mk.runner import tiles as tiling
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import Weights


@dataclass(frozen=True)
class TiledKernel(FusedMoEKernel):
    """A transport and experts, over tiles of a call's tokens: all ranks with the same number of tiles."""

    can_be_prepared: ClassVar[bool] = False
    tiles: int = 2
    executor: tiling.Executor = "turns"
    """thread: for a layer that is not interleaved with other flights."""
    onward: tiling.Onward | None = None
    """Where combined tiles are sent, for a kernel that ends a pipeline stage."""
    record: tiling.TileRecord | None = None
    """Where events are recorded; None: nowhere."""
    queues: Queues | None = None
    """Streams of the device for the workers; None makes them for each call."""
    limit_s: float = KernelConfig().timeout_s
    """How long a step may take that another one waits for."""

    def steps(self, x_TH: Tensor, routing: Routing, weights: Weights) -> Flight[Tensor]:
        who, ran = type(self.prepare_finalize), self.spans.ledger.ran
        tiles = tiling.cut(tiling.MicroBatch(x_TH, routing), self.tiles)
        work = tiling.TileWork(self.prepare_finalize, lambda tokens: self.multiply(tokens, weights), tiles, self.onward)
        plan = tiling.plan_for(self.prepare_finalize, self.tiles, onward=self.onward is not None)
        record = self.record or tiling.TileRecord()
        on_threads = self.executor == "thread"
        outputs = (
            yield from on_workers(work, plan, record, self.queues, self.limit_s)
            if on_threads
            else tiling.in_turns(work, plan, record)
        )
        for tile, y_XH in zip(tiles, outputs, strict=True):
            ran("dispatch", who, tile.x_TH.nbytes)
            ran("combine", who, y_XH.nbytes)
        return torch.cat(outputs)


def tiled(kernel: FusedMoEKernel | MonolithicKernel, settings: KernelConfig) -> FusedMoEKernel | MonolithicKernel:
    """The kernel with the tiles of the settings.

    Raises ConfigError for a comm thread on ranks that share one thread, where it could not wait, and in CUDA graphs.
    """
    if not isinstance(kernel, FusedMoEKernel):
        return kernel
    if settings.tile_carrier == "thread":
        if settings.graphs:
            raise ConfigError(
                "kernel.tile_carrier = thread cannot be captured in a CUDA graph, which kernel.graphs = true asks for; "
                "use kernel.tile_carrier = turns"
            )
        _expect_ranks_that_wait(kernel.prepare_finalize.context.comm)
    parts, queues = (kernel.prepare_finalize, kernel.experts, kernel.spans), Queues(kernel.experts.context.device)
    return TiledKernel(
        *parts, tiles=settings.tiles, executor=settings.tile_carrier, queues=queues, limit_s=settings.timeout_s
    )


def _expect_ranks_that_wait(comm: Communicator) -> None:
    if comm.size == 1:
        return
    try:
        comm.library_group()
    except ConfigError as problem:
        raise ConfigError(
            f"layer {comm.layer!r}: kernel.tile_carrier = thread needs ranks that can wait for each other inside a "
            f"call, and {type(comm).__name__} has all of them in one thread; use kernel.tile_carrier = turns"
        ) from problem


X = TypeVar("X")

P = ParamSpec("P")


def with_modes_of_caller(job: Callable[P, X]) -> Callable[P, X]:
    """Return the job for another thread, under autograd's modes of this one, which belong to a thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def with_modes(*args: P.args, **kwargs: P.kwargs) -> X:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return job(*args, **kwargs)

    return with_modes


class WorkerGroup:
    """The shared state of workers: which steps have ended, their marks on the device, and the first failure."""

    def __init__(
        self, work: tiling.TileWork, plan: tiling.TilePlan, record: tiling.TileRecord, queues: Queues, limit_s: float
    ) -> None:
        """limit_s: how long one step may take; a step waits for at most all of them."""
        self._work, self._plan, self._record, self._queues = work, plan, record, queues
        self._begin, self._limit_s = queues.mark(), limit_s * len(plan.order)
        self._marks: dict[tiling.Step, Any] = {}
        """Of the steps that have ended."""
        self._bells = {worker: Bell() for worker in plan.workers}
        """Rung for each worker when a step has ended."""
        self.stopped = False
        self.failure: BaseException | None = None

    def start(self, worker: tiling.Worker) -> None:
        """Run a worker in this thread, on a stream of its own."""
        try:
            with self._queues.on_stream(worker):
                self._queues.after(self._begin)
                self.run(worker)
        except BaseException as failure:  # a device without another stream: no worker may wait for this one
            self.stop(failure)

    def run(self, worker: tiling.Worker) -> None:
        """Take a worker's steps, each as soon as it is ready, to the end or until a worker fails."""
        try:
            for step in self._plan.workers[worker]:
                if not self._ready(worker, step):
                    return
                self._record.note(step, "begins")
                wait(self._work.perform(step))
                self._record.note(step, "ends")
                self._marks[step] = self._queues.mark()
                self._ring()
        except BaseException as failure:  # of any type: `on_workers` raises it in the caller's thread
            self.stop(failure)

    def stop(self, failure: BaseException | None = None) -> None:
        """Let no worker begin another step."""
        self.failure = self.failure or failure
        self.stopped = True
        self._ring()

    def join_stream(self) -> None:
        """Let the caller's stream wait for everything that was queued here."""
        for mark in list(self._marks.values()):
            self._queues.after(mark)

    def _ring(self) -> None:
        for bell in self._bells.values():
            bell.ring()

    def _ready(self, worker: tiling.Worker, step: tiling.Step) -> bool:
        """Wait for the steps that a step needs; False once a worker has failed."""
        needs, marks = self._plan.needs(step), self._marks
        is_so = listen(self._bells[worker], lambda: self.stopped or all(need in marks for need in needs), self._limit_s)
        if not is_so:
            text = f"step {step} of its tiles waited {self._limit_s:g} s for another worker [kernel.timeout_s a step]"
            comm = self._work.transport.context.comm
            raise CommError(text, rank=comm.rank, phase="tiles", layer=comm.layer)
        if self.stopped:
            return False
        for need in needs:
            self._queues.after(marks[need])
        return True


def on_workers(
    work: tiling.TileWork, plan: tiling.TilePlan, record: tiling.TileRecord, queues: Queues | None = None,
    limit_s: float = KernelConfig().timeout_s,
) -> Flight[list[Tensor]]:  # fmt: skip
    """Run the workers concurrently; a flight with one yield point, at which the first tile is being dispatched.

    queues: streams of the device, best the same ones for every call; None makes them. limit_s: how long one step may
    take. Threads live as long as the call.
    The transport must not be used by anything else meanwhile, other micro-batches included: two comm threads would
    issue collectives in a different order on every rank. Raises the exception of the first worker that failed.
    """
    queues = queues or Queues(work.tiles[0].x_TH.device)
    group, work.keeps = WorkerGroup(work, plan, record, queues, limit_s), queues.run_later
    others = [worker for worker in plan.workers if worker != "experts"]
    threads, jobs = (
        Threads(len(others), linger_s=0.0),
        [Job(partial(with_modes_of_caller(group.start), worker)) for worker in others],
    )
    try:
        for job in jobs:
            threads.put(job)
        yield InFlight("dispatch")
        group.run("experts")
    except BaseException:
        group.stop()  # the caller has closed the flight or failed: no worker may continue
        raise
    finally:
        for job in jobs:
            job.cancel()  # one that was not begun; the others end with their step
            _ = job.is_over or job.wait(limit_s)
        work.cancel()
        group.join_stream()
    if group.failure is not None:
        raise group.failure
    return work.outputs()
