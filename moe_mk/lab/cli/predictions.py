"""The verbs of `moe-mk plan`: exchange, tables, held-out, timeline, relay, volumes, paths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_mk.lab.cli.exits import with_exit_code
from moe_mk.lab.cli.options import LARGEST
from moe_mk.lab.cli.words import SIMULATED, TIMED, WIRES

predictions = typer.Typer(
    help="Predict bytes and times of an exchange on any fabric.",
    epilog="Example: moe-mk plan exchange --links h800_cx7 --ranks 32 --tokens 4096",
    no_args_is_help=True,
)

Links = Annotated[str, typer.Option(help="name of a shipped link profile, or a file")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
TopK = Annotated[int, typer.Option(min=1, max=LARGEST, help="experts per token")]
Hidden = Annotated[int, typer.Option(min=1, max=LARGEST, help="hidden size")]


@predictions.command("exchange", epilog="Example: moe-mk plan exchange --links h800_cx7 --ranks 32 --tokens 4096")
@with_exit_code
def exchange_command(
    links: Annotated[
        str | None, typer.Option(help="name of a shipped link profile, or a file; default h800_cx7")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="h100, h200, b200, gb200_nvl72 or mi300x: its links, in place of --links")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=LARGEST, help="expert-parallel size")] = 32,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="tokens per rank")] = 4096,
    mode: Annotated[str, typer.Option(help="throughput or latency kernels")] = "throughput",
    experts: Annotated[
        int, typer.Option("--num-experts", "--experts", min=1, max=LARGEST, help="routed experts")
    ] = 256,
    top_k: TopK = 8,
    hidden: Hidden = 7168,
    nodes_kept: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="maximum number of nodes per token, by group-limited routing")
    ] = None,
    wire: Annotated[str, typer.Option(help=f"format of dispatched rows: {WIRES}")] = "fp8",
    combine_wire: Annotated[str, typer.Option(help="format of returned rows, one of the same")] = "bf16",
    as_json: AsJson = False,
) -> int:
    """Predict dispatch and combine of one layer: bytes, bytes between nodes, and time with its basis."""
    from moe_mk.errors import ConfigError
    from moe_mk.lab.cli.predict import ExchangeOrder, predict_exchange
    from moe_mk.lab.cli.screen import Screen
    from moe_mk.lab.plan.links import links_of_device

    if links and device:
        raise ConfigError(f"--links {links} and --device {device} both name a fabric; give one of them")
    links = links_of_device(device) if device else links or "h800_cx7"
    order = ExchangeOrder(links, ranks, tokens, mode, experts, top_k, hidden, nodes_kept, wire, combine_wire)
    return predict_exchange(Screen(), order, as_json=as_json)


@predictions.command("tables", epilog="Example: moe-mk plan tables --links h800_cx7")
@with_exit_code
def tables_command(
    links: Annotated[str | None, typer.Option(help="one link profile; default all shipped ones")] = None,
    as_json: AsJson = False,
) -> int:
    """Compare every published measurement of the fabrics with the prediction."""
    from moe_mk.lab.cli.predict import show_tables
    from moe_mk.lab.cli.screen import Screen

    return show_tables(Screen(), links, as_json=as_json)


@predictions.command("held-out", epilog="Example: moe-mk plan held-out --rows")
@with_exit_code
def held_out_command(
    rows: Annotated[bool, typer.Option("--rows", help="print every value, not only tables and misses")] = False,
    as_json: AsJson = False,
) -> int:
    """Predict every published table from constants that were fitted to other tables; print what is missed and why."""
    from moe_mk.lab.cli.predict import show_held_out
    from moe_mk.lab.cli.screen import Screen

    return show_held_out(Screen(), rows=rows, as_json=as_json)


@predictions.command("timeline", epilog="Example: moe-mk plan timeline hierarchical --far ibrc --trace timeline.json")
@with_exit_code
def timeline_command(
    transport: Annotated[str, typer.Argument(help=f"one of {TIMED}")] = "hierarchical",
    ranks: Annotated[int, typer.Option(min=2, max=LARGEST, help="expert-parallel size")] = 16,
    ranks_per_node: Annotated[int, typer.Option(min=1, max=LARGEST, help="ranks of one node")] = 8,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="tokens per rank")] = 16,
    near: Annotated[str, typer.Option(help=f"link inside a node: {SIMULATED}")] = "nvlink",
    far: Annotated[str, typer.Option(help="link between nodes, one of the same")] = "ibgda",
    experts: Annotated[
        int, typer.Option("--num-experts", "--experts", min=1, max=LARGEST, help="routed experts")
    ] = 256,
    top_k: TopK = 8,
    hidden: Hidden = 7168,
    nodes_kept: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="maximum number of nodes per token")
    ] = None,
    wire: Annotated[str, typer.Option(help="format of dispatched rows: bf16, fp8, ...")] = "bf16",
    late: Annotated[str | None, typer.Option(help="ranks that begin later: 3=50 is rank 3 by 50 us, by comma")] = None,
    trace: Annotated[Path | None, typer.Option(help="write the timeline as a Chrome trace")] = None,
    as_json: AsJson = False,
) -> int:
    """Run a transport's algorithm on virtual ranks and simulate when its messages move."""
    from moe_mk.lab.cli.predict import TimelineOrder, show_timeline
    from moe_mk.lab.cli.screen import Screen

    order = TimelineOrder(
        transport, ranks, ranks_per_node, tokens, near, far, experts, top_k, hidden, nodes_kept, wire, late, trace
    )
    return show_timeline(Screen(), order, as_json=as_json)


