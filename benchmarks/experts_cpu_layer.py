"""What router, shared expert and everything around them add to the routed experts of one layer on a CPU.

    python benchmarks/experts_cpu_layer.py --tokens 1 4 16 --json out.json

The routed experts alone, on packed weights with the layer's own routing, against the whole layer: both clocks, in turn,
with other tokens every time so that no expert stays in a cache. Each call that counts comes directly behind the routed
experts on another batch, as in a decoder that goes from layer to layer: all find the same caches, which weights have
swept, and threads as those left them. The shared expert alone is 1 / top_k more bytes.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import about, parser_of, with_output, write
from experts_cpu_clock import clocked
from experts_cpu_peers import Weights
from torch import Tensor

from moe_mk import DeepseekV3MoE
from moe_mk.config import load_config
from moe_mk.experts.cpu_native.weights import native_kernels
from moe_mk.kernels.native.prepared import experts_rows


def built(options: argparse.Namespace, *, fused_router: bool) -> DeepseekV3MoE:
    """One FP8 layer of DeepSeek-V3's sizes with fewer experts."""
    config = load_config("deepseek_v3").with_(
        num_experts=options.experts, hidden_size=options.hidden, moe_intermediate_size=options.inter,
        top_k=options.top_k, num_expert_group=4, topk_group=2, experts="cpu_native", activations="plain",
        max_num_tokens=256, fused_router=fused_router,
    )  # fmt: skip
    return DeepseekV3MoE(config)


def tensors(options: argparse.Namespace) -> dict[str, Tensor]:
    """Random weights by the names of a checkpoint; the last expert that is drawn is the shared one."""
    drawn = Weights(options.experts + 1, options.hidden, options.inter, keep=False)
    made = {"gate.weight": torch.randn(options.experts, options.hidden).bfloat16() * options.hidden**-0.5}
    made["gate.e_score_correction_bias"] = torch.rand(options.experts)
    for e in range(options.experts + 1):
        block = f"experts.{e}" if e < options.experts else "shared_experts"
        w13, s13, w2, s2 = drawn.expert(e)
        parts = zip(("gate_proj", "up_proj", "down_proj"), (*w13.chunk(2), w2), (*s13.chunk(2), s2), strict=True)
        for name, codes, scales in parts:
            made[f"{block}.{name}.weight"], made[f"{block}.{name}.weight_scale_inv"] = codes, scales
    return made


def experts_alone(layer: DeepseekV3MoE) -> Callable[[Tensor], object]:
    """The native call itself, with the routing of the same tokens made beforehand."""
    native, packed = native_kernels(), layer.state.experts.weights
    known: dict[int, Any] = {}

    def run(x_TH: Tensor) -> object:
        routing = known.get(x_TH.data_ptr())
        if routing is None:
            routing = known[x_TH.data_ptr()] = layer.route(x_TH)
        threads = torch.get_num_threads()
        return experts_rows(native, x_TH, routing.ids_TK, routing.weights_TK, packed.w13, packed.w2, threads=threads)

    return run


def measured(calls: dict[str, Callable[[Tensor], object]], batches: list[Tensor], rounds: int) -> dict[str, Any]:
    """Medians of both clocks in microseconds; every call sees every batch, behind the experts on the one before."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for index, x_TH in enumerate(batches):
            for name, call in calls.items():
                calls["experts"](batches[index - 1])
                times = clocked(partial(call, x_TH))
                seen[name] += [times] if number else []
    medians = {
        name: [statistics.median(each) * 1e3 for each in zip(*times, strict=True)] for name, times in seen.items()
    }
    return {name: {"wall_us": wall, "cpu_us": cpu} for name, (wall, cpu) in medians.items()}


def main() -> None:
    parser = parser_of(__doc__, experts=16, hidden=7168, inter=2048, top_k=8, rounds=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = with_output(parser, "--json").parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    weights = tensors(options)
    layer, torch_router = (built(options, fused_router=fused).load_weights(weights) for fused in (True, False))
    cases = {}
    for tokens in options.tokens:
        batches = [torch.randn(tokens, options.hidden).bfloat16() for _ in range(6)]
        calls = {
            "experts": experts_alone(layer),
            "layer": layer,
            "router": layer.route,
            "router in torch": torch_router.route,
        }
        with torch.no_grad():
            cases[tokens] = seen = measured(calls, batches, options.rounds)
        ratios = [
            f"{clock[:-3]} {seen['layer'][clock] / seen['experts'][clock]:.3f}" for clock in ("wall_us", "cpu_us")
        ]
        times = ", ".join(f"{name} {each['wall_us']:.0f} us" for name, each in seen.items())
        print(f"{tokens} tokens: {times}; layer over experts: {', '.join(ratios)}", flush=True)
    where = {"threads": options.threads, "best": native_kernels().best.name, "layer": repr(layer)}
    write(options.json, {**about(options), **where, "cases": cases})


if __name__ == "__main__":
    main()
