"""What the GPU benchmark and the tuner have in common: layers, tokens, and a fair clock.

The clock is a CUDA graph of several calls on different tokens, replayed between two events: no launch from Python is in
it, and no call finds the activations of the one before in cache. Candidates take turns, round after round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moe_mk.config import load_config
from moe_mk.plan.roofline import LayerShape, Rates, experts_us
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

ROTATED = 4
"""Sets of tokens in one graph."""
TOKENS = (1, 8, 16, 64, 128, 512, 1024, 4096, 8192)


@dataclass(frozen=True)
class Case:
    """One rank's share of DeepSeek-V3: some of its experts, and as many rows for them as 256 / experts ranks send."""

    experts: int

    @property
    def shape(self) -> LayerShape:
        return LayerShape.of(load_config("deepseek_v3"), 256 // self.experts)

    def rows_an_expert(self, tokens: int) -> float:
        return self.shape.top_k * tokens / self.experts

    def floor_us(self, tokens: int, rates: Rates) -> float:
        return experts_us(self.shape, tokens, rates)

    def weights(self, device: torch.device) -> ExpertWeights:
        """Random FP8 experts of the size that trained ones have, made expert by expert. Zeros would run faster."""
        shape, stacks = self.shape, []
        for rows, columns in (
            (2 * shape.intermediate_size, shape.hidden_size),
            (shape.hidden_size, shape.intermediate_size),
        ):
            values = torch.empty((self.experts, rows, columns), dtype=torch.float8_e4m3fn, device=device)
            scales = torch.empty((self.experts, rows // 128, columns // 128), dtype=torch.float32, device=device)
            for expert in range(self.experts):
                q = FP8_128x128.quantize(torch.randn((rows, columns), device=device) * columns**-0.5)
                values.view(torch.uint8)[expert].copy_(q.values.view(torch.uint8))
                scales[expert].copy_(q.scales)
            stacks.append(type(q)(values, scales, FP8_128x128))
        return ExpertWeights(*stacks)

    def tokens(self, count: int, device: torch.device, *, fp8: bool = True) -> list[RowTokens]:
        """Rows as this rank receives them, routed uniformly: every token once and K choices on one rank, else every
        assignment as a row of its own, as a dispatch to 256 / experts ranks delivers on average.
        """
        made = []
        for _ in range(ROTATED):
            top_k = self.shape.top_k if self.experts == 256 else 1
            rows = count if self.experts == 256 else count * self.shape.top_k
            ids = torch.rand((rows, self.experts), device=device).argsort(1)[:, :top_k].to(torch.int32).contiguous()
            weights = torch.rand((rows, top_k), device=device)
            x = torch.randn((rows, self.shape.hidden_size), device=device).bfloat16()
            scheme = FP8_1x128 if fp8 else BF16
            made.append(RowTokens(scheme.quantize(x), ids, weights / weights.sum(1, keepdim=True), self.experts))
        return made


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


def microseconds(graphs: Mapping[str, Callable[[], None]], calls: int, rounds: int) -> dict[str, list[float]]:
    """Time of one call in each round; the order turns by one every round."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for number in range(rounds + 2):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name]()
            end.record()
            end.synchronize()
            if number >= 2:
                times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and the middle half."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"median_us": round(middle, 2), "p25_us": round(low, 2), "p75_us": round(high, 2), "rounds": len(times)}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Relative L2 error of all tokens together."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())
