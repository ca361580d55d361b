"""The Triton experts on a GPU against its limits and against other projects, in one alternating run.

    python benchmarks/experts_gpu.py --experts 32 8 --tokens 1 64 --ceilings build/gpu/ceilings.json --json out.json

w13 -> activation -> w2 of DeepSeek-V3 in FP8: all 256 experts of a layer on one GPU, or one rank's share of 8 or 32
ranks. Ours includes sorting, rounding of nothing (tokens arrive in FP8), weighing and summing. `of floor` is the time
that reading the touched weights and rows once, or multiplying, would take at the measured ceilings, over the median.
`--dry-run` prints what would run and why a peer cannot; it measures nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experts_gpu_cases import TOKENS, Case, captured, microseconds, relative_error, summary

from moe_mk.config import device_profile
from moe_mk.experts import ExpertsContext
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.plan.roofline import Rates
from moe_mk.quant import BF16, FP8_1x128
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

OURS = "moe_mk, triton"
PEER_MODULES = {"DeepGEMM, GEMMs only": "deep_gemm", "vLLM, Triton": "vllm"}
LIBRARIES = ("torch", "triton", "sgl-deep-gemm", "deep_gemm", "vllm")


def ours(case: Case, weights: ExpertWeights) -> tuple[TritonExperts, Callable[[RowTokens], Callable[[], Any]]]:
    """Our backend, and calls of it."""
    shape = case.shape
    context = ExpertsContext(
        BF16, FP8_1x128, "silu", case.experts, shape.hidden_size, shape.intermediate_size, torch.device("cuda")
    )
    backend = TritonExperts(context)
    own = backend.relayout(weights)
    return backend, lambda tokens: lambda: backend.run(tokens, own).y


def measure(case: Case, tokens: int, weights: ExpertWeights, rates: Rates, rounds: int) -> dict[str, Any]:
    """One line of the result: every candidate on the same weights and tokens."""
    from experts_gpu_peers import PEERS

    given = case.tokens(tokens, torch.device("cuda"))
    backend, call_of = ours(case, weights)
    calls: dict[str, list[Callable[[], Any]]] = {OURS: [call_of(each) for each in given]}
    skipped: dict[str, str] = {}
    for name, peer in PEERS.items():
        try:
            calls[name] = [peer(weights, each) for each in given]
            calls[name][0]()
            torch.cuda.synchronize()
        except Exception as problem:  # a foreign library may fail in any way; the line states so
            skipped[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
            calls.pop(name, None)
    graphs = {name: captured(each) for name, each in calls.items()}
    times, floor = microseconds(graphs, len(given), rounds), case.floor_us(tokens, rates)
    results = {
        name: summary(taken) | {"of_floor": round(floor / summary(taken)["median_us"], 4)}
        for name, taken in times.items()
    }
    errors = {}
    if "vLLM, Triton" in calls:
        errors["vLLM, Triton"] = relative_error(calls["vLLM, Triton"][0](), calls[OURS][0]())
    tile = backend.tuned.at(given[0].ids_RK.numel() / case.experts)
    return {
        "experts": case.experts, "tokens": tokens, "rows_an_expert": case.rows_an_expert(tokens),
        "floor_us": round(floor, 2), "tile": vars(tile), "results": results, "skipped": skipped,
        "distance_from_ours": errors,
    }  # fmt: skip


def plan(cases: list[Case], tokens: list[int], rates: Rates) -> str:
    """What a run would do on this machine."""
    lines = [f"rates: {rates}"]
    for name, module in PEER_MODULES.items():
        there = find_spec(module) is not None
        lines.append(f"peer {name}: " + ("takes part" if there else f"left out, {module} is not installed"))
    for case in cases:
        for count in tokens:
            floor = case.floor_us(count, rates)
            lines.append(
                f"{case.experts:4} experts {count:6} tokens {case.rows_an_expert(count):8.2f} rows an expert "
                f"{floor:9.1f} us floor"
            )
    return "\n".join(lines)


def about(rates: Rates, measured: bool) -> dict[str, Any]:
    """What the figures belong to."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name(), "python": platform.python_version(), "versions": found,
        "rates": vars(rates), "rates_are": "measured here" if measured else "of the device profile",
        "command": " ".join(sys.argv),
    }  # fmt: skip


def rates_from(file: Path | None) -> tuple[Rates, bool]:
    """The measured ceilings, or those of the profile."""
    profile = Rates.of(device_profile("h200"))
    if file is None or not file.is_file():
        return profile, False
    found = json.loads(file.read_text(encoding="utf-8"))
    return Rates(found["read_gbs"], found["fp8_tflops"] or profile.fp8_tflops, profile.bf16_tflops), True


def main() -> int:
    """Measure every case and write the result after each, so that a run that is cut short leaves what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[256, 32, 8], choices=[256, 32, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ceilings", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    rates, measured = rates_from(given.ceilings)
    cases = [Case(experts) for experts in given.experts]
    if given.dry_run:
        print(plan(cases, given.tokens, rates))
        return 0
    lines: list[dict[str, Any]] = []
    for case in cases:
        weights = case.weights(torch.device("cuda"))
        for count in given.tokens:
            lines.append(measure(case, count, weights, rates, given.rounds))
            print(json.dumps(lines[-1]), flush=True)
            if given.json:
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text(json.dumps(about(rates, measured) | {"lines": lines}, indent=2) + "\n")
        del weights
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
