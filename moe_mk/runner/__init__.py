"""Who uses the waiting time of a flight: nobody, the shared experts, or other micro-batches."""

from moe_mk.runner.monolithic import MonolithicKernel, needs_naive_dispatch_combine
from moe_mk.runner.overlap import (
    Half,
    MicroBatch,
    alongside,
    finalize_async,
    finishes_async,
    prepare_async,
    run_alone,
    run_dual,
    run_on_two_streams,
    run_with,
    staggered,
)
from moe_mk.runner.sequence_parallel import chunk_sizes, sequence_parallel
from moe_mk.runner.tile_workers import on_lanes
from moe_mk.runner.tiles import StageLink, TilePlan, TileRecord, TileWork, cut, in_turns, plan_for, tile_sizes

__all__ = [
    "Half", "MicroBatch", "MonolithicKernel", "StageLink", "TilePlan", "TileRecord", "TileWork", "alongside",
    "chunk_sizes", "cut", "finalize_async", "finishes_async", "in_turns", "needs_naive_dispatch_combine", "on_lanes",
    "plan_for", "prepare_async", "run_alone", "run_dual", "run_on_two_streams", "run_with", "sequence_parallel",
    "staggered", "tile_sizes",
]  # fmt: skip