@predictions.command("relay", epilog="Example: moe-mk plan relay --links ascend_910 --nodes 8 --tokens 16")
@with_exit_code
def relay_command(
    links: Links = "ascend_910",
    nodes: Annotated[int, typer.Option(min=1, max=LARGEST, help="nodes")] = 8,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="tokens per rank")] = 16,
    nodes_kept: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="nodes per token; default: uniform routing")
    ] = None,
    top_k: TopK = 8,
    hidden: Hidden = 7168,
    as_json: AsJson = False,
) -> int:
    """Compare a full mesh with a two-level relay."""
    from moe_mk.lab.cli.predict import compare_relay
    from moe_mk.lab.cli.screen import Screen
    from moe_mk.lab.plan.links import link_profile
    from moe_mk.lab.plan.two_level import Relay

    relay = Relay(link_profile(links), tokens, nodes, hidden, top_k, nodes_kept=nodes_kept)
    return compare_relay(Screen(), relay, as_json=as_json)


@predictions.command("volumes", epilog="Example: moe-mk plan volumes --tokens 4096 --ranks 32")
@with_exit_code
def volumes_command(
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="tokens of the instance")] = 4096,
    hidden: Hidden = 7168,
    top_k: TopK = 8,
    ranks: Annotated[int, typer.Option(min=1, max=LARGEST, help="ranks")] = 32,
) -> int:
    """Compare the communication and the tokens per rank of tensor and expert parallelism."""
    from moe_mk.lab.cli.predict import compare_volumes
    from moe_mk.lab.cli.screen import Screen
    from moe_mk.lab.plan.exchange import Volumes

    return compare_volumes(Screen(), Volumes(tokens, hidden, top_k, ranks))


@predictions.command("paths", epilog="Example: moe-mk plan paths --device h100 --ranks 32 --tokens 128")
@with_exit_code
def paths_command(
    device: Annotated[str, typer.Option(help="a shipped device profile by name, or a file of one")] = "h100",
    ranks: Annotated[int, typer.Option(min=1, max=LARGEST, help="ranks")] = 32,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="tokens a rank")] = 128,
    top_k: TopK = 8,
    hidden: Hidden = 7168,
) -> int:
    """Compare dispatch by CPU proxy and by GPU, and collectives with one-sided sends."""
    from moe_mk.lab.cli.predict import PathsOrder, compare_paths
    from moe_mk.lab.cli.screen import Screen

    return compare_paths(Screen(), PathsOrder(device, ranks, tokens, top_k, hidden))
