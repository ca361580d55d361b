"""The price of `kernel.invariant`: time of one layer with and without it, and rows sent, by ratio.

    python benchmarks/invariant.py --output benchmarks/results/invariant_cpu.json

One rank, then two processes over `one_sided` and over `all_to_all`. Every round runs both ways on the same tokens, in
an order that changes; a round's time is that of its slowest rank. Bytes are those that the communicators counted.
"""

from functools import partial

import torch
import torch.distributed as dist
from common import Times, medians_ms, parser_of, ratio, with_output
from small_layers import RANKS, Size, batch, layer_of, native_experts, timed, write_rows

from moe_mk.lab.testing.on_ranks import RankWorld

WAYS = {"plain": False, "invariant": True}


def main() -> None:
    parser = parser_of(__doc__, hidden=2048, inter=512, experts=32, top_k=8, rounds=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256], help="of each rank")
    options = with_output(parser).parse_args()
    experts, rows = native_experts(), []
    with RankWorld(RANKS) as world:
        for transport in ("no_ep", "one_sided", "all_to_all"):
            for tokens in options.tokens:
                size = Size(tokens, options.hidden, options.inter, options.experts, options.top_k, options.rounds)
                if transport == "no_ep":
                    per_rank = [measure(0, size, transport, experts)]
                else:
                    per_rank = world.call(measure, size, transport, experts, timeout_s=300.0)
                times = [seconds for seconds, _ in per_rank]
                ms, slower = medians_ms(times), ratio(times, "invariant", "plain")
                sent = {way: sum(counted[way] for _, counted in per_rank) for way in WAYS}
                more = sent["invariant"] / sent["plain"] if sent["plain"] else None
                rows.append({"transport": transport, "tokens": tokens, "ms": ms, "ratio": slower, "bytes": more})
                print(rows[-1], flush=True)
    write_rows(options, experts, "ratio: median of invariant over plain; bytes: the same", rows)


def measure(rank: int, size: Size, transport: str, experts: str) -> tuple[Times, dict[str, int]]:
    """Seconds of both ways by round, and the bytes that this rank sends in one call."""
    group = None if transport == "no_ep" else dist.group.WORLD
    layers = {
        way: layer_of(size, group, prepare_finalize=transport, experts=experts, invariant=value)
        for way, value in WAYS.items()
    }
    x_TH = batch(size, rank)
    ways, calls = {way: partial(made, x_TH) for way, made in layers.items()}, size.rounds + 1
    with torch.no_grad():
        seconds = timed(ways, size.rounds, together=group is not None, once=True)
    return seconds, {way: made.ep.traffic.bytes_by_phase.total() // calls for way, made in layers.items()}


if __name__ == "__main__":
    main()
