"""What the GPU benchmarks have in common: layers, tokens, a fair clock, an exact result, and lines of results.

The clock is a CUDA graph of several calls on different tokens, replayed between two events: no launch from Python is in
it, and no call finds the activations of the one before in cache. Contenders take turns, round after round. Weights and
tokens are drawn from fixed seeds, so that processes of their own multiply the same.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where moe_mk is not installed

from moe_mk.config import device_profile, load_config
from moe_mk.lab.plan.roofline import Floor, LayerShape, Rates, floors
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

ROTATED = 4
"""Sets of tokens in one graph."""
TOKENS = (1, 16, 128, 1024, 8192)
ALL_EXPERTS = 256
EXACT_ROWS = 4
"""Rows that are compared with an exact result."""


@dataclass(frozen=True)
class Case:
    """One rank's share of DeepSeek-V3: some of its experts, and the tokens that 256 / experts ranks send there."""

    experts: int

    @property
    def shape(self) -> LayerShape:
        return LayerShape.of(load_config("deepseek_v3"), ALL_EXPERTS // self.experts)

    def name(self, tokens: int) -> str:
        return f"{self.experts} experts, {tokens} tokens"

    def gemms(self, tokens: int, rates: Rates) -> list[Floor]:
        """The floors of both grouped GEMMs."""
        return [floor for floor in floors(self.shape, tokens, rates) if floor.op in ("w13", "w2")]

    def weights(self, device: torch.device) -> ExpertWeights:
        """Random FP8 experts of the size that trained ones have, drawn expert by expert. Zeros would run faster."""
        shape, stacks = self.shape, []
        draw = torch.Generator(device).manual_seed(self.experts)
        for rows, columns in (
            (2 * shape.intermediate_size, shape.hidden_size),
            (shape.hidden_size, shape.intermediate_size),
        ):
            values = torch.empty((self.experts, rows, columns), dtype=torch.float8_e4m3fn, device=device)
            scales = torch.empty((self.experts, rows // 128, columns // 128), dtype=torch.float32, device=device)
            for expert in range(self.experts):
                matrix = torch.randn((rows, columns), device=device, generator=draw) * columns**-0.5
                q = FP8_128x128.quantize(matrix)
                assert q.scales is not None
                values.view(torch.uint8)[expert].copy_(q.values.view(torch.uint8))
                scales[expert].copy_(q.scales)
            stacks.append(QuantTensor(values, scales, FP8_128x128))
        return ExpertWeights(*stacks)

    def tokens(self, count: int, device: torch.device, *, fp8: bool = True, sets: int = ROTATED) -> list[RowTokens]:
        """Rows that this rank receives if each of 256 / experts ranks has `count` tokens, routed uniformly.

        A row is a token with at least one expert here; choices of other ranks' experts are -1, as a transport that
        sends each token once to a rank delivers them.
        """
        draw, made = torch.Generator(device).manual_seed(count), []
        for _ in range(sets):
            total, top_k = count * (ALL_EXPERTS // self.experts), self.shape.top_k
            ids = torch.rand((total, ALL_EXPERTS), device=device, generator=draw).argsort(1)[:, :top_k].to(torch.int32)
            ids = torch.where(ids < self.experts, ids, -1)
            here = (ids >= 0).any(1)
            here[0] |= ~here.any()
            ids = ids[here].contiguous()
            weights = torch.rand(ids.shape, device=device, generator=draw) * 0.25
            x = torch.randn((len(ids), self.shape.hidden_size), device=device, generator=draw).bfloat16()
            scheme = FP8_1x128 if fp8 else BF16
            weights = weights.masked_fill(ids < 0, 0.0)
            expected = float(count * top_k)
            made.append(RowTokens(scheme.quantize(x), ids, weights, self.experts, expected_N=expected))
        return made


def exact(weights: ExpertWeights, tokens: RowTokens, rows: int = EXACT_ROWS) -> Tensor:
    """The result of the first rows in f64, from the quantised weights and tokens in f32: (rows, H)."""
    x = tokens.x_RH[:rows].dequantize(torch.float32).double()
    y = torch.zeros((len(x), weights.w2.shape[1]), dtype=torch.float64, device=x.device)
    for row, ids in enumerate(tokens.ids_RK[:rows].tolist()):
        for k, slot in enumerate(ids):
            if slot < 0:
                continue
            own = weights.slot(slot)
            gate, up, down = (q.dequantize(torch.float32).double() for q in (own.gate_IH, own.up_IH, own.down_HI))
            hidden = torch.nn.functional.silu(gate @ x[row]) * (up @ x[row])
            y[row] += float(tokens.weights_RK[row, k]) * (down @ hidden)
    return y


@cache
def measuring_stream() -> torch.cuda.Stream:
    """The one stream of all graphs, so that they share one workspace; they never run at once."""
    return torch.cuda.Stream()


def captured(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """A graph of calls, each run twice before it is captured."""
    stream = measuring_stream()
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept: list[object] = []
    with torch.cuda.graph(graph, stream=stream):
        kept += [call() for call in calls]

    def replay() -> None:
        graph.replay()

    replay.kept = kept  # type: ignore[attr-defined]
    return replay


def replayed(graph: Callable[[], None], calls: int) -> float:
    """Microseconds of one call in one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def in_turns(names: Sequence[str], rounds: int, once: Callable[[str], float | None]) -> dict[str, list[float]]:
    """Times of every contender; the order turns by one every round, and two rounds of warming up do not count.

    once: one measurement, or None for a contender that failed, which takes no further turn.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        there = [name for name in names if name in times]
        for name in there[number % max(len(there), 1) :] + there[: number % max(len(there), 1)]:
            taken = once(name)
            if taken is None:
                del times[name]
            elif number >= 2:
                times[name].append(taken)
    return {name: taken for name, taken in times.items() if taken}


def summary(times: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"median_us": round(middle, 2), "p25_us": round(low, 2), "p75_us": round(high, 2), "rounds": len(times)}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def reason_of(problem: Exception) -> str:
    """The first line of an error, with its type."""
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"[:200]


def latency_line(
    case: Case, tokens: int, contender: str, times: Sequence[float], rates: Rates, **more: Any
) -> dict[str, Any]:
    """A result: times, bytes and products a second of both GEMMs, and the share of their lower bound."""
    gemms, taken = case.gemms(tokens, rates), summary(times)
    floor, median = sum(each.us for each in gemms), taken["median_us"]
    found = {"kind": "latency", "case": case.name(tokens), "order": [case.experts, tokens], "contender": contender}
    found |= taken | {"floor_us": round(floor, 2), "of_floor": round(floor / median, 4)}
    found |= {"gbs": round(sum(each.num_bytes for each in gemms) / median / 1e3, 1)}
    return found | {"tflops": round(sum(each.flops for each in gemms) / median / 1e6, 2), "sm_mhz": sm_mhz()} | more


def sm_mhz() -> int | None:
    """The clock of the multiprocessors now; None where it cannot be read."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return int(done.stdout.strip())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def write(file: Path | None, line: Mapping[str, Any]) -> None:
    """Print a result, and append it to a file at once."""
    text = json.dumps(line)
    print(text, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as kept:
            kept.write(text + "\n")


def is_measured(file: Path | None, case: str, contender: str) -> bool:
    """Whether a results file has a latency already: a run that was cut off does not repeat it."""
    if file is None or not file.is_file():
        return False
    from tools.gpu_report import latest, read

    return any((line["case"], line["contender"]) == (case, contender) for line in latest(read(file)))


def rates_from(file: Path | None) -> Rates:
    """The measured ceilings, or those of the H200's profile."""
    profile = Rates.of(device_profile("h200"))
    if file is None or not file.is_file():
        return profile
    found = json.loads(file.read_text(encoding="utf-8"))
    return Rates(found["read_gbs"], found["fp8_tflops"] or profile.fp8_tflops, profile.bf16_tflops)
