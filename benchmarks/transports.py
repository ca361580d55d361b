"""Dispatch and combine through every transport between processes of this machine, in one alternating run.

    python benchmarks/transports.py --ranks 2 4 --tokens 1 8 128 1024 --output benchmarks/results/transports_cpu.json

In each round every way carries the same tokens out and their rows back, one after the other in an order that changes,
so that all meet the same machine. Ranks begin together, awake, and meet nowhere else, as in a layer. A round's time is
that of its slowest rank; tables show medians. What experts would do is left out but for writing their sums, known from
the first round: `one_sided` gets them where peers read them, as by experts that take `out_RH`, `one_sided copied` gets
them elsewhere. `one_sided fp8` rounds rows on their way. `hierarchical` and `one_sided_network` have the ranks on two
nodes, the latter over TCP, and over NIXL too where that is installed. `memcpy` copies the bytes that a rank sends to
others (rows out, sums back) from a warm buffer to another, all ranks at once.
"""

import argparse
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from common import about, parser_of, versions, with_output, write
from torch import Tensor

from moe_mk.comm import DistributedCommunicator
from moe_mk.comm.symmetric.setup import open_heap
from moe_mk.external.library import installed, installed_version
from moe_mk.flight import wait
from moe_mk.kernels.native.selfcheck import is_compiled, loaded, reasons_against
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant import BF16
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import row_bytes
from moe_mk.tokens import ExpertOutput, Routing, RowTokens
from moe_mk.trace.clock import now

Seconds = dict[str, list[float]]
ROUNDS = {1: 80, 8: 80, 128: 40, 1024: 9}


@dataclass(frozen=True)
class Way:
    transport: str
    wire: QuantScheme = BF16
    in_window: bool = True
    """Whether sums are written where the transport would have them, if it states so."""
    link: str = "tcp"
    """kernel.network_link."""


WAYS = {
    "one_sided": Way("one_sided"),
    "one_sided copied": Way("one_sided", in_window=False),
    "one_sided fp8": Way("one_sided", FP8_1x128),
    "one_sided_network": Way("one_sided_network"),
    **({"network over nixl": Way("one_sided_network", link="nixl")} if "nixl" in installed() else {}),
    "hierarchical": Way("hierarchical"),
    "all_to_all": Way("all_to_all"),
    "all_gather": Way("all_gather"),
}


def main() -> None:
    parser = parser_of(__doc__, hidden=7168, experts=256, top_k=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 128, 1024], help="of each rank")
    parser.add_argument("--rounds", type=int, default=0, help="0: more for fewer tokens")
    options = with_output(parser).parse_args()
    if not reasons_against():
        loaded()  # an exchange uses kernels that are there, and compiles none
    rows = []
    for ranks in options.ranks:
        with RankWorld(ranks) as world:
            for tokens in options.tokens:
                rounds = options.rounds or ROUNDS.get(tokens, 20)
                setting = (tokens, options.hidden, options.experts, options.top_k, rounds)
                row = figures(world.call(measure, *setting, timeout_s=600.0))
                rows.append({"ranks": ranks, "tokens": tokens, "rounds": rounds, **row})
                print(f"ranks {ranks}  tokens {tokens}", *table(row["ms"]), sep="\n", flush=True)
    write(options.output, {**facts(options), "rows": rows})


