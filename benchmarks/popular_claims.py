"""What is popularly claimed for optimisations of MoE layers, and what the same change gives here on a CPU, by ratio.

    python benchmarks/popular_claims.py --output benchmarks/results/popular_claims_cpu.json

Each claim is two ways of doing the same with this project's own parts, timed in turn in rounds whose order changes. The
ratio is the median of the first way over that of the second; above 1 the change pays. Claims are about other machines,
mostly GPUs: nothing is asserted, and a ratio far from what is reported states only that it is another machine.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import Times, about, medians_ms, parser_of, slowest, with_output, write
from small_layers import RANKS, Size, batch, experts_of, layer_of, loop, mlp, native_experts, tensors, timed
from torch import Tensor
from transports import measure

from moe_mk import MoEConfig, MoELayer
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.placement.eplb import Topology, plan

Found = dict[str, Any]
"""What one rank measured "before" and "after": Times, or bytes; nothing of a rank that was idle."""


def alone(claim: Callable[[Size, str], Times]) -> Callable[[int, Size, str], Times]:
    """A measurement by rank 0 while the others are idle, with one thread."""

    @wraps(claim)
    @torch.no_grad()
    def on_first(rank: int, size: Size, backend: str) -> Times:
        return claim(size, backend) if rank == 0 else {}

    return on_first


@alone
def experts(size: Size, backend: str) -> Times:
    """A loop over experts that picks the rows of each, as reference models do, and one call of an experts backend."""
    layer, given, weights = _routed(size, backend)
    ways = {"before": partial(loop, *given, weights), "after": partial(layer.forward_routed, *given)}
    return timed(ways, size.rounds, once=True)


@alone
def reorder(size: Size, backend: str) -> Times:
    """The same products with rows picked expert by expert, and with rows sorted by expert once."""
    _, given, weights = _routed(size, backend)
    ways = {"before": partial(loop, *given, weights), "after": partial(by_order, *given, weights)}
    return timed(ways, size.rounds, once=True)


def _routed(size: Size, backend: str) -> tuple[MoELayer, tuple[Tensor, Tensor, Tensor], list[tuple[Any, ...]]]:
    """A layer, tokens with their weights and ids, and its matrices."""
    layer, x_TH = layer_of(size, experts=backend), batch(size)
    routing = layer.route(x_TH)
    return layer, (x_TH, routing.weights_TK, routing.ids_TK), experts_of(tensors(size), size)


@alone
def router(size: Size, backend: str) -> Times:
    """Gate and choice of experts op by op in torch, and in one native call."""
    by_torch, fused = (layer_of(size, experts=backend, fused_router=fused) for fused in (False, True))
    x_TH = batch(size)
    return timed({"before": partial(by_torch.route, x_TH), "after": partial(fused.route, x_TH)}, size.rounds, once=True)


def held(rank: int, size: Size, backend: str) -> Found:
    """Bytes of a layer's experts as bf16, and as FP8 with scales of 128 x 128 blocks, as decisions have them."""
    model = {"hidden_size": size.hidden, "moe_intermediate_size": size.inter, "num_experts": size.experts}
    found = {}
    for way, weights in (("before", "bf16"), ("after", "fp8_block")):
        data = {"model": {**model, "quant": {"weights": weights}}, "router": {"top_k": size.top_k}}
        layer = MoELayer(MoEConfig.parse(data, "benchmark").with_(experts=backend))
        found[way] = [layer.explain().weights_bytes]
    return found


def exchange(rank: int, size: Size, backend: str) -> Found:
    """Tokens out and sums back over gloo, and through shared memory; without experts in between."""
    ways = {"all_to_all": "before", "one_sided": "after"}
    seconds = measure(rank, size.tokens, size.hidden, size.experts, size.top_k, size.rounds, tuple(ways))
    return {ways[name]: times for name, times in seconds.items()}


@torch.no_grad()
def balance(rank: int, size: Size, backend: str) -> Times:
    """A layer under a skewed load: experts where their numbers put them, and as EPLB places them, with copies."""
    assert dist.group.WORLD is not None
    ranks = dist.get_world_size()
    ids_TK = skewed(size, rank)
    weights_TK = torch.full(ids_TK.shape, 1.0 / size.top_k, dtype=torch.float32, device="cpu")
    x_TH = batch(size, rank)
    ways = {}
    for name, placement in (("before", tuple(range(size.experts))), ("after", balanced(size, ranks))):
        settings = {"experts": backend, "prepare_finalize": "one_sided", "placement": placement}
        layer = layer_of(size, dist.group.WORLD, **settings)
        ways[name] = partial(layer.forward_routed, x_TH, weights_TK, ids_TK)
    return timed(ways, size.rounds, together=True, once=True)


