"""What is popularly claimed for optimisations of MoE layers, and what the same change gives here on a CPU, by ratio.

    python benchmarks/popular_claims.py --output benchmarks/results/popular_claims_cpu.json

Each claim is two ways of doing the same with this project's own parts, timed in turn in rounds whose order changes. The
ratio is the median of the first way over that of the second; above 1 the change pays. Claims are about other machines,
mostly GPUs: nothing is asserted, and a ratio far from what is reported states only that it is another machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import popular_claims_cases as cases
from common import about, parser_of, with_output, write
from small_layers import Size, native_experts, slowest

from moe_mk.lab.testing.on_ranks import RankWorld

RANKS = 2


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
    run: Callable[[Size, RankWorld, str], dict[str, float]]
    """Milliseconds, or bytes, of "before" and "after"."""
    unit: str = "ms"


def alone(measure: Callable[[Size, str], cases.Seconds]) -> Callable[[Size, RankWorld, str], dict[str, float]]:
    """A measurement in this process, with one thread."""

    def run(size: Size, world: RankWorld, backend: str) -> dict[str, float]:
        return slowest([world.call(on_first, measure.__name__, size, backend, timeout_s=300.0)[0]])

    return run


def on_first(rank: int, name: str, size: Size, backend: str) -> cases.Seconds:
    """Measure on rank 0 while the others are idle."""
    found: cases.Seconds = getattr(cases, name)(size, backend) if rank == 0 else {}
    return found


def _bytes(size: Size, world: RankWorld, backend: str) -> dict[str, float]:
    del world
    return {name: median(held) for name, held in cases.memory(size, backend).items()}


def _exchange(size: Size, world: RankWorld, backend: str) -> dict[str, float]:
    del backend
    return slowest(world.call(cases.exchange, size, timeout_s=300.0))


def _balance(size: Size, world: RankWorld, backend: str) -> dict[str, float]:
    return slowest(world.call(cases.balance, size, backend, timeout_s=300.0))


CLAIMS = (
    Claim(
        "experts in one kernel", "2x compute", (2.0, 2.0),
        "a loop over experts in torch / one call of the experts backend, bf16, one core",
        Size(64, 1024, 512, 32, 4, 15), alone(cases.experts),
    ),
    Claim(
        "a better all-to-all", "3-5x all-to-all", (3.0, 5.0),
        "dispatch and combine over gloo (all_to_all) / through shared memory (one_sided), two processes",
        Size(128, 2048, 64, 16, 4, 25), _exchange,
    ),
    Claim(
        "a fused router", "-50 % routing time", (2.0, 2.0),
        "gate and selection op by op in torch / in one native call, one core",
        Size(8, 1024, 32, 128, 8, 41), alone(cases.router),
    ),
    Claim(
        "smaller weights", "-30 % memory", (1.0 / 0.7, 1.0 / 0.7),
        "bytes of a layer's experts in bf16 / in FP8 with a scale for every 128 x 128",
        Size(1, 7168, 2048, 256, 8, 1), _bytes, "bytes",
    ),
    Claim(
        "reordered tokens", "15-30 % faster", (1.15, 1.3),
        "rows gathered expert by expert / sorted by expert once, the same products in torch, one core",
        Size(256, 1024, 128, 64, 4, 15), alone(cases.reorder),
    ),
    Claim(
        "balanced experts (EPLB)", "20-30 % faster", (1.2, 1.3),
        "a layer with adjacent popular experts in linear placement / placed by EPLB with one replica per rank, "
        "two processes",
        Size(512, 1024, 512, 16, 4, 15), _balance,
    ),
)  # fmt: skip


def main() -> None:
    """Measure every claim, print the table, write the file."""
    options = with_output(parser_of(__doc__)).parse_args()
    with RankWorld(RANKS) as world:
        found = measured(CLAIMS, world, native_experts())
    write(options.output, {**about(options), "backend": native_experts(), "ranks": RANKS, "claims": found})


def measured(claims: tuple[Claim, ...], world: RankWorld, backend: str) -> list[dict[str, Any]]:
    """Measure and print each claim as it comes: what is reported, and the ratio here."""
    rows = []
    for claim in claims:
        got = claim.run(claim.size, world, backend)
        ratio = got["before"] / got["after"]
        shown = {way: round(value, 4) for way, value in got.items()}
        reported = {"reported": claim.reported, "reported_ratio": [round(r, 2) for r in claim.reported_ratio]}
        facts = {"name": claim.name, **reported}
        rows.append({**facts, "how": claim.how, "size": asdict(claim.size), "unit": claim.unit, **shown,
                     "ratio": round(ratio, 3)})  # fmt: skip
        print(f"{claim.name:<24} reported {claim.reported:<19} here {ratio:6.2f}x   {claim.how}", flush=True)
    return rows


if __name__ == "__main__":
    main()
