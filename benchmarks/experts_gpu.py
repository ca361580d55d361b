"""Latency of this project's experts on a GPU against the limits of the device.

    python benchmarks/experts_gpu.py --experts 256 --tokens 1 128 --tiles built-in --results results.jsonl

w13 -> activation -> w2 of DeepSeek-V3 in FP8: all 256 experts of a layer on one GPU, or one rank's share of 8 or 32
ranks. A call sorts, multiplies, weighs and sums; tokens arrive in FP8. `of_floor` is the time that reading the touched
weights and rows once, or multiplying, takes at the measured ceilings, over the median. Results are written one by one;
those that the file already has are not measured again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experts_gpu_cases import (
    TOKENS,
    Case,
    captured,
    exact,
    is_measured,
    latency_line,
    microseconds,
    rates_from,
    relative_error,
    write,
)

from moe_mk.config.tuned import Case as TunedCase
from moe_mk.config.tuned import Tuned
from moe_mk.experts import ExpertsContext
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.experts.triton.tuning import BUILT_IN, load_tuned
from moe_mk.external.device import profile_here
from moe_mk.kernels.triton.tile import Tile
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

Calls = Callable[[RowTokens], Callable[[], Any]]
GLUON: tuple[tuple[float, Tile], ...] = (
    (4.0, Tile(8, True, 4, 6, "gluon")),
    (8.0, Tile(16, True, 4, 6, "gluon")),
    (20.0, Tile(32, True, 4, 6, "gluon")),
    (40.0, Tile(64, False, 4, 5, "gluon")),
    (float("inf"), Tile(128, False, 4, 4, "gluon")),
)
"""Gluon tiles by rows per expert, as BUILT_IN of the Triton kernels. Experts with two tiles of 64 rows read 80 KiB a
step through L2, one tile of 128 rows 48 KiB."""
MORE_TO_DO = 75


def experts_of(case: Case, tuned: Tuned[Tile] | None = None) -> TritonExperts:
    """The backend for a case, with given tiles."""
    shape = case.shape
    context = ExpertsContext(
        BF16, FP8_1x128, "silu", case.experts, shape.hidden_size, shape.intermediate_size, torch.device("cuda")
    )
    backend = TritonExperts(context)
    backend.tuned = tuned
    return backend


def ours(case: Case, weights: ExpertWeights, tuned: Tuned[Tile] | None = None) -> tuple[TritonExperts, Calls]:
    backend = experts_of(case, tuned)
    own = backend.relayout(weights)
    return backend, lambda tokens: lambda: backend.run(tokens, own).y


def contenders(case: Case, tiles: str, folder: Path) -> dict[str, Tuned[Tile]]:
    if tiles == "built-in":
        return {"moe_mk, Triton": Tuned((), BUILT_IN), "moe_mk, Gluon": Tuned((), GLUON)}
    shape = case.shape
    tuned_case = TunedCase(shape.hidden_size, shape.intermediate_size, case.experts, FP8_128x128.name, FP8_1x128.name)
    return {"moe_mk, tuned": load_tuned(profile_here(torch.device("cuda")).name, tuned_case, folder)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, required=True, choices=[256, 32, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--tiles", choices=["built-in", "tuned"], default="built-in")
    parser.add_argument("--folder", type=Path, default=Path("configs/tuned"), help="of tuned tiles")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--ceilings", type=Path)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    started, case, rates = time.monotonic(), Case(given.experts), rates_from(given.ceilings)
    asked = contenders(case, given.tiles, given.folder)
    left = [
        count for count in given.tokens if not all(is_measured(given.results, case.name(count), one) for one in asked)
    ]
    weights = case.weights(torch.device("cuda")) if left else None
    for count in left:
        if time.monotonic() - started > given.seconds:
            print("out of time; run again to continue")
            return MORE_TO_DO
        assert weights is not None
        sets = case.tokens(count, torch.device("cuda"), sets=4 if count < 1024 else 2)
        expected, graphs, errors = exact(weights, sets[0]), {}, {}
        for name, tuned in asked.items():
            _, call_of = ours(case, weights, tuned)
            try:
                errors[name] = relative_error(call_of(sets[0])()[: len(expected)], expected)
                graphs[name] = captured([call_of(each) for each in sets])
            except Exception as problem:  # one engine that fails must not stop the other
                write(given.results, {"kind": "skipped", "contender": name, "reason": reason_of(problem)})
        for name, times in microseconds(graphs, len(sets), given.rounds).items():
            tile = asked[name].at(case.rows_an_expert(count))
            more = {"error": round(errors[name], 5), "tile": vars(tile)}
            write(given.results, latency_line(case, count, name, times, rates, **more))
        graphs.clear()
        torch.cuda.empty_cache()
    return 0


def reason_of(problem: Exception) -> str:
    """The first line of an error, with its type."""
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"[:200]


if __name__ == "__main__":
    sys.exit(main())
