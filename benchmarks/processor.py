"""Every instruction set of this processor for every format and number of rows, in turn, and which one is chosen.

    python benchmarks/processor.py [--minutes 8] [--json FILE]     # make bench-cpu writes the file of this processor

A cell is a format and a number of rows an expert: 8 experts get all of them from 64 rows on, EXPERTS experts below, so
that their weights come from memory. In each cell all instruction sets have their turns until the cell's share of the
minutes is over, at least ROUNDS times. `chosen` is what `kernel.instruction_set = "auto"` takes; `of best` is the time
of the fastest over that of the chosen one. Few rows are compared with reading the packed weights once, many with bare
multiply-add instructions of the same set. Each format is also compared with an f32 reference of the decoded weights.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import command, parser_of, processor, versions, write
from experts_cpu_candidates import Weights, kind_of, mode_of, ours
from experts_cpu_clock import Yardsticks, clocked, settle
from experts_cpu_peers import Batch

from moe_mk.kernels.native.experts_mode import Rounding
from moe_mk.kernels.native.instruction_set import choice, described
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.selfcheck import load
from moe_mk.lab.cli.outputs import output_file
from tools.results import cells_table, chosen_well

FOLDER = Path(__file__).parent / "results" / "processors"
FORMATS = (
    "bf16", "fp8", "int8", "int8_w8a8", "int4_g128", "int4_g128_w4a8", "mxfp4", "q4_k", "q8_0",
)  # fmt: skip
"""Names of `experts_cpu.py --quant`, and bf16 and fp8 (blocks of 128x128)."""
ROWS = (1, 4, 16, 64, 512)
EXPERTS, TOP_K, MANY = 32, 8, 64
ROUNDS, PAUSE = 3, 0.004
LARGEST_ERROR = {Rounding.NONE: 0.01, Rounding.INT8: 0.03, Rounding.INT8_PARTS: 0.03}
"""L2, against f32: tokens and activations in bf16, or rounded to INT8."""
PEAK_ITERATIONS = 200_000


def batch_of(rows: int, hidden: int, experts: int) -> Batch:
    """Tokens of which every expert gets `rows`: the first TOP_K experts for many rows, all of them for few."""
    hit = TOP_K if rows >= MANY else experts
    tokens = rows * hit // TOP_K
    ids = (torch.arange(tokens)[:, None] * TOP_K + torch.arange(TOP_K)) % hit
    weights = torch.full((tokens, TOP_K), 1.0 / TOP_K, dtype=torch.float32)
    return torch.randn(tokens, hidden, dtype=torch.float32).bfloat16(), ids.to(torch.int32), weights


def one_format(native: Native, layer: Weights, quant: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the cells of a format. Raises AssertionError for a result that is wrong."""
    stored, mode = layer.stored_as(kind_of(quant)), mode_of(quant)
    weights = stored.packed(native)
    limits = Yardsticks(native, weights, options.threads)
    chosen = choice(native, weights[0].layout.format, mode.quantize)
    calls = {isa: ours(native, weights, options.threads, mode, isa) for isa in native.isas if isa is not Isa.SCALAR}
    few, want = batch_of(4, options.hidden, options.experts), None
    for isa, call in calls.items():
        want = stored.reference(*few) if want is None else want
        error = float((call(*few).float() - want).norm() / want.norm())
        assert error < LARGEST_ERROR[mode.quantize], f"{quant} by {isa.name}: relative error {error:.1e}"
    share = options.minutes * 60 / (len(options.quant) * len(options.rows)) * 0.75  # the rest is quantising and packing
    for rows in options.rows:
        batch = batch_of(rows, options.hidden, options.experts)
        hit = int(batch[1].unique().numel())
        seen: dict[Isa, list[float]] = {isa: [] for isa in calls}
        reads, peaks = list[float](), list[float]()
        until = time.monotonic() + share
        while min(map(len, seen.values())) < ROUNDS or time.monotonic() < until:
            ways = [partial(limits.read, hit / options.experts, way) for way in range(Yardsticks.WAYS)]
            reads.append(min(clocked(way)[0] for way in ways))
            peaks.append(max(limits.operations(chosen.isa, floats, PEAK_ITERATIONS) for floats in (0, 1)))
            for isa, call in calls.items():
                settle(PAUSE)
                call(*(part[:TOP_K] for part in batch))  # wakes the threads
                seen[isa].append(clocked(partial(call, *batch))[0])
        flop = rows * hit * 6.0 * options.hidden * options.inter
        ms = {isa.name: statistics.median(times) for isa, times in seen.items()}
        yield {
            "format": quant,
            "rows": rows,
            "rounds": min(map(len, seen.values())),
            "chosen": chosen.isa.name,
            "because": chosen.because,
            "wall_ms": ms,
            "of_best": min(ms.values()) / ms[chosen.isa.name],
            "of_read": statistics.median(reads) / ms[chosen.isa.name],
            "of_peak": flop / statistics.median(peaks) * 1e3 / ms[chosen.isa.name],
        }


def file_of_processor() -> Path:
    """The result file of this processor: vendor, family and model of /proc/cpuinfo."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    stated = {part[0].strip(): part[1].strip() for line in text.splitlines() if len(part := line.split(":", 1)) == 2}
    parts = [stated.get(name, "unknown") for name in ("vendor_id", "cpu family", "model")]
    return Path(os.path.relpath(FOLDER)) / f"{'-'.join(parts)}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, hidden=2048, inter=768, experts=EXPERTS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quant", nargs="+", default=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole run, about")
    parser.add_argument("--json", type=output_file, help="the result file to write")
    parser.add_argument("--file", action="store_true", help="print the name of this processor's result file, and end")
    options = parser.parse_args(arguments)
    if options.file:
        print(file_of_processor())
        return 0
    if options.experts % TOP_K:
        parser.error(f"--experts {options.experts} is no multiple of {TOP_K}")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    native = load(progress=print)
    layer = Weights.random(options.experts, options.hidden, options.inter)
    cells = []
    for quant in options.quant:
        for cell in one_format(native, layer, quant, options):
            print(f"{quant} {cell['rows']}: of best {cell['of_best']:.2f}, {cell['rounds']} rounds", flush=True)
            cells.append(cell)
    run = {
        "processor": processor(),
        "model": file_of_processor().stem,
        "instruction sets": described(native),
        "usable": [isa.name for isa in native.isas],
        "threads": options.threads,
        "versions": versions(),
        "date": date.today().isoformat(),
        "command": command(),
        "shape": {name: getattr(options, name) for name in ("experts", "hidden", "inter")},
        "cells": cells,
    }
    print(f"{cells_table(run)}\n\n{chosen_well(run)}")
    write(options.json, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
