"""A kernel that runs tile by tile, where `kernel.tiles` asks for it: the same pair, the same `steps`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.config.moe import KernelConfig
from moe_mk.errors import ConfigError
from moe_mk.external.device import Queues
from moe_mk.flight import Flight
from moe_mk.kernel import FusedMoEKernel
from moe_mk.runner.monolithic import MonolithicKernel
from moe_mk.runner.tile_workers import on_workers
from moe_mk.runner.tiles import Executor, MicroBatch, Onward, TileRecord, TileWork, cut, in_turns, plan_for
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import Weights


@dataclass(frozen=True)
class TiledKernel(FusedMoEKernel):
    """A transport and experts, over tiles of a call's tokens: all ranks with the same number of tiles."""

    tiles: int = 2
    executor: Executor = "turns"
    """thread: for a layer that is not interleaved with other flights."""
    onward: Onward | None = None
    """Where combined tiles are sent, for a kernel that ends a pipeline stage."""
    record: TileRecord | None = None
    """Where events are recorded; None: nowhere."""
    queues: Queues | None = None
    """Streams of the device for the workers; None makes them for each call."""

    def steps(self, x_TH: Tensor, routing: Routing, weights: Weights) -> Flight[Tensor]:
        """Run the layer's routed experts on the tokens of this rank: (T, H) to (T, H)."""
        who, ran = type(self.prepare_finalize), self.spans.ledger.ran
        tiles = cut(MicroBatch(x_TH, routing), self.tiles)
        work = TileWork(self.prepare_finalize, lambda tokens: self.multiply(tokens, weights), tiles, self.onward)
        plan = plan_for(self.prepare_finalize, self.tiles, onward=self.onward is not None)
        record = self.record or TileRecord()
        on_threads = self.executor == "thread"
        outputs = yield from on_workers(work, plan, record, self.queues) if on_threads else in_turns(work, plan, record)
        for tile, y_XH in zip(tiles, outputs, strict=True):
            ran("dispatch", who, tile.x_TH.nbytes)
            ran("combine", who, y_XH.nbytes)
        return torch.cat(outputs)


def tiled(kernel: FusedMoEKernel | MonolithicKernel, settings: KernelConfig) -> FusedMoEKernel | MonolithicKernel:
    """The kernel with the tiles of the settings; itself where they ask for one tile.

    Raises ConfigError for a comm thread on ranks that share one thread, where it could not wait, and in CUDA graphs.
    """
    if settings.tiles == 1 or isinstance(kernel, MonolithicKernel):
        return kernel
    if settings.tile_carrier == "thread":
        if settings.graphs:
            raise ConfigError(
                "kernel.tile_carrier = thread cannot be captured in a CUDA graph, which kernel.graphs = true asks for; "
                "use kernel.tile_carrier = turns"
            )
        _expect_ranks_that_wait(kernel.prepare_finalize.context.comm)
    parts, queues = (kernel.prepare_finalize, kernel.experts, kernel.spans), Queues(kernel.experts.context.device)
    return TiledKernel(*parts, tiles=settings.tiles, executor=settings.tile_carrier, queues=queues)


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
