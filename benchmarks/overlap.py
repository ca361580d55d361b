"""One layer on two processes: whole, tile by tile, and in two micro-batches that take turns; by ratio.

    python benchmarks/overlap.py --tokens 64 512 --output benchmarks/results/overlap_cpu.json

Every round runs every way on the same tokens, in an order that changes, so that all meet the same machine. A round's
time is that of its slowest rank. `turns` carries tiles in the calling thread, `thread` in one of their own; `dual` is
two micro-batches that take turns (DBO). A ratio above 1 is faster than the whole batch at once. `hidden` is the part of
the time on the way in which experts computed, the median of rank 0's rounds. Nothing is asserted: with one core a rank,
a core that carries does not multiply, and there is only waiting to gain.
"""

import json
from collections import defaultdict
from dataclasses import fields
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import medians_ms, parser_of, with_output
from small_layers import RANKS, Size, batch, layer_of, native_experts, timed, write_rows
from torch import Tensor

from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.runner import TileRecord, run_dual
from moe_mk.runner.tiled_kernel import TiledKernel
from moe_mk.tokens import Routing

TILES = (1, 2, 4, 8)


def main() -> None:
    parser = parser_of(__doc__, hidden=2048, inter=512, experts=16, top_k=4, rounds=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="of each rank")
    parser.add_argument("--transports", nargs="+", default=["all_to_all", "one_sided"])
    options = with_output(parser).parse_args()
    experts, rows = native_experts(), []
    with RankWorld(RANKS) as world:
        for transport in options.transports:
            for tokens in options.tokens:
                size = Size(tokens, options.hidden, options.inter, options.experts, options.top_k, options.rounds)
                rows.append(row(world.call(measure, size, transport, experts, timeout_s=300.0), transport, tokens))
                print(json.dumps(rows[-1]), flush=True)
    write_rows(options, experts, "ratio: whole over it", rows)


def measure(rank: int, size: Size, transport: str, experts: str) -> dict[str, Any]:
    """Seconds of each way by round, hidden shares and overlapping pairs, on one rank."""
    layer = layer_of(size, dist.group.WORLD, prepare_finalize=transport, experts=experts, batch_invariant=True)
    kernel, x_TH = layer.kernel, batch(size, rank)
    assert isinstance(kernel, FusedMoEKernel)
    routing, weights = layer.route(x_TH), layer.state.experts.weights
    records: dict[str, list[TileRecord]] = defaultdict(list)

    def tiled(name: str, tiles: int, executor: str) -> Tensor:
        same = {field.name: getattr(kernel, field.name) for field in fields(FusedMoEKernel)}
        records[name].append(TileRecord())
        each = TiledKernel(**same, tiles=tiles, executor=executor, record=records[name][-1])  # type: ignore[arg-type]
        return wait(each.steps(x_TH, routing, weights))

    def dual() -> Tensor:
        halves = [slice(0, size.tokens // 2), slice(size.tokens // 2, None)]
        parts = [Routing(routing.ids_TK[half], routing.weights_TK[half]) for half in halves]
        pairs = zip(halves, parts, strict=True)
        return torch.cat(run_dual([kernel.steps(x_TH[half], part, weights) for half, part in pairs]))

    ways = {"whole": lambda: wait(kernel.steps(x_TH, routing, weights)), "dual": dual}
    for tiles in TILES:
        for executor in ("turns", "thread"):
            name = f"{tiles} {executor}"
            ways[name] = partial(tiled, name, tiles, executor)
    with torch.no_grad():
        same = [way() for way in ways.values()]
        assert all(torch.equal(same[0], other) for other in same), "outputs must agree bit for bit"
        seconds = timed(ways, size.rounds, together=True, once=True)
    hidden = {name: median(record.hidden_share() or 0.0 for record in all_of) for name, all_of in records.items()}
    pairs = {name: min(len(record.overlaps()) for record in all_of) for name, all_of in records.items()}
    return {"seconds": seconds, "hidden": hidden, "pairs": pairs}


def row(ranks: list[dict[str, Any]], transport: str, tokens: int) -> dict[str, Any]:
    """One setting: times, ratios to the whole batch, hidden shares, and how many intervals overlapped."""
    ms = medians_ms([rank["seconds"] for rank in ranks])
    ratios = {name: round(ms["whole"] / ms[name], 3) for name in ms if name != "whole"}
    hidden = {name: round(share, 3) for name, share in ranks[0]["hidden"].items()}
    shown = {name: round(time, 3) for name, time in ms.items()}
    return {"transport": transport, "tokens": tokens, "ms": shown, "ratio": ratios, "hidden": hidden,
            "overlapping_pairs": ranks[0]["pairs"]}  # fmt: skip


if __name__ == "__main__":
    main()
