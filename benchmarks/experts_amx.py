"""The native experts on a processor with AMX, reported by the state of its cores: FP8 in blocks, then other formats.

    python benchmarks/experts_amx.py [--vllm vllm] [--kt kt] --json out.json
    python benchmarks/experts_amx.py --quant int4_g32 int4_g128 q4_k q8_0 mxfp4 --vllm vllm --kt kt --ggml ggml

The cores of a virtual machine change within seconds between two states that nothing in the guest shows: a core of one's
own, and a core that another thread shares, on which bare tile products take about three times as long. Every sample
therefore has a probe before and after it: bare tile products, and reads of 1 MiB per thread. A sample is `quiet` if the
products of both probes reach QUIET of the rate of one thread alone, `shared` if neither does, and `changing` otherwise.
Ratios, medians and minima are formed within a state; `all` are the samples of all states. Refuses to run on a processor
without AMX.
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import command, parser_of, processor, versions, with_peers, write
from experts_cpu_candidates import format_candidates, ours, packed
from experts_cpu_clock import FEW, PAUSE, Yardsticks, clocked, settle
from experts_cpu_peers import (
    Experts,
    KtKernel,
    Weights,
    errors_of,
    load_vllm,
    vllm_bf16,
    vllm_fp8,
    without_wrong,
    wrong_results,
)  # fmt: skip

from moe_mk.errors import UnsupportedError
from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix
from moe_mk.kernels.native.selfcheck import load
from moe_mk.lab.cli.outputs import output_file

QUIET = 0.6
"""Share of the rate of one thread alone; a core that another thread shares reaches about 0.35."""
STATES = ("quiet", "shared", "all")
PROBED_PRODUCTS, PROBED_BYTES = 2_000, 1 << 20
"""Of each thread: about 60 us of tile products on a core of its own, and 50 us of reads."""
SETTLE_S = 0.002
"""Pause before the second probe, at least; it begins when the threads of other libraries have stopped spinning."""
READ_WAYS = Yardsticks.WAYS
OURS = "ours"
AMX = Isa.AMX_BF16
LEAST_ROUNDS = 3
SLOW = "ours avx512"
MOST_ROWS = {SLOW: 64, "kt-kernel fp8": 64}
"""Candidates that are left out above a number of tokens, where a call takes seconds."""
FORMATS = ("fp8_channel", "int8", "int8_w8a8", "int8_block", "int8_block_w8a8", "mxfp8", "mxfp4", "nvfp4")
FORMAT_ROWS = (1, 16, 64, 256)
"""Numbers of tokens at which other formats are compared with FP8 blocks, in the last third of the run."""


@dataclass(frozen=True)
class Rates:
    """One probe. products: floating-point operations per second and thread; reads: bytes per second of all threads."""

    products: float
    reads: float


@dataclass(frozen=True)
class Sample:
    """One call with the probes before and after it."""

    wall_ms: float
    cpu_ms: float
    before: Rates
    after: Rates

    def state(self, alone: float) -> str:
        """quiet, shared or changing. alone: products per second of one thread that runs alone."""
        quiet = [probe.products >= QUIET * alone for probe in (self.before, self.after)]
        return "quiet" if all(quiet) else "changing" if any(quiet) else "shared"


class Probe:
    """Bare tile products and reads, timed on all threads at once."""

    def __init__(self, native: Native, threads: int) -> None:
        self.native, self.threads = native, threads
        self.memory = torch.ones(threads * PROBED_BYTES, dtype=torch.uint8)
        self.alone = max(self.products(1) for _ in range(200))

    def products(self, threads: int) -> float:
        """Operations per second of each thread; repeated while a thread wakes up too late to take part."""
        done = ctypes.c_double(0)
        for _ in range(20):
            start = time.perf_counter()
            self.native.call("peak_rate", PROBED_PRODUCTS, threads, int(AMX), 0, ctypes.byref(done))
            took = time.perf_counter() - start
            if done.value >= PROBED_PRODUCTS * threads * 4 * 16384:
                break
        return done.value / threads / took

    def reads(self) -> float:
        """Bytes per second of all threads."""
        folded, start = ctypes.c_uint64(0), time.perf_counter()
        pointer, size = self.memory.data_ptr(), self.memory.numel()
        self.native.call("read_rate", pointer, size, 0, self.threads, int(AMX), ctypes.byref(folded))
        return size / (time.perf_counter() - start)

    def rates(self) -> Rates:
        """One probe: the second of two runs, the first of which wakes the threads up."""
        self.products(self.threads)
        return Rates(self.products(self.threads), self.reads())


def sample(probe: Probe, call: Callable[[], object], awake: Callable[[], object]) -> Sample:
    """One call that follows another one, between two probes."""
    settle(PAUSE)
    before = probe.rates()
    awake()
    wall_ms, cpu_ms = clocked(call)
    settle(SETTLE_S)
    return Sample(wall_ms, cpu_ms, before, probe.rates())


def measure(
    probe: Probe, calls: Mapping[str, Callable[[], object]], few: bool, until: float
) -> dict[str, list[Sample]]:
    """Call everything in turn until a time of time.monotonic(), but LEAST_ROUNDS rounds at least."""
    seen: dict[str, list[Sample]] = {name: [] for name in calls}
    rounds = 0
    while rounds < LEAST_ROUNDS or time.monotonic() < until:
        for name, call in calls.items():
            seen[name].append(sample(probe, call, call if few else (lambda: None)))
        rounds += 1
    return seen


def by_state(samples: Sequence[Sample], alone: float) -> dict[str, dict[str, float]]:
    """Medians and minima of each state that occurred, and of all samples."""
    found = {}
    for state in STATES:
        chosen = [each for each in samples if state in ("all", each.state(alone))]
        if not chosen:
            continue
        probes = [probe for each in chosen for probe in (each.before, each.after)]
        found[state] = {
            "samples": len(chosen),
            "wall_ms": statistics.median(each.wall_ms for each in chosen),
            "wall_ms_min": min(each.wall_ms for each in chosen),
            "cpu_ms": statistics.median(each.cpu_ms for each in chosen),
            "products": statistics.median(probe.products for probe in probes),
            "reads": statistics.median(probe.reads for probe in probes),
        }
    return found


def one_case(
    native: Native,
    probe: Probe,
    layer: Weights,
    weights: tuple[PackedMatrix, PackedMatrix],
    candidates: Mapping[str, Experts],
    references: Mapping[str, Experts],
    tokens: int,
    until: float,
) -> dict[str, Any]:
    """Errors and times of one number of tokens, each of which goes to every expert that top-8 allows.

    references: for errors, by candidate; the others are compared with the layer.
    """
    experts, hidden, inter = layer.shape
    top_k = min(8, experts)
    x = torch.randn(tokens, hidden).bfloat16()
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(torch.int32)
    shares = torch.rand(tokens, top_k) + 0.5
    batch = x, ids, shares / shares.sum(1, keepdim=True)
    candidates = {name: run for name, run in candidates.items() if tokens <= MOST_ROWS.get(name, tokens)}
    errors = errors_of(candidates, references, layer, batch, 8)
    candidates = without_wrong(candidates, errors)
    reads = Yardsticks(native, weights, probe.threads)
    calls: dict[str, Callable[[], object]] = {f"read {way}": partial(reads.read, 1.0, way) for way in range(READ_WAYS)}
    calls |= {name: partial(run, *batch) for name, run in candidates.items()}
    seen = measure(probe, calls, tokens <= FEW, until)
    lines = [
        {"candidate": name, "states": by_state(samples, probe.alone)}
        | ({"error_l2": errors[name]} if name in errors else {})
        for name, samples in seen.items()
    ]
    flop = tokens * top_k * 6.0 * hidden * inter
    print(f"M={tokens}: {len(seen[OURS])} rounds, states {counts(lines)}", flush=True)
    for line in lines:
        times = (f"{state} {each['wall_ms']:.3g} ({each['wall_ms_min']:.3g})" for state, each in line["states"].items())
        print(f"  {line['candidate']:28} ms, median (minimum): {', '.join(times)}", flush=True)
    case = {"rows": tokens, "experts_hit": int(ids.unique().numel()), "flop": flop, "lines": lines}
    return case | ({"wrong": wrong} if (wrong := wrong_results(errors)) else {})


def counts(lines: Sequence[Mapping[str, Any]]) -> str:
    """Samples of each state, of all candidates."""
    total = {state: sum(line["states"].get(state, {}).get("samples", 0) for line in lines) for state in STATES}
    return f"quiet {total['quiet']}, shared {total['shared']} of {total['all']}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, experts=8, hidden=7168, inter=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 256, 1024])
    parser.add_argument("--quant", nargs="*", default=FORMATS, help="other formats of ours to compare with FP8 blocks")
    with_peers(parser)
    parser.add_argument("--minutes", type=float, default=7.0, help="of the whole run")
    parser.add_argument("--json", type=output_file, help="the result file to write")
    return parser.parse_args(arguments)


def run(native: Native, options: argparse.Namespace) -> dict[str, Any]:
    """Measure every number of tokens. Raises UnsupportedError on a processor without AMX."""
    start = time.monotonic()
    native.isa_or_best(AMX)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    layer = Weights(options.experts, options.hidden, options.inter)
    weights = packed(native, layer, Format.FP8, options.threads)
    candidates = {
        OURS: ours(native, weights, options.threads, isa=AMX),
        SLOW: ours(native, weights, options.threads, isa=Isa.AVX512_BF16),
    }
    if Isa.AVX512_BF16 not in native.isas:
        del candidates[SLOW]
    if options.vllm is not None:
        load_vllm(options.vllm, native.best)
        candidates |= {"vllm fp8": vllm_fp8(layer), "vllm bf16": vllm_bf16(*layer.bf16(), "amx")}
    kt = None
    if options.kt is not None:
        workers = options.kt_threads or options.threads
        kt = KtKernel(options.kt, workers, min(8, options.experts), max(options.rows), best=native.best)
        candidates["kt-kernel fp8"] = kt.experts(layer.w13, layer.w2, (layer.s13, layer.s2))
    probe = Probe(native, options.threads)
    bf16 = {"ours bf16": ours(native, packed(native, layer, Format.BF16, options.threads), options.threads, isa=AMX)}
    vllm = options.vllm is not None
    stored, references = format_candidates(
        native, layer, options.quant, options.threads, vllm=vllm, ggml=options.ggml, kt=kt
    )
    mode = ExpertsMode(quantize=Rounding.FP8)  # tokens rounded to FP8 as the checkpoint defines
    rounded, exact = (ours(native, weights, options.threads, mode, isa) for isa in (AMX, Isa.SCALAR))
    others = {OURS: candidates[OURS], "ours fp8 rows": rounded} | bf16 | stored
    references["ours fp8 rows"] = lambda *batch: exact(*batch).float()
    steps: list[tuple[str, int, float]] = [("cases", rows, 2 / len(options.rows)) for rows in options.rows]
    of_formats = [rows for rows in FORMAT_ROWS if rows <= max(options.rows)]
    steps += [("formats", rows, 1 / len(of_formats)) for rows in of_formats]
    end, cases = start + options.minutes * 60, {"cases": [], "formats": []}
    for number, (key, tokens, share) in enumerate(steps):
        now = time.monotonic()
        until = now + (end - now) * share / sum(step[2] for step in steps[number:])
        chosen = candidates if key == "cases" else others
        cases[key].append(one_case(native, probe, layer, weights, chosen, references, tokens, until))
    return {
        "device": f"{processor()}, {options.threads} threads",
        "versions": versions(),
        "command": command(),
        "shape": {"E": options.experts, "H": options.hidden, "I": options.inter},
        "threads": options.threads,
        "alone": probe.alone,
        **cases,
    }


def main(arguments: Sequence[str] | None = None, native: Native | None = None) -> int:
    options = parsed(arguments)
    try:
        results = run(native or load(progress=print), options)
    except UnsupportedError as refusal:
        print(refusal)
        return 1
    write(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