def balanced(size: Size, ranks: int) -> tuple[int, ...]:
    """EPLB's physical experts for the load of all ranks, with one more slot a rank than without copies."""
    load_E = Counter(expert for rank in range(ranks) for expert in skewed(size, rank).flatten().tolist())
    load_XE = np.array([[load_E[expert] for expert in range(size.experts)]], dtype=np.float32)
    placed = plan(load_XE, Topology(ranks, 1, size.experts // ranks + 1), groups=1)
    return tuple(int(expert) for expert in placed.phy2log[0])


def skewed(size: Size, rank: int) -> Tensor:
    """Ids (T, K) drawn with chances that fall as 1 / (number + 1), so that popular experts lie side by side."""
    draw = torch.Generator("cpu").manual_seed(10 + rank)
    chances_E = 1.0 / torch.arange(1, size.experts + 1, dtype=torch.float32, device="cpu")
    return torch.multinomial(chances_E.expand(size.tokens, -1), size.top_k, generator=draw).to(torch.int32)


def by_order(x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """Sort assignments by expert once, multiply slices that lie side by side, add once."""
    order_N = ids_TK.flatten().argsort(stable=True)
    token_N = order_N // ids_TK.shape[1]
    rows = x_TH[token_N].split(torch.bincount(ids_TK.flatten(), minlength=len(experts)).tolist())
    y_NH = torch.cat([mlp(part, *experts[e]) for e, part in enumerate(rows) if len(part)])
    total_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device="cpu")
    return total_TH.index_add_(0, token_N, y_NH.float() * weights_TK.flatten()[order_N, None]).to(x_TH.dtype)


@dataclass(frozen=True)
class Claim:
    """One claim, and how it is measured here."""

    name: str
    reported: str
    """As it is popularly reported."""
    reported_ratio: tuple[float, float]
    """The same as before / after, from and to."""
    how: str
    size: Size
    run: Callable[[int, Size, str], Found]
    """The measurement of one rank."""
    unit: str = "ms"


CLAIMS = (
    Claim(
        "experts in one kernel", "2x compute", (2.0, 2.0),
        "a loop over experts in torch / one call of the experts backend, bf16, one core",
        Size(64, 1024, 512, 32, 4, 15), experts,
    ),
    Claim(
        "a better all-to-all", "3-5x all-to-all", (3.0, 5.0),
        "dispatch and combine over gloo (all_to_all) / through shared memory (one_sided), two processes",
        Size(128, 2048, 64, 16, 4, 25), exchange,
    ),
    Claim(
        "a fused router", "-50 % routing time", (2.0, 2.0),
        "gate and selection op by op in torch / in one native call, one core",
        Size(8, 1024, 32, 128, 8, 41), router,
    ),
    Claim(
        "smaller weights", "-30 % memory", (1.0 / 0.7, 1.0 / 0.7),
        "bytes of a layer's experts in bf16 / in FP8 with a scale for every 128 x 128",
        Size(1, 7168, 2048, 256, 8, 1), held, "bytes",
    ),
    Claim(
        "reordered tokens", "15-30 % faster", (1.15, 1.3),
        "rows gathered expert by expert / sorted by expert once, the same products in torch, one core",
        Size(256, 1024, 128, 64, 4, 15), reorder,
    ),
    Claim(
        "balanced experts (EPLB)", "20-30 % faster", (1.2, 1.3),
        "a layer with adjacent popular experts in linear placement / placed by EPLB with one replica per rank, "
        "two processes",
        Size(512, 1024, 512, 16, 4, 15), balance,
    ),
)  # fmt: skip


def main() -> None:
    options = with_output(parser_of(__doc__)).parse_args()
    with RankWorld(RANKS) as world:
        found = measured(CLAIMS, world, native_experts())
    write(options.output, {**about(options), "backend": native_experts(), "ranks": RANKS, "claims": found})


def measured(claims: tuple[Claim, ...], world: RankWorld, backend: str) -> list[dict[str, Any]]:
    """Measure and print each claim as it comes: what is reported, and the ratio here."""
    rows = []
    for claim in claims:
        per_rank = list(filter(None, world.call(claim.run, claim.size, backend, timeout_s=300.0)))
        in_bytes = {way: float(slowest(per_rank, way)[0]) for way in per_rank[0]} if claim.unit == "bytes" else None
        got = in_bytes or medians_ms(per_rank)
        ratio = got["before"] / got["after"]
        reported = {"reported": claim.reported, "reported_ratio": [round(r, 2) for r in claim.reported_ratio]}
        rows.append({"name": claim.name, **reported, "how": claim.how, "size": asdict(claim.size), "unit": claim.unit,
                     **got, "ratio": round(ratio, 3)})  # fmt: skip
        print(f"{claim.name:<24} reported {claim.reported:<19} here {ratio:6.2f}x   {claim.how}", flush=True)
    return rows


if __name__ == "__main__":
    main()
