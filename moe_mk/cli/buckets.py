"""Who would serve how many tokens, and how near the price is to what the device can do at all."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from moe_mk.cli.screen import Screen
from moe_mk.errors import UnsupportedError
from moe_mk.oracle import Decision
from moe_mk.plan.roofline import LayerShape, Rates, experts_us

BUCKETS = (1, 16, 64, 128, 512, 1024, 4096)


def show_buckets(screen: Screen, decide: Callable[[int], Decision]) -> None:
    """One line a number of tokens: the winner, its price and what it rests on, and the floor of its experts.

    decide: the decision for a number of tokens a rank.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("tokens", "price", "experts' floor"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("pair")
    table.add_column("other experts on that transport")
    for tokens in BUCKETS:
        try:
            decision = decide(tokens)
        except UnsupportedError as refused:
            table.add_row(str(tokens), "-", "-", str(refused).splitlines()[0], "")
            continue
        chosen = decision.chosen
        pair = f"{chosen.name}, {chosen.cost_source}"
        table.add_row(
            str(tokens), f"{chosen.cost_us:,.0f} us", f"{experts_floor_us(decision):,.0f} us", pair, rivals_of(decision)
        )
    screen.fact("by tokens", "the floor is reading each weight and row once, or multiplying, whichever takes longer")
    screen.console.print(table)


def rivals_of(decision: Decision) -> str:
    """What else could have computed behind the chosen transport, cheapest first."""
    chosen = decision.chosen
    able = [
        verdict
        for verdict in decision.verdicts
        if verdict.prepare_finalize == chosen.prepare_finalize and verdict is not chosen and verdict.cost_us is not None
    ]
    ordered = sorted(able, key=lambda verdict: verdict.cost_us or 0.0)
    return ", ".join(f"{verdict.experts} {verdict.cost_us:,.0f} us" for verdict in ordered) or "none"


def experts_floor_us(decision: Decision) -> float:
    """The least time of both grouped GEMMs in FP8 on the fullest rank of a decision."""
    p, model = decision.problem, decision.problem.config.model
    shape = LayerShape(model.hidden_size, p.intermediate, model.num_experts, p.config.router.top_k, ep=p.ranks)
    return experts_us(shape, p.num_tokens, Rates.of(p.device))
