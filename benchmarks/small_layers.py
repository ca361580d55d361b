"""Layers of random weights and rounds in turn, for the benchmarks that compare ways of running one layer.

python benchmarks/small_layers.py             one call at T=1 in every way that an engine can make it
python benchmarks/small_layers.py --ranks 2   the eager and the compiled layer over `one_sided`, between two processes
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk import MoEConfig, MoELayer, ParallelGroups
from moe_mk.kernels.native import loaded, reasons_against
from moe_mk.trace.clock import now

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size:
    """One layer, its batch, and how often it is timed."""

    tokens: int
    hidden: int
    inter: int
    experts: int
    top_k: int
    rounds: int


def native_experts() -> str:
    """The fastest experts that this machine can run, with their kernels compiled."""
    if reasons_against():
        return "torch_cpu"
    loaded()
    return "cpu_native"


def layer_of(size: Size, group: dist.ProcessGroup | None = None, weights: str = "bf16", **settings: object) -> MoELayer:
    """A loaded layer; weights: plain, as model.quant.weights calls them. settings: by their bare key."""
    model = {"hidden_size": size.hidden, "moe_intermediate_size": size.inter, "num_experts": size.experts}
    data = {"model": {**model, "quant": {"weights": weights}}, "router": {"top_k": size.top_k}}
    config = MoEConfig.parse(data, "benchmark").with_(max_num_tokens=max(size.tokens, 1), **settings)
    layer = MoELayer(config, dtype=torch.bfloat16, groups=ParallelGroups(ep=group))
    return layer.load_weights(tensors(size))


def tensors(size: Size) -> dict[str, Tensor]:
    """Random bf16 weights by the names of a checkpoint, the same in every process."""
    draw = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")
        return (made * shape[-1] ** -0.5).to(torch.bfloat16)

    found = {"gate.weight": normal(size.experts, size.hidden)}
    for expert in range(size.experts):
        found[f"experts.{expert}.gate_proj.weight"] = normal(size.inter, size.hidden)
        found[f"experts.{expert}.up_proj.weight"] = normal(size.inter, size.hidden)
        found[f"experts.{expert}.down_proj.weight"] = normal(size.hidden, size.inter)
    return found


def batch(size: Size, rank: int = 0) -> Tensor:
    """Normal tokens (T, H), other ones on each rank."""
    draw = torch.Generator("cpu").manual_seed(100 + rank)
    made = torch.randn((size.tokens, size.hidden), generator=draw, dtype=torch.float32, device="cpu")
    return made.to(torch.bfloat16)


def in_turn(ways: Mapping[str, Callable[[], object]], rounds: int, *, together: bool = False) -> dict[str, list[float]]:
    """Seconds of every way in every round, in an order that changes from round to round; a warm round is left out.

    together: ranks begin each call at once. All ranks take the same order.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(ways), len(ways)):
            if together:
                dist.barrier()
            start = now()
            ways[name]()
            seconds[name].append(now() - start)
    return {name: times[1:] for name, times in seconds.items()}


def slowest(per_rank: list[dict[str, list[float]]]) -> dict[str, float]:
    """Median over rounds of the slowest rank, in milliseconds."""
    return {
        name: median(max(times) for times in zip(*(rank[name] for rank in per_rank), strict=True)) * 1e3
        for name in per_rank[0]
    }


SMALL = Size(tokens=1, hidden=256, inter=128, experts=16, top_k=4, rounds=31)
CALLS = 100
"""Calls in one timing: a single one takes less than a clock's noise."""


def ways_of_one_call(size: Size) -> dict[str, Callable[[], object]]:
    """One call by each door: eager, with a listener, routed by the caller, over an engine's weights, compiled."""
    from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights

    settings = {"experts": native_experts(), "activations": "plain"}
    made, heard, named = layer_of(size, **settings), layer_of(size, **settings), tensors(size)
    heard.on_routing = lambda routing: None
    up, down = (
        torch.stack([named[f"experts.{e}.{part}_proj.weight"] for e in range(size.experts)]) for part in ("up", "down")
    )
    gate = torch.stack([named[f"experts.{e}.gate_proj.weight"] for e in range(size.experts)])
    weights = EngineWeights(torch.cat((gate, up), dim=1), down)
    here = EngineExperts("benchmark", weights, top_k=size.top_k, settings=settings)
    x_TH = batch(size)
    routing = made.route(x_TH)
    compiled = torch.compile(made, fullgraph=True)
    return {
        "eager": lambda: made(x_TH),
        "on_routing": lambda: heard(x_TH),
        "forward_routed": lambda: made.forward_routed(x_TH, routing.weights_TK, routing.ids_TK),
        "EngineExperts": lambda: here(x_TH, routing.weights_TK, routing.ids_TK),
        "compiled": lambda: compiled(x_TH),
    }


def ways_over_ranks(rank: int, size: Size) -> dict[str, Callable[[], object]]:
    """The eager and the compiled layer over all ranks."""
    made = layer_of(
        size, dist.group.WORLD, experts=native_experts(), activations="plain", prepare_finalize="one_sided"
    )  # fmt: skip
    x_TH, compiled = batch(size, rank), torch.compile(made, fullgraph=True)
    return {"eager": lambda: made(x_TH), "compiled": lambda: compiled(x_TH)}


def times_of_rank(rank: int, rounds: int) -> dict[str, list[float]]:
    """What `in_turn` measures on one rank."""
    with torch.no_grad():
        ways = ways_over_ranks(rank, SMALL)
        return in_turn({name: repeated(call) for name, call in ways.items()}, rounds, together=True)


def repeated(call: Callable[[], object]) -> Callable[[], object]:
    """CALLS of them."""

    def all_of_them() -> None:
        for _ in range(CALLS):
            call()

    return all_of_them


def main() -> None:
    """Print microseconds of a call by way and their ratio to the eager layer: in the fastest round, and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=SMALL.rounds)
    options = parser.parse_args()
    if options.ranks > 1:
        from moe_mk.testing.on_ranks import run_ranks

        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # ranks import this file by its name
        import small_layers

        per_rank = run_ranks(small_layers.times_of_rank, options.ranks, options.rounds, timeout_s=600.0)
    else:
        with torch.no_grad():
            ways = ways_of_one_call(SMALL)
            per_rank = [in_turn({name: repeated(call) for name, call in ways.items()}, options.rounds)]
    found = slowest(per_rank)
    fastest = {
        name: min(max(times) for times in zip(*(rank[name] for rank in per_rank), strict=True)) for name in found
    }
    print(f"{SMALL}, ranks {options.ranks}, {torch.get_num_threads()} threads, {processor()}")
    for name, median_ms in found.items():
        least_us, median_us = fastest[name] * 1e6 / CALLS, median_ms * 1e3 / CALLS
        ratios = f"{fastest[name] / fastest['eager']:.2f} x eager, median {median_us:.1f} us"
        print(f"{name:<16}{least_us:>8.1f} us   {ratios}, {median_ms / found['eager']:.2f} x")


def about(options: argparse.Namespace) -> dict[str, object]:
    """What ran, on what."""
    return {
        "command": shlex.join(["python", "benchmarks/" + os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "device": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "note": options.note,
    }


def processor() -> str:
    """The model of the first core."""
    with open("/proc/cpuinfo", encoding="utf-8") as facts:
        return next((line.partition(":")[2].strip() for line in facts if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
