"""The verbs of `moe-mk plan`: exchange, tables, relay, volumes, layout."""

from __future__ import annotations

from typing import Annotated

import typer

from moe_mk.cli.exits import speaking
from moe_mk.cli.words import STRATEGIES

predictions = typer.Typer(help="Predict bytes and times of an exchange on any fabric.", no_args_is_help=True)

Links = Annotated[str, typer.Option(help="a shipped link profile by name, or a file of one")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
TopK = Annotated[int, typer.Option(min=1, help="experts a token")]
Hidden = Annotated[int, typer.Option(min=1, help="hidden size")]


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
    from moe_mk.cli.predict import ExchangeOrder, predict_exchange
    from moe_mk.cli.screen import Screen

    order = ExchangeOrder(links, ranks, tokens, mode, experts, top_k, hidden, nodes_kept)
    return predict_exchange(Screen(), order, as_json=as_json)


@predictions.command("tables")
@speaking
def tables_command(
    links: Annotated[str | None, typer.Option(help="one link profile; all shipped ones if not given")] = None,
    as_json: AsJson = False,
) -> int:
    """Set every published row of the fabrics beside the prediction."""
    from moe_mk.cli.predict import show_tables
    from moe_mk.cli.screen import Screen

    return show_tables(Screen(), links, as_json=as_json)


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
    from moe_mk.cli.predict import compare_relay
    from moe_mk.cli.screen import Screen
    from moe_mk.plan.links import link_profile
    from moe_mk.plan.two_level import Relay

    relay = Relay(link_profile(links), tokens, nodes, hidden, top_k, nodes_kept=nodes_kept)
    return compare_relay(Screen(), relay, as_json=as_json)


@predictions.command("volumes")
@speaking
def volumes_command(
    tokens: Annotated[int, typer.Option(min=1, help="tokens of the instance")] = 4096,
    hidden: Hidden = 7168,
    top_k: TopK = 8,
    ranks: Annotated[int, typer.Option(min=1, help="ranks")] = 32,
) -> int:
    """Compare what tensor and expert parallelism send and hold on a rank."""
    from moe_mk.cli.predict import compare_volumes
    from moe_mk.cli.screen import Screen
    from moe_mk.plan.exchange import Volumes

    return compare_volumes(Screen(), Volumes(tokens, hidden, top_k, ranks))


@predictions.command("layout")
@speaking
def layout_command(
    strategy: Annotated[str, typer.Argument(help=f"one of {STRATEGIES}")],
    devices: Annotated[int, typer.Option(min=1, help="devices")] = 16,
) -> int:
    """Say who owns which weights and which part of the batch."""
    from moe_mk.cli.predict import show_layout
    from moe_mk.cli.screen import Screen

    return show_layout(Screen(), strategy, devices)
