"""The native CPU experts against the machine's limits and against other projects, in one alternating run.

    python benchmarks/experts_cpu.py --experts 8 --rows 1 4 16 64 256 --vllm vllm --kt kt --json out.json
    python benchmarks/experts_cpu.py --experts 256 --ours-only --json out.json     # 11.3 GB of weights, 14 GB in all
    python benchmarks/experts_cpu.py --experts 8 --quant mxfp4 nvfp4 mxfp8 int8 int8_w8a8 --vllm vllm --formats-only
    python benchmarks/experts_cpu.py --quant q4_0 q4_0_w4a8 q4_k mxfp4 --ggml ggml --ik build --formats-only

Per number of rows and per routing (uniform, Zipf-skewed) every candidate has its turn once a round: calls that follow a
call, and for few tokens also the first call after a pause (the reason is in experts_cpu_clock.py). Two clocks: `wall`,
and `cpu`, the processor time of all threads, which other programs on the machine disturb far less; ratios and
fractions are of medians of `cpu` unless the machine is quiet. Yardsticks: reading the touched weights once, in the
fastest of some ways, and the bare multiply-add loop of the same instruction set. Errors are L2 against f32 with exact
scales.
peers/README.md states how to get the other projects; what is not there is left out, and so is, for a number of rows,
what took longer than --patience seconds at the number before. With --minutes, rounds are repeated until that time is
over. `make features` makes tables of results that are listed in tools/results.py.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from common import command, parser_of, processor, versions, with_output, with_peers, write
from experts_cpu_candidates import Candidate, Weights, errors_of, gather_candidates, without_wrong, wrong_results
from experts_cpu_clock import FEW, Times, Yardsticks, measure
from torch import Tensor

from moe_mk.kernels.native import instruction_set
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.selfcheck import load
from moe_mk.kernels.native.threads import described

ONEDNN_NAMES = {
    Isa.SCALAR: "SSE41",
    Isa.AVX2: "AVX2",
    Isa.AVX512_VNNI: "AVX512_CORE_VNNI",
    Isa.AVX512_BF16: "AVX512_CORE_BF16",
    Isa.AMX_BF16: "AVX512_CORE_AMX",
}


def routing(tokens: int, experts: int, top_k: int, skew: str) -> tuple[Tensor, Tensor]:
    """Distinct experts a token: uniform, or drawn with odds 1 / rank (Zipf)."""
    odds = torch.ones(experts) if skew == "uniform" else 1.0 / torch.arange(1, experts + 1)
    ids = torch.multinomial(odds.expand(tokens, experts), top_k).to(torch.int32)
    weights = torch.rand(tokens, top_k) + 0.5
    return ids, weights / weights.sum(1, keepdim=True)


def projection(x: Tensor) -> Callable[[], object]:
    """An operator as large as a projection of attention: (H, H) of bf16 times the tokens."""
    weight = torch.randn(x.shape[1], x.shape[1]).bfloat16()
    return lambda: torch.nn.functional.linear(x, weight)


def report(
    seen: dict[str, Times], errors: dict[str, float], flop: float, peak_flop: float, names: str
) -> list[dict[str, Any]]:
    """Print and return one line a candidate; `names` is the one the others are compared with."""
    own, read, peak = seen[names]["cpu_ms"], seen["read"]["cpu_ms"], seen["peak"]["cpu_ms"]
    lines: list[dict[str, Any]] = []
    for name, times in seen.items():
        line: dict[str, Any] = {"candidate": name, **times}
        if name in errors:
            line |= {
                "times_ours": times["cpu_ms"] / own,
                "of_read": read / times["cpu_ms"],
                "of_peak": flop / peak_flop * peak / times["cpu_ms"],
                "error_l2": errors[name],
            }
            shown = (f"{key.removesuffix('_ms')} {value:.3g}" for key, value in line.items() if key != "candidate")
            print(f"  {name:28} {', '.join(shown)}")
        lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None, native: Native | None = None) -> None:
    parser = with_output(parser_of(__doc__, experts=8, hidden=7168, inter=2048, top_k=8, rounds=7), "--json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--skew", nargs="+", default=["uniform"], choices=["uniform", "zipf"])
    parser.add_argument("--minutes", type=float, default=0.0, help="of the whole run, at least; --rounds in any case")
    parser.add_argument("--after-torch", action="store_true", help="measure calls behind an operator of torch as well")
    parser.add_argument("--isa", help="an instruction set, such as AVX512_VNNI: no candidate uses a better one")
    with_peers(parser)
    parser.add_argument("--ours-only", action="store_true", help="no peers, and weights are kept in packed form only")
    parser.add_argument(
        "--quant", nargs="*", default=[], help="further stored formats to measure, see experts_cpu_candidates.py"
    )
    parser.add_argument("--formats-only", action="store_true", help="those of --quant and ours in FP8 only")
    parser.add_argument("--patience", type=float, default=3.0, help="seconds a call may take; slower ones are left out")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    native = native or load(progress=print)
    if options.isa is not None:
        native = replace(native, isas=tuple(isa for isa in native.isas if isa <= Isa[options.isa]))
        native = replace(native, pinned=native.best)
        os.environ["ONEDNN_MAX_CPU_ISA"] = ONEDNN_NAMES[native.best]  # torch's products; read at the first one
    layer = Weights.random(options.experts, options.hidden, options.inter)
    candidates, fp8 = gather_candidates(native, layer, options)
    yardsticks = Yardsticks(native, fp8, options.threads)
    cases: list[dict[str, Any]] = []
    slow: dict[str, set[str]] = {skew: set() for skew in options.skew}
    batches = list(product(options.skew, options.rows))
    for number, (skew, tokens) in enumerate(batches):
        patient = {name: each for name, each in candidates.items() if name not in slow[skew] or name == "ours fp8"}
        until = time.monotonic() + (end - time.monotonic()) / (len(batches) - number)
        cases.append(one_case(patient, yardsticks, options, tokens, skew, until))
        slow[skew] |= {line["candidate"] for line in cases[-1]["lines"] if line["wall_ms"] > options.patience * 1e3}
    write(options.json, facts(native, options) | {"cases": cases})


def one_case(
    candidates: dict[str, Candidate],
    yardsticks: Yardsticks,
    options: argparse.Namespace,
    tokens: int,
    skew: str,
    until: float,
) -> dict[str, Any]:
    """Everybody's error and time on one batch."""
    x = torch.randn(tokens, options.hidden).bfloat16()
    batch = (x, *routing(tokens, options.experts, options.top_k, skew))
    errors = errors_of(candidates, batch, 2 if options.ours_only else 16)
    calls = {name: each.call for name, each in without_wrong(candidates, errors).items()}
    print(f"E={options.experts} M={tokens} {skew}", flush=True)
    rounds = options.rounds if tokens <= FEW else (max(5, options.rounds // 2) if tokens < 1024 else 3)
    operator = projection(batch[0]) if options.after_torch else None
    seen = measure(calls, yardsticks, batch, rounds, until, operator)
    flop = tokens * options.top_k * 6.0 * options.hidden * options.inter
    lines = report(seen, errors, flop, yardsticks.flops, "ours fp8")
    case = {"rows": tokens, "skew": skew, "experts_hit": batch[1].unique().numel(), "lines": lines}
    return case | ({"wrong": wrong} if (wrong := wrong_results(errors)) else {})


def facts(native: Native, options: argparse.Namespace) -> dict[str, object]:
    flags = ("experts", "hidden", "inter", "top_k", "threads", "rounds")
    limit = "" if options.isa is None else " at most"
    return {
        "device": f"{processor()}, {options.threads} threads, best{limit} {native.best.name}",
        "instruction sets": instruction_set.described(native),
        "threads": f"kernels on {described()}",
        "versions": versions(),
        "command": command(),
        "shape": {name: getattr(options, name) for name in flags},
        "note": options.note,
    }


if __name__ == "__main__":
    main()
