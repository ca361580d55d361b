"""A complete layer on a GPU, called and replayed as a graph, and the experts in other weight formats.

    python benchmarks/layer_gpu.py --what "eager and graph" --results results.jsonl

The layer has DeepSeek-V3's router, 32 experts and a shared one. A call includes the gate, routing, experts and the sum.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from experts_gpu_cases import Case, captured, in_turns, rates_from, reason_of, replayed, sm_mhz, summary, write

from moe_mk import MoELayer
from moe_mk.config import load_config
from moe_mk.experts import ExpertsContext
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.lab.plan.roofline import LayerShape, layer_us
from moe_mk.lab.testing.experts import random_experts
from moe_mk.quant import BF16, FP8_1x128
from moe_mk.quant.int8 import INT8_CHANNEL, INT8_TOKEN
from moe_mk.quant.microscaling import MXFP4

EXPERTS = 32
TOKENS = (1, 16, 128)
CUDA = torch.device("cuda")


def layer() -> MoELayer:
    """DeepSeek-V3 with 32 experts, random FP8 weights."""
    config = load_config("deepseek_v3").with_(num_experts=EXPERTS, experts="triton", max_num_tokens=max(TOKENS))
    model, tensors = config.model, dict[str, torch.Tensor]()

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = (torch.randn((rows, columns), device=CUDA) * 16.0).to(torch.float8_e4m3fn)
        scales = torch.full((-(-rows // 128), -(-columns // 128)), columns**-0.5 / 16.0, device=CUDA)
        tensors[f"{name}.weight_scale_inv"] = scales

    hidden = model.hidden_size
    tensors["gate.weight"] = torch.randn((EXPERTS, hidden), device=CUDA).bfloat16() * hidden**-0.5
    tensors["gate.e_score_correction_bias"] = torch.zeros(EXPERTS, device=CUDA)
    for name in (*(f"experts.{expert}" for expert in range(EXPERTS)), "shared_experts"):
        inner = model.shared_size if name == "shared_experts" else model.moe_intermediate_size
        matrix(f"{name}.gate_proj", inner, hidden)
        matrix(f"{name}.up_proj", inner, hidden)
        matrix(f"{name}.down_proj", hidden, inner)
    return MoELayer(config, dtype=torch.bfloat16, device=CUDA).load_weights(tensors)


def line(case: str, order: list[int], contender: str, times: list[float], **more: Any) -> dict[str, Any]:
    """A benchmark result; the lower bound may be unknown."""
    found = {"kind": "latency", "case": case, "order": order, "contender": contender, **summary(times), **more}
    return found | {"sm_mhz": sm_mhz()}


def eager_and_graph(results: Path | None, ceilings: Path | None) -> None:
    """The layer with its launches from Python, and as a graph."""
    made, rates = layer(), rates_from(ceilings)
    made.warm_up(TOKENS)
    config = load_config("deepseek_v3").with_(num_experts=EXPERTS)
    for count in TOKENS:
        x_TH = torch.randn((count, config.model.hidden_size), device=CUDA).bfloat16()
        graph, floor = captured([partial(made, x_TH)]), layer_us(LayerShape.of(config), count, rates)

        def eager(x_TH: torch.Tensor = x_TH) -> None:
            made(x_TH)

        runs: dict[str, Callable[[], None]] = {"moe_mk, eager": eager, "moe_mk, graph": graph}
        for name, times in in_turns(list(runs), 30, lambda name, runs=runs: replayed(runs[name], 1)).items():
            of_floor = round(floor / summary(times)["median_us"], 4)
            case = f"layer of {EXPERTS} experts, {count} tokens"
            write(results, line(case, [1000, count], name, times, floor_us=round(floor, 2), of_floor=of_floor))


def formats(results: Path | None) -> None:
    """One rank's share of 8 in MXFP4, with bf16 rows and multiplied as FP8, and in INT8."""
    case = Case(EXPERTS)
    shape = case.shape
    sizes = (EXPERTS, shape.hidden_size, shape.intermediate_size, CUDA)
    kinds = (("MXFP4", MXFP4, BF16), ("MXFP4 as FP8", MXFP4, FP8_1x128), ("INT8", INT8_CHANNEL, INT8_TOKEN))
    for name, weights, compute in kinds:
        try:
            backend = TritonExperts(ExpertsContext(BF16, compute, "silu", *sizes))
            own = backend.relayout(random_experts(weights, EXPERTS, shape.hidden_size, shape.intermediate_size, CUDA))
            for count in (1, 128, 1024):
                sets = case.tokens(count, CUDA, fp8=False, sets=2)
                graph = captured([partial(backend.run, each, own) for each in sets])
                times = [replayed(graph, len(sets)) for _ in range(20)]
                write(results, line(f"{case.name(count)}, {name}", [2000, count], f"moe_mk, {name}", times))
        except Exception as problem:  # one format that fails must not stop the other
            write(results, {"kind": "skipped", "contender": f"moe_mk, {name}", "reason": reason_of(problem)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["eager and graph", "formats"], required=True)
    parser.add_argument("--ceilings", type=Path)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    if given.what == "formats":
        formats(given.results)
    else:
        eager_and_graph(given.results, given.ceilings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