def measure(
    rank: int, tokens: int, hidden: int, experts: int, top_k: int, rounds: int, names: Sequence[str] = tuple(WAYS)
) -> Seconds:
    """Seconds of each round on one rank, by what was timed. The first rounds are left out."""
    assert dist.group.WORLD is not None
    comm, cpu = DistributedCommunicator(dist.group.WORLD), torch.device("cpu")
    expert_map = ExpertMap.linear(experts, comm.size)
    tables, per_node = expert_map.tables(cpu), max(comm.size // 2, 1)
    context = TransportContext(
        comm, expert_map, tables, BF16, BF16, hidden, top_k, cpu, max_num_tokens=tokens, ranks_per_node=per_node
    )
    made = {
        name: PREPARE_FINALIZE[way.transport](replace(context, wire=way.wire, network_link=way.link))
        for name, way in WAYS.items()
        if name in names
    }
    x_TH, routing = drawn(rank, tokens, hidden, experts, top_k)
    ranks_TK = (routing.ids_TK // (experts // comm.size)).tolist()
    rows = sum(len(set(ranks) - {rank}) for ranks in ranks_TK)  # to other ranks that hold one of a token's experts
    sent_bytes = rows * (packed_row_bytes(BF16, hidden, top_k) + row_bytes(BF16, hidden))
    source, target = (torch.ones(sent_bytes, dtype=torch.uint8, device="cpu") for _ in range(2))
    seconds: Seconds = {}
    warm, together = max(2, rounds // 5), Together(comm)
    sums: dict[str, Tensor] = {}
    for number in range(rounds + warm):
        combined = {}
        for name in random.Random(number).sample(names, len(names)):  # nobody always comes after the same one
            together.begin()
            start = now()
            arrived = wait(made[name].prepare(x_TH, routing))
            there = now()
            assert isinstance(arrived, RowTokens)
            y_RH = sums[name] if number else sums.setdefault(name, arrived.x_RH.dequantize(torch.bfloat16).clone())
            into_RH = arrived.out_RH if WAYS[name].in_window else None
            y = ExpertOutput.reduced(y_RH, torch.bfloat16, into_RH)
            ready = now()
            combined[name] = wait(made[name].finalize(y, arrived))
            note(seconds, name, there - start, now() - ready)
        together.begin()
        start = now()
        target.copy_(source)
        seconds.setdefault("memcpy", []).append(now() - start)
        same = [combined[name] for name in ("one_sided", "one_sided copied", "all_to_all") if name in names]
        assert all(torch.equal(same[0], other) for other in same), "outputs must agree bit for bit"
    return {"sent_bytes": [float(sent_bytes)]} | {what: times[warm:] for what, times in seconds.items()}


class Together:
    """Lets all ranks go at once, awake; a barrier of the group wakes them one by one, which may take milliseconds."""

    def __init__(self, comm: DistributedCommunicator) -> None:
        line = 128  # bytes, so that ranks do not write where others look
        heap = open_heap(comm, 0, comm.size * line, now)
        heap.reserve(0, 0, comm.size * line)
        words = heap.data(0, 0, comm.size * line).view(torch.int64).numpy()
        self._heap, self._came_W, self._mine = heap, words[:: line // 8], words[comm.rank * line // 8 :]
        self._number = 0

    def begin(self) -> None:
        self._number += 1
        self._mine[0] = self._number
        while (self._came_W < self._number).any():
            os.sched_yield()


def drawn(rank: int, tokens: int, hidden: int, experts: int, top_k: int) -> tuple[Tensor, Routing]:
    """Uniform routing, other tokens on each rank."""
    draw = torch.Generator("cpu").manual_seed(rank)
    x_TH = torch.randn((tokens, hidden), generator=draw, dtype=torch.float32, device="cpu").to(torch.bfloat16)
    scores_TE = torch.rand((tokens, experts), generator=draw, dtype=torch.float32, device="cpu")
    weights_TK = torch.full((tokens, top_k), 1.0 / top_k, dtype=torch.float32, device="cpu")
    return x_TH, Routing(scores_TE.topk(top_k).indices.to(torch.int32), weights_TK)


def note(seconds: Seconds, name: str, dispatch: float, combine: float) -> None:
    """Keep the two stages of one call and their sum; what the experts would do in between is left out."""
    for what, time in ((f"{name} dispatch", dispatch), (f"{name} combine", combine), (name, dispatch + combine)):
        seconds.setdefault(what, []).append(time)


def figures(per_rank: list[Seconds]) -> dict[str, dict[str, float]]:
    """Medians over rounds of the slowest rank, in milliseconds."""
    slowest = {what: [max(times) for times in zip(*(r[what] for r in per_rank), strict=True)] for what in per_rank[0]}
    sent = max(slowest.pop("sent_bytes"))
    return {"bytes": {"sent": sent}, "ms": {what: round(median(t) * 1e3, 4) for what, t in slowest.items()}}


def table(ms: dict[str, float]) -> list[str]:
    """One setting for the eye: whole, its two stages, and how many times that of one_sided and of memcpy."""
    lines = [f"  {'memcpy':<17} {ms['memcpy']:9.3f} ms"]
    for name in WAYS:
        stages = f"{ms[f'{name} dispatch']:9.3f} + {ms[f'{name} combine']:9.3f}"
        times = f"{ms[name] / ms['one_sided']:6.2f}x one_sided  {ms[name] / ms['memcpy']:7.2f}x memcpy"
        lines.append(f"  {name:<17} {ms[name]:9.3f} ms = {stages}   {times}")
    return lines


def facts(options: argparse.Namespace) -> dict[str, object]:
    return {
        **about(options),
        "versions": {**versions(), "nixl": installed_version("nixl")},
        "kernels": "native" if is_compiled() else "torch",
        "setting": {"hidden": options.hidden, "experts": options.experts, "top_k": options.top_k},
        "unit": "ms, median over rounds of the slowest rank, one thread a rank; a way without a stage is both",
    }


if __name__ == "__main__":
    main()
