"""Who uses the waiting time of a flight: nobody, the shared experts, or other micro-batches."""

from moe_mk.runner.naive import MonolithicKernel, needs_naive_dispatch_combine
from moe_mk.runner.overlap import alongside, run_alone, run_dual, run_with
from moe_mk.runner.schedule import MicroBatch, finishes_async, staggered
from moe_mk.runner.sequence_parallel import chunk_sizes, sequence_parallel
from moe_mk.runner.split import Half, finalize_async, prepare_async
from moe_mk.runner.streams import run_on_two_streams

__all__ = [
    "Half", "MicroBatch", "MonolithicKernel", "alongside", "chunk_sizes", "finalize_async", "finishes_async",
    "needs_naive_dispatch_combine", "prepare_async", "run_alone", "run_dual", "run_on_two_streams", "run_with",
    "sequence_parallel", "staggered",
]  # fmt: skip
