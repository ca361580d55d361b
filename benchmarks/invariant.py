"""The price of `kernel.invariant`: time of one layer with and without it, and rows sent, by ratio.

    python benchmarks/invariant.py --output benchmarks/results/invariant_cpu.json

One rank, then two processes over `one_sided` and over `all_to_all`. Every round runs both ways on the same tokens, in
an order that changes; a round's time is that of its slowest rank. Bytes are those that the communicators counted.
"""

from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import SIZES, about, parser_of, with_output, write
from small_layers import Size, batch, in_turn, layer_of, native_experts, slowest

from moe_mk.lab.testing.on_ranks import RankWorld

RANKS = 2
WAYS = {"plain": False, "invariant": True}


def main() -> None:
    parser = parser_of(__doc__, hidden=2048, inter=512, experts=32, top_k=8, rounds=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256], help="of each rank")
    options = with_output(parser).parse_args()
    experts, rows = native_experts(), []
    print(f"{'ranks':<18}{'tokens':>8}{'plain ms':>10}{'invariant':>11}{'ratio':>7}{'bytes':>7}")
    with RankWorld(RANKS) as world:
        for transport in ("no_ep", "one_sided", "all_to_all"):
            for tokens in options.tokens:
                size = Size(tokens, options.hidden, options.inter, options.experts, options.top_k, options.rounds)
                if transport == "no_ep":
                    per_rank = [measure(0, size, transport, experts)]
                else:
                    per_rank = world.call(measure, size, transport, experts, timeout_s=300.0)
                ms = slowest([seconds for seconds, _ in per_rank])
                sent = {way: sum(counted[way] for _, counted in per_rank) for way in WAYS}
                more = sent["invariant"] / sent["plain"] if sent["plain"] else None
                ratio = median_ratio([seconds for seconds, _ in per_rank])
                rows.append({"transport": transport, "tokens": tokens, "ms": ms, "ratio": ratio, "bytes": more})
                shown = "" if more is None else f"{more:.2f}"
                where = "1" if transport == "no_ep" else f"{RANKS}, {transport}"
                print(f"{where:<18}{tokens:>8}{ms['plain']:>10.3f}{ms['invariant']:>11.3f}{ratio:>7.2f}{shown:>7}")
    if options.output:
        setting = {name: getattr(options, name) for name in SIZES}
        facts = {**about(options), "ranks": RANKS, "backend": experts, "setting": setting}
        unit = "ms, median over rounds of the slowest rank; ratio: median of invariant over plain; bytes: the same"
        write(options.output, {**facts, "unit": unit, "rows": rows})


def measure(rank: int, size: Size, transport: str, experts: str) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of both ways by round, and the bytes that this rank sends in one call."""
    group = None if transport == "no_ep" else dist.group.WORLD
    layers = {
        way: layer_of(size, group, prepare_finalize=transport, experts=experts, invariant=value)
        for way, value in WAYS.items()
    }
    x_TH = batch(size, rank)
    with torch.no_grad():
        together = group is not None
        seconds = in_turn(
            {way: lambda made=made: made(x_TH) for way, made in layers.items()}, size.rounds, together=together
        )
    calls = size.rounds + 1
    return seconds, {way: made.ep.traffic.bytes_by_phase.total() // calls for way, made in layers.items()}


def median_ratio(per_rank: list[dict[str, list[float]]]) -> float:
    """Median over rounds of the slowest rank's time with the setting over that without."""
    rounds: dict[str, list[Any]] = {
        way: [max(times) for times in zip(*(rank[way] for rank in per_rank), strict=True)] for way in WAYS
    }
    return median(on / off for on, off in zip(rounds["invariant"], rounds["plain"], strict=True))


if __name__ == "__main__":
    main()
