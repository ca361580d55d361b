"""Schedules that use the waiting time of a flight, and kernels and exchanges built from them."""

from typing import TYPE_CHECKING

from moe_mk.imports import at_first_use

if TYPE_CHECKING:
    from moe_mk.runner.overlap import (
        AsyncResult,
        alongside,
        finalize_async,
        prepare_async,
        run_alone,
        run_dual,
        run_with,
    )
    from moe_mk.runner.tiled_kernel import on_workers
    from moe_mk.runner.tiles import (
        MicroBatch,
        StageLink,
        TilePlan,
        TileRecord,
        TileWork,
        cut,
        in_turns,
        plan_for,
        tile_sizes,
    )
else:
    HOMES = {
        "overlap": "AsyncResult alongside finalize_async prepare_async run_alone run_dual run_with",
        "tiled_kernel": "on_workers",
        "tiles": "MicroBatch StageLink TilePlan TileRecord TileWork cut in_turns plan_for tile_sizes",
    }
    __getattr__ = at_first_use(__name__, HOMES)

__all__ = [
    "AsyncResult", "MicroBatch", "StageLink", "TilePlan", "TileRecord", "TileWork",
    "alongside", "cut", "finalize_async", "in_turns", "on_workers",
    "plan_for", "prepare_async", "run_alone", "run_dual", "run_with", "tile_sizes",
]  # fmt: skip
