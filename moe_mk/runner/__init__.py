"""Who uses the waiting time of a flight: nobody, the shared experts, or other micro-batches."""

from moe_mk.runner.monolithic import MonolithicKernel, needs_naive_dispatch_combine
from moe_mk.runner.overlap import alongside, run_alone, run_dual, run_with
from moe_mk.runner.schedule import MicroBatch, finishes_async, staggered
from moe_mk.runner.sequence_parallel import chunk_sizes, sequence_parallel
from moe_mk.runner.split import Half, finalize_async, prepare_async
from moe_mk.runner.stages import StageLink, tile_sizes
from moe_mk.runner.streams import run_on_two_streams
from moe_mk.runner.tile_plan import TilePlan
from moe_mk.runner.tile_record import TileRecord
from moe_mk.runner.tile_workers import on_lanes
from moe_mk.runner.tiles import TileWork, cut, in_turns, plan_for

__all__ = [
    "Half", "MicroBatch", "MonolithicKernel", "StageLink", "TilePlan", "TileRecord", "TileWork", "alongside",
    "chunk_sizes", "cut", "finalize_async", "finishes_async", "in_turns", "needs_naive_dispatch_combine", "on_lanes",
    "plan_for", "prepare_async", "run_alone", "run_dual", "run_on_two_streams", "run_with", "sequence_parallel",
    "staggered", "tile_sizes",
]  # fmt: skip
