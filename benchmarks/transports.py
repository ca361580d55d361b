"""Dispatch and combine through every transport between processes of this machine, in one alternating run.

    python benchmarks/transports.py --ranks 2 4 --tokens 1 8 128 1024 --output transports.json

In each round every transport carries the same tokens out and their rows back, one after the other in an order that
changes, so that all meet the same machine. Ranks begin together, awake, and meet nowhere else, as in a layer. A round's
time is that of its slowest rank; tables show medians. What experts would do, which includes writing their sums, is left
out. `hierarchical` and `one_sided_network` have the ranks on two nodes, the latter over TCP, and over NIXL too where
that is installed.
"""

import argparse
import os
import random
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from common import about, medians_ms, parser_of, versions, with_output, write
from torch import Tensor

from moe_mk.comm import DistributedCommunicator
from moe_mk.comm.symmetric.setup import open_heap
from moe_mk.external.library import installed, installed_version
from moe_mk.flight import wait
from moe_mk.kernels.native.selfcheck import is_compiled, loaded, reasons_against
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.quant import BF16
from moe_mk.tokens import ExpertOutput, Routing, RowTokens
from moe_mk.trace.clock import now

Seconds = dict[str, list[float]]
ROUNDS = {1: 80, 8: 80, 128: 40, 1024: 9}


WAYS = {
    "one_sided": ("one_sided", "tcp"),
    "one_sided_network": ("one_sided_network", "tcp"),
    **({"network over nixl": ("one_sided_network", "nixl")} if "nixl" in installed() else {}),
    "hierarchical": ("hierarchical", "tcp"),
    "all_to_all": ("all_to_all", "tcp"),
    "all_gather": ("all_gather", "tcp"),
}
"""Transports and kernel.network_link."""


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
                ms = medians_ms(world.call(measure, *setting, timeout_s=600.0))
                rows.append({"ranks": ranks, "tokens": tokens, "rounds": rounds, "ms": ms})
                lines = [f"  {name:<17} {each:9.3f} ms  {each / ms['one_sided']:6.2f}x" for name, each in ms.items()]
                print(f"ranks {ranks}  tokens {tokens}", *lines, sep="\n", flush=True)
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
        name: PREPARE_FINALIZE[transport](replace(context, network_link=link))
        for name, (transport, link) in WAYS.items()
        if name in names
    }
    x_TH, routing = drawn(rank, tokens, hidden, experts, top_k)
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
            y = ExpertOutput.reduced(y_RH, torch.bfloat16, arrived.out_RH)
            ready = now()
            combined[name] = wait(made[name].finalize(y, arrived))
            seconds.setdefault(name, []).append(there - start + now() - ready)
        same = [combined[name] for name in ("one_sided", "all_to_all") if name in names]
        assert all(torch.equal(same[0], other) for other in same), "outputs must agree bit for bit"
    return {what: times[warm:] for what, times in seconds.items()}


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


def facts(options: argparse.Namespace) -> dict[str, object]:
    return {
        **about(options),
        "versions": {**versions(), "nixl": installed_version("nixl")},
        "kernels": "native" if is_compiled() else "torch",
        "setting": {"hidden": options.hidden, "experts": options.experts, "top_k": options.top_k},
        "unit": "ms, median over rounds of the slowest rank, one thread a rank",
    }


if __name__ == "__main__":
    main()
