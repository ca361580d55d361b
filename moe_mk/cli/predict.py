"""`moe-mk plan`: what an exchange costs on a fabric that need not be here, beside what has been published of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import typer
from rich.table import Table

from moe_mk.cli.exits import OK, speaking
from moe_mk.cli.screen import Screen, amount
from moe_mk.errors import ConfigError
from moe_mk.plan.exchange import Exchange
from moe_mk.plan.layouts import Strategy, layout
from moe_mk.plan.links import Direction, Mode, link_profile, shipped_links
from moe_mk.plan.predict import exchange_of, predict
from moe_mk.plan.two_level import Relay
from moe_mk.plan.volumes import Volumes, break_even_ranks
from moe_mk.registry import did_you_mean

predictions = typer.Typer(help="Predict bytes and times of an exchange on any fabric.", no_args_is_help=True)

Links = Annotated[str, typer.Option(help="a shipped link profile by name, or a file of one")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
TopK = Annotated[int, typer.Option(min=1, help="experts a token")]
Hidden = Annotated[int, typer.Option(min=1, help="hidden size")]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@predictions.command("exchange")
@speaking
def exchange_command(
    links: Links = "h800_cx7",
    ranks: Annotated[int, typer.Option(min=1, help="ranks that share out the experts")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="tokens a rank")] = 4096,
    mode: Annotated[str, typer.Option(help="throughput or latency kernels")] = "throughput",
    experts: Annotated[int, typer.Option(min=1, help="routed experts")] = 256,
    top_k: TopK = 8,
    hidden: Hidden = 7168,
    nodes_kept: Annotated[int | None, typer.Option(min=1, help="nodes that routing keeps a token on")] = None,
    as_json: AsJson = False,
) -> int:
    """Predict dispatch and combine of one layer: bytes, bytes that cross nodes, time and what that stands on."""
    profile, kind = link_profile(links), _mode(mode)
    exchange = Exchange(tokens, ranks, profile.ranks_per_node, hidden, top_k, experts, nodes_kept)
    found = {direction: predict(profile, exchange, kind, direction) for direction in DIRECTIONS}
    if as_json:
        both = {
            name: {
                "us": p.us, "bytes": p.num_bytes, "remote_bytes": p.remote_bytes, "logical_gbs": p.logical_gbs,
                "basis": p.basis,
            }
            for name, p in found.items()
        }  # fmt: skip
        typer.echo(
            json.dumps({"links": profile.name, "ranks": ranks, "tokens": tokens, "mode": kind, **both}, indent=2)
        )
        return OK
    screen = Screen()
    screen.fact("fabric", f"{profile.about}: {ranks} ranks on {exchange.nodes} nodes, {tokens} tokens each")
    for name, p in found.items():
        sent = f"{amount(p.num_bytes)} ({amount(p.remote_bytes)} to other nodes)"
        screen.fact(name, f"{p.us:.0f} us, {sent}, {p.logical_gbs:.0f} GB/s; {p.basis}")
    return OK


@predictions.command("tables")
@speaking
def tables_command(
    links: Annotated[str | None, typer.Option(help="one link profile; all shipped ones if not given")] = None,
    as_json: AsJson = False,
) -> int:
    """Set every published row of the fabrics beside the prediction."""
    rows = [row for name in ([links] if links else shipped_links()) for row in published_rows(name)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return OK
    table = Table(box=None, pad_edge=False)
    for head in ("fabric", "kernels", "ranks", "", "MB", "published us", "GB/s", "implied MB", "line us", "error"):
        table.add_column(head, justify="left" if head in ("fabric", "kernels", "") else "right")
    for row in rows:
        table.add_row(
            row["links"], row["mode"], str(row["ranks"]), row["direction"], f"{row['bytes'] / 1e6:.1f}",
            _told(row["published_us"]), _told(row["published_gbs"]), _told(row["implied_mb"], 1),
            _told(row["line_us"]), "-" if row["error"] is None else f"{100 * row['error']:+.1f} %",
        )  # fmt: skip
    Screen().console.print(table)
    return OK


@predictions.command("relay")
@speaking
def relay_command(
    links: Links = "ascend_910",
    nodes: Annotated[int, typer.Option(min=1, help="nodes")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="tokens a rank")] = 16,
    nodes_kept: Annotated[int | None, typer.Option(min=1, help="nodes a token visits; uniform if not given")] = None,
    top_k: TopK = 8,
    hidden: Hidden = 7168,
    as_json: AsJson = False,
) -> int:
    """Compare a full mesh with a relay in two levels, by bytes."""
    relay = Relay(link_profile(links), tokens, nodes, hidden, top_k, nodes_kept=nodes_kept)
    between, inside = relay.legs_us
    said = {
        "mesh_us": relay.mesh_us, "between_us": between, "inside_us": inside, "relayed_us": relay.relayed_us,
        "pipelined_us": relay.pipelined_us, "gain": relay.gain,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(said, indent=2))
        return OK
    screen = Screen()
    screen.fact("mesh", f"{relay.mesh_us:.1f} us for {amount(relay.mesh_bytes)}")
    screen.fact("relay", f"{between:.1f} us between nodes + {inside:.1f} us inside = {relay.relayed_us:.1f} us")
    screen.fact("pipelined", f"between {relay.pipelined_us:.1f} and {relay.relayed_us:.1f} us")
    screen.fact("gain", f"{relay.gain:.2f} x")
    return OK


@predictions.command("volumes")
@speaking
def volumes_command(
    tokens: Annotated[int, typer.Option(min=1, help="tokens of the instance")] = 4096,
    hidden: Hidden = 7168,
    top_k: TopK = 8,
    ranks: Annotated[int, typer.Option(min=1, help="ranks")] = 32,
) -> int:
    """Compare what tensor and expert parallelism send and hold on a rank."""
    v, screen = Volumes(tokens, hidden, top_k, ranks), Screen()
    screen.fact("tensor", f"{v.tp_elements:,} values a rank, {v.tp_resident_tokens:,} tokens held")
    screen.fact("expert", f"{round(v.ep_elements):,} values a rank, {v.ep_resident_tokens:,} tokens held")
    screen.fact(
        "ratio", f"{float(v.ep_over_tp):.4g}; expert parallelism sends less beyond {break_even_ranks(top_k)} ranks"
    )
    return OK


@predictions.command("layout")
@speaking
def layout_command(
    strategy: Annotated[str, typer.Argument(help=f"one of {', '.join(get_args(Strategy))}")],
    devices: Annotated[int, typer.Option(min=1, help="devices")] = 16,
) -> int:
    """Say who owns which weights and which part of the batch."""
    screen = Screen()
    for line in layout(strategy, devices).lines():
        screen.console.print(line)
    return OK


def published_rows(name: str) -> Iterator[dict[str, Any]]:
    """Every published number of a fabric with its bytes and its prediction."""
    profile = link_profile(name)
    for row in profile.measured:
        for direction in DIRECTIONS:
            exchange = exchange_of(profile, row)
            us, gbs, found = row.us(direction), row.gbs(direction), predict(profile, exchange, row.mode, direction)
            derived = us if us is not None else None if gbs is None else found.num_bytes / gbs / 1e3
            yield {
                "links": profile.name, "mode": row.mode, "ranks": row.ranks, "direction": direction,
                "bytes": found.num_bytes, "published_us": us, "published_gbs": gbs,
                "implied_mb": None if us is None or gbs is None else us * gbs / 1e3,
                "line_us": found.us, "error": None if derived is None else found.us / derived - 1.0,
            }  # fmt: skip


def _mode(name: str) -> Mode:
    for mode in get_args(Mode):
        if mode == name:
            return mode  # type: ignore[no-any-return]
    raise ConfigError(f"--mode {name!r} is unknown{did_you_mean(name, get_args(Mode))}")


def _told(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
