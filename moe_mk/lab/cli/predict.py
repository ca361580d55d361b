"""`moe-mk plan`: cost of an exchange on any fabric, compared with published measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from moe_mk.config.shipped import device_profile
from moe_mk.errors import ConfigError
from moe_mk.files import write_text
from moe_mk.lab.cli.exits import OK, print_json
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.plan.exchange import Exchange, Volumes, break_even_ranks
from moe_mk.lab.plan.links import Mode, link_profile, shipped_links
from moe_mk.lab.plan.paths import HostBound, dispatch_us
from moe_mk.lab.plan.predict import DIRECTIONS, GOAL, HeldOut, exchange_of, held_out, predict, published_us
from moe_mk.lab.plan.timeline import simulate, simulated_link
from moe_mk.lab.plan.two_level import Relay
from moe_mk.registry import did_you_mean
from moe_mk.text import amount


@dataclass(frozen=True)
class ExchangeOrder:
    """The options of `moe-mk plan exchange`."""

    links: str
    """Name of a shipped link profile, or a file."""
    ranks: int
    tokens: int
    """Of each rank."""
    mode: str
    experts: int
    top_k: int
    hidden: int
    nodes_kept: int | None = None
    """Maximum number of nodes per token; None: any."""
    wire: str = "fp8"
    combine_wire: str = "bf16"


def predict_exchange(screen: Screen, order: ExchangeOrder, *, as_json: bool) -> int:
    """Print bytes and times of dispatch and combine. Raises ConfigError for unknown links and modes."""
    profile, kind = link_profile(order.links), _mode(order.mode)
    exchange = Exchange(
        order.tokens, order.ranks, profile.ranks_per_node, order.hidden, order.top_k, order.experts, order.nodes_kept,
        wire=order.wire, combine_wire=order.combine_wire,
    )  # fmt: skip
    found = {direction: predict(profile, exchange, kind, direction) for direction in DIRECTIONS}
    if as_json:
        both = {
            name: {
                "us": p.us, "bytes": p.num_bytes, "remote_bytes": p.remote_bytes, "logical_gbs": p.logical_gbs,
                "basis": p.basis,
            }
            for name, p in found.items()
        }  # fmt: skip
        asked = {
            "links": profile.name, "ranks": order.ranks, "tokens": order.tokens, "mode": kind, "wire": order.wire,
            "combine_wire": order.combine_wire,
        }  # fmt: skip
        return print_json(asked | both)
    nodes = f"{exchange.nodes} {'node' if exchange.nodes == 1 else 'nodes'}"
    screen.fact("fabric", f"{profile.about}: {order.ranks} ranks on {nodes}, {order.tokens} tokens each")
    for name, p in found.items():
        rows = order.wire if name == "dispatch" else order.combine_wire
        sent = f"{amount(p.num_bytes)} of {rows} rows ({amount(p.remote_bytes)} to other nodes)"
        screen.fact(name, f"{p.us:.0f} us, {sent}, {p.logical_gbs:.0f} GB/s; {p.basis}")
    return OK


def show_tables(screen: Screen, links: str | None, *, as_json: bool) -> int:
    """Print published rows and predictions. links: one profile; None: every shipped one."""
    rows = [row for name in ([links] if links else shipped_links()) for row in published_rows(name)]
    if as_json:
        return print_json(rows)
    numbers = ("MB", "published us", "GB/s", "implied MB", "predicted us", "error", "held out")
    heads, texts = ("fabric", "kernels", "ranks", "direction", *numbers), ("fabric", "kernels", "direction")
    table = table_of(heads, left=texts, pad_edge=False, padding=(0, 1))
    for row in rows:
        table.add_row(
            row["links"], row["mode"], str(row["ranks"]), row["direction"], f"{row['bytes'] / 1e6:.1f}",
            _number(row["published_us"]), _number(row["published_gbs"]), _number(row["implied_mb"], 1),
            _number(row["line_us"]), _percent(row["error"]), _percent(row["held_out"]),
        )  # fmt: skip
    screen.console.print(table)
    return OK


def show_held_out(screen: Screen, *, rows: bool, as_json: bool) -> int:
    """Print how well each published table is predicted without it. rows: every value, else the misses."""
    found = held_out()
    tables = {
        name: [each for each in found if each.profile.name == name]
        for name in dict.fromkeys(e.profile.name for e in found)
    }
    if as_json:
        return print_json([_held_out_row(each) for each in found])
    heads = ("table", "links", "fitted", "values", f"within {100 * GOAL:.0f} %", "worst")
    table = table_of(heads, left=heads[:3], pad_edge=False, padding=(0, 1))
    for name, values in tables.items():
        worst = max((each.error for each in values), key=abs)
        profile = values[0].profile
        links = f"{profile.near}, {profile.far}" if profile.far else profile.near
        met = sum(abs(each.error) <= GOAL for each in values)
        table.add_row(
            name,
            links,
            "other rows" if values[0].is_fitted else "no",
            str(len(values)),
            str(met),
            f"{100 * worst:+.1f} %",
        )
    screen.console.print(table)
    whole = [name for name, each in tables.items() if not each[0].is_fitted and is_met(each)]
    screen.fact("all met", f"{len(whole)} tables that no constant was fitted to: {', '.join(whole)}")
    for each in found:
        if rows or abs(each.error) > GOAL:
            row = f"{each.profile.name}: {each.row.mode}, {each.row.ranks} ranks, {each.direction}"
            row += f" of {each.row.wire if each.direction == 'dispatch' else 'bf16'} rows"
            text = f"{row}: published {each.published_us:.0f} us, predicted {each.predicted_us:.0f}"
            text += f", {100 * each.error:+.1f} %"
            why = f"; {each.profile.misses}" if abs(each.error) > GOAL and each.profile.misses else ""
            screen.fact("missed" if abs(each.error) > GOAL else "met", text + why)
    return OK


def is_met(values: list[HeldOut]) -> bool:
    """Whether every published value of a table is predicted, each within the goal."""
    profile = values[0].profile
    published = [(row, each) for row in profile.measured for each in DIRECTIONS if published_us(profile, row, each)]
    return len(values) == len(published) and all(abs(each.error) <= GOAL for each in values)


def _held_out_row(each: HeldOut) -> dict[str, Any]:
    return {
        "links": each.profile.name, "near": each.profile.near, "far": each.profile.far, "mode": each.row.mode,
        "ranks": each.row.ranks, "direction": each.direction, "published_us": each.published_us,
        "predicted_us": each.predicted_us, "error": each.error, "table_is_fitted": each.is_fitted,
        "source": each.profile.source, "why": each.profile.misses if abs(each.error) > GOAL else "",
    }  # fmt: skip


def compare_relay(screen: Screen, relay: Relay, *, as_json: bool) -> int:
    """Print the times of a full mesh and of a two-level relay."""
    between, inside = relay.legs_us
    stated = {
        "mesh_us": relay.mesh_us, "between_us": between, "inside_us": inside, "relayed_us": relay.relayed_us,
        "pipelined_us": relay.pipelined_us, "gain": relay.gain,
    }  # fmt: skip
    if as_json:
        return print_json(stated)
    screen.fact("mesh", f"{relay.mesh_us:.1f} us for {amount(relay.mesh_bytes)}")
    screen.fact("relay", f"{between:.1f} us between nodes + {inside:.1f} us inside = {relay.relayed_us:.1f} us")
    screen.fact("pipelined", f"between {relay.pipelined_us:.1f} and {relay.relayed_us:.1f} us")
    screen.fact("gain", f"{relay.gain:.2f} x")
    return OK


def compare_volumes(screen: Screen, v: Volumes) -> int:
    """Print the volumes of tensor and expert parallelism."""
    screen.fact("tensor", f"{v.tp_elements:,} values a rank, {v.tp_resident_tokens:,} tokens held")
    screen.fact("expert", f"{round(v.ep_elements):,} values a rank, {v.ep_resident_tokens:,} tokens held")
    beyond = f"expert parallelism sends less beyond {break_even_ranks(v.top_k)} ranks"
    screen.fact("ratio", f"{float(v.ep_over_tp):.4g}; {beyond}")
    return OK


@dataclass(frozen=True)
class TimelineOrder:
    """The options of `moe-mk plan timeline`."""

    transport: str
    ranks: int
    ranks_per_node: int
    tokens: int
    """Of each rank."""
    near: str
    far: str
    experts: int
    top_k: int
    hidden: int
    nodes_kept: int | None
    wire: str
    late: str | None
    """Ranks that begin later: 3=50,5=20 in microseconds."""
    trace: Path | None


def show_timeline(screen: Screen, order: TimelineOrder, *, as_json: bool) -> int:
    """Record a transport, simulate its messages, and print them by phase. Raises ConfigError for what is unknown."""
    from moe_mk.lab.testing.virtual_time import record, uniform_routings

    near, far = simulated_link(order.near), simulated_link(order.far)
    Exchange(
        order.tokens, order.ranks, order.ranks_per_node, order.hidden, order.top_k, order.experts, order.nodes_kept,
        wire=order.wire,
    )  # fmt: skip
    routings = uniform_routings(
        order.ranks, order.tokens, order.experts, order.top_k, ranks_per_node=order.ranks_per_node,
        nodes_kept=order.nodes_kept,
    )  # fmt: skip
    recorded = record(
        order.transport, routings, num_experts=order.experts, ranks_per_node=order.ranks_per_node,
        hidden_size=order.hidden, wire=order.wire, late_us=_late_us(order.late, order.ranks),
    )  # fmt: skip
    timeline = simulate(recorded.recording, near, far)
    if order.trace is not None:
        write_text(order.trace, json.dumps(timeline.chrome()) + "\n")
    rows = list(timeline.table())
    if as_json:
        return print_json({"us": timeline.us, "phases": rows, "waits_us": timeline.waits()})
    heads = ["phase", "messages", "inside nodes", "between nodes", "begins us", "ends us", "bytes take us"]
    table = table_of([*heads, "longest wait us"], left=("phase",), pad_edge=False, padding=(0, 1))
    for row in rows:
        table.add_row(
            row["phase"], str(row["messages"]), amount(row["near_bytes"]), amount(row["far_bytes"]),
            _number(row["begins_us"], 1), _number(row["ends_us"], 1), _number(row["limit_us"], 1),
            _number(row["longest_wait_us"], 1),
        )  # fmt: skip
    screen.console.print(table)
    nodes = -(-order.ranks // order.ranks_per_node)
    where = f"{order.ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}, {order.tokens} tokens each"
    screen.fact("took", f"{timeline.us:.1f} us: {order.transport} on {near.name} and {far.name}, {where}")
    if order.trace is not None:
        screen.fact("trace", f"{order.trace}, for ui.perfetto.dev")
    return OK


def _late_us(text: str | None, ranks: int) -> dict[int, float]:
    """Parse "3=50,5=20"; raises ConfigError for anything else."""
    parts = [part.partition("=") for part in text.split(",")] if text else []
    try:
        late = {int(rank): float(us) for rank, _, us in parts}
    except ValueError:
        late = {-1: 0.0}
    if not all(0 <= rank < ranks and 0 <= us < math.inf for rank, us in late.items()):
        raise ConfigError(f"--late {text!r} is not a list such as 3=50 of ranks below {ranks} and microseconds")
    return late


@dataclass(frozen=True)
class PathsOrder:
    """The arguments of `moe-mk plan paths`."""

    device: str
    ranks: int
    tokens: int
    """Of each rank."""
    top_k: int
    hidden: int


def compare_paths(screen: Screen, order: PathsOrder) -> int:
    """Dispatch by CPU proxy and by GPU, and fixed costs of both ways. Raises ConfigError for part of a node."""
    device = device_profile(order.device)
    if order.ranks > device.ranks_per_node:
        call = (order.tokens, order.ranks)
        proxy = dispatch_us("cpu_proxy", *call, top_k=order.top_k, ranks_per_node=device.ranks_per_node)
        gpu = dispatch_us("gpu", *call, top_k=order.top_k, ranks_per_node=device.ranks_per_node)
        screen.fact("dispatch", f"{proxy:.0f} us by a CPU proxy, {gpu:.0f} us by the GPU (fit to pplx-kernels)")
    bound = HostBound.on(device, order.ranks, order.tokens * order.top_k * order.hidden)
    screen.fact("collective", f"{bound.collective_us:.0f} us driven by the host, {bound.wire_us:.0f} us of them bytes")
    screen.fact("one-sided", f"{bound.one_sided_us:.0f} us")
    return OK


def published_rows(name: str) -> Iterator[dict[str, Any]]:
    """Every published number of a fabric with its bytes and its prediction."""
    profile = link_profile(name)
    without = {(e.row, e.direction): e.error for e in held_out() if e.profile.name == profile.name}
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
                "held_out": without.get((row, direction)),
            }  # fmt: skip


def _mode(name: str) -> Mode:
    for mode in get_args(Mode):
        if mode == name:
            return mode  # type: ignore[no-any-return]
    raise ConfigError(f"--mode {name!r} is unknown{did_you_mean(name, get_args(Mode))}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
