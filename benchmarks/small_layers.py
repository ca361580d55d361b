"""Layers of random weights and rounds in turn, for the benchmarks that compare ways of running one layer."""

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
