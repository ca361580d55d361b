"""Find the fastest tile for every number of tokens, and write it where the backend reads it.

    python benchmarks/experts_gpu_tune.py --experts 32 --folder configs/tuned --seconds 480

Gluon tiles are tried first. Each tile must agree with the built-in one within what FP8 allows; one that does not, or
fails, is left out and named. A file is written after each number of tokens, so that a run that is cut short leaves what
it has; points that a file of the same device and torch already has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from experts_gpu_cases import TOKENS, captured, microseconds, relative_error, summary
from experts_gpu_cases import Case as Layer
from experts_gpu_peers import ours

from moe_mk.config.tuned import Case, Tuned, TunedPoint, load_measured
from moe_mk.experts.triton.tuning import BUILT_IN, CANDIDATES, sensible, tuned_folder
from moe_mk.external.device import profile_here
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.tuning import save_measured
from moe_mk.quant import FP8_1x128, FP8_128x128

AGREES = 0.02
"""Relative L2 distance between two orders of the same FP8 sums, generously: hidden rows are rounded to 3 bits."""


class Suspects:
    """Tiles under trial, in a file: one that hangs is found there when the killed run is started again."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.hung: set[str] = set(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else set()

    def trying(self, tile: Tile | None) -> None:
        """Note the tile that is tried now, or that the last one came back."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        now = sorted(self.hung | ({str(tile)} if tile else set()))
        self.file.write_text(json.dumps(now), encoding="utf-8")


def point(
    layer: Layer, tokens: int, backend: Any, call_of: Any, rounds: int, suspects: Suspects
) -> tuple[TunedPoint, dict[str, str]]:
    """Time every sensible tile that agrees."""
    given, rows = layer.tokens(tokens, torch.device("cuda"), sets=2), layer.rows_an_expert(tokens)
    backend.tuned = Tuned((), BUILT_IN)
    expected, graphs, failed = call_of(given[0])().clone(), {}, {}
    for tile in sorted(CANDIDATES, key=lambda tile: tile.engine != "gluon"):
        if not sensible(tile, rows):
            continue
        if str(tile) in suspects.hung:
            failed[str(tile)] = "did not come back in an earlier run"
            continue
        suspects.trying(tile)
        backend.tuned = Tuned.fixed(tile)
        try:
            distance = relative_error(call_of(given[0])(), expected)
            if distance <= AGREES:
                graphs[tile] = captured([call_of(each) for each in given])
            else:
                failed[str(tile)] = f"is {distance:.3f} away"
        except Exception as problem:  # a kernel that needs more than there is must not stop the others
            failed[str(tile)] = f"{type(problem).__name__}: {problem}"[:200]
        torch.cuda.synchronize()
        suspects.trying(None)
    by_name = {str(tile): graph for tile, graph in graphs.items()}
    times = {name: summary(taken)["median_us"] for name, taken in microseconds(by_name, len(given), rounds).items()}
    best = min(graphs, key=lambda tile: times[str(tile)])
    print(json.dumps({"rows": rows, "best": str(best), "times": times, "failed": failed}), flush=True)
    return TunedPoint(tokens, asdict(best), times[str(best)]), failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=256, choices=[256, 32, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--folder", type=Path, default=Path("configs/tuned"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--suspects", type=Path, default=Path("build/gpu/suspects.json"))
    given = parser.parse_args()
    layer = Layer(given.experts)
    case = Case(layer.shape.hidden_size, layer.shape.intermediate_size, given.experts, FP8_128x128.name, FP8_1x128.name)
    started, device = time.monotonic(), profile_here(torch.device("cuda")).name
    file = tuned_folder(device, given.folder) / f"{case.name(layer.shape.top_k)}.json"
    points = {each.tokens: each for each in (load_measured(file, "this file again") if file.is_file() else ())}
    backend, call_of = ours(layer, layer.weights(torch.device("cuda")))
    for tokens in given.tokens:
        if tokens in points:
            continue
        if time.monotonic() - started > given.seconds:
            print("out of time; run again to go on")
            return 75
        found, _ = point(layer, tokens, backend, call_of, given.rounds, Suspects(given.suspects))
        points[tokens] = found
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "built_in": len(BUILT_IN)}
        save_measured(file, list(points.values()), about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
