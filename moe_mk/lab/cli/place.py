"""`moe-mk place`: placement of experts for a recorded load or trace, with a comparison of policies.

`--plot` draws the GPU load before and after, and the policies by balance, traffic and moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.lab.cli.exits import OK, print_json
from moe_mk.lab.cli.loads import Recording, read_recording
from moe_mk.lab.cli.outputs import expect_outputs, new_figure, save_picture
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.trace.traffic import NodesPerToken, Slotted
from moe_mk.placement.eplb import EPLB_POLICIES, PlacementPlan, Policy, Topology, plan
from moe_mk.rebalance.ledger import Balance, Ledger, measure_balance, rank_times
from moe_mk.registry import did_you_mean
from moe_mk.text import amount

DEEPSEEK_V3_EXPERT = 3 * 7168 * 2048 + 3 * 56 * 16 * 4
"""Bytes of an expert of DeepSeek-V3: e4m3 codes and f32 scales of 128 x 128 blocks."""
PRESETS = {"prefill-ep32": (32, 4, 9), "decode-ep144": (144, 18, 2)}
"""DeepSeek-V3's deployments: GPUs, nodes, slots per GPU for its 256 experts."""


@dataclass(frozen=True)
class PlaceOrder:
    """The options of `moe-mk place`."""

    loads: Path | None = None
    gpus: int | None = None
    nodes: int | None = None
    slots: int | None = None
    """Physical experts per GPU; None: the least with which any load can be balanced."""
    groups: int | None = None
    """Expert groups of the router; None: those of the trace, or 1."""
    policy: str = "auto"
    speeds: str | None = None
    preset: str | None = None
    min_copies: int = 1
    expert_bytes: int | None = None
    plot: Path | None = None
    trace: Path | None = None
    """A routing trace instead of loads; also gives the traffic between nodes."""
    phase: str | None = None
    """The phase of a trace to use; None: all of it."""
    experts: int | None = None
    """Number of routed experts, if the trace of another program does not contain it."""


@dataclass(frozen=True)
class Placing:
    """The placement of one policy and its balance."""

    asked: Policy
    plan: PlacementPlan
    ledger: Ledger
    balance: Balance
    later: Balance | None
    """Balance in the second half of a recording of a plan from its first half."""
    nodes: NodesPerToken | None = None
    """Nodes per token, with a trace."""

    @property
    def name(self) -> str:
        """The requested policy, and the one that ran."""
        return self.plan.policy if self.asked == self.plan.policy else f"{self.asked}: {self.plan.policy}"

    @property
    def offer(self) -> Offer:
        """The costs of the placement."""
        made = self.plan.moves.transfers
        return Offer(self.name, self.balance.step_over_ideal, made, moved_bytes(self.plan), self.nodes)

    def as_dict(self) -> dict[str, object]:
        made = self.plan
        return {
            "policy": made.policy,
            "balance_mean": float(made.balance_X.mean()),
            "balance_worst": float(made.balance_X.min()),
            "bound_mean": float(made.bound_X.mean()),
            "step_over_ideal": self.balance.step_over_ideal,
            "later_step_over_ideal": None if self.later is None else self.later.step_over_ideal,
            "nodes_per_token": None if self.nodes is None else self.nodes.all,
            "remote_nodes_per_token": None if self.nodes is None else self.nodes.remote,
            "moved_experts": made.moves.transfers,
            "moved_bytes": moved_bytes(made),
            "rounds": made.moves.rounds,
            "lent_to_other_nodes": float(made.exported_X.mean()),
            "lost_with_worst_gpu": float(made.lost_XW.max()),
            "bytes_per_gpu": bytes_per_gpu(made).tolist(),
            "map_bytes": made.map_bytes,
            "reason": made.reason,
        }


@dataclass(frozen=True)
class Offer:
    """The three costs of a placement; less is better in each."""

    name: str
    step_over_ideal: float
    moved_experts: int
    moved_bytes: int
    nodes: NodesPerToken | None
    best: bool = False
    """Whether it is Pareto-optimal."""

    def costs(self) -> tuple[float, ...]:
        """Time, moves, and remote nodes if known; times are rounded to a millionth."""
        remote = () if self.nodes is None else (round(self.nodes.remote, 6),)
        return (round(self.step_over_ideal, 6), float(self.moved_experts), *remote)

    def as_dict(self) -> dict[str, object]:
        remote = None if self.nodes is None else self.nodes.remote
        return {name: value for name, value in asdict(self).items() if name != "nodes"} | {
            "remote_nodes_per_token": remote
        }


def place(screen: Screen, order: PlaceOrder, *, as_json: bool) -> int:
    """Plan, compare and show. Raises ConfigError or TraceError for what cannot be read or placed."""
    expect_outputs({"--plot": order.plot})
    recording = read_recording(order.loads, order.trace, order.phase, order.experts, order.groups)
    topology, expert_bytes = topology_of(order, recording.loads_NXE.shape[-1])
    chosen, others = policies_of(order.policy)
    before = in_order(recording.loads_NXE, topology)
    placings, refused = [judged(recording, topology, chosen, order, expert_bytes, before)], {}
    for each in others:
        try:
            placings.append(judged(recording, topology, each, order, expert_bytes, before))
        except UnsupportedError as problem:
            refused[each] = "; ".join(problem.reasons)
    load_XE = recording.loads_NXE.sum(0)
    now = measure_balance(load_XE, before)
    start = Offer("in order", now.step_over_ideal, 0, 0, nodes_of(recording, before, topology))
    # The policy that "auto" selected has the same result.
    different = placings[:1] + [each for each in placings[1:] if each.plan.policy != placings[0].plan.policy]
    offers = mark_best([start, *(each.offer for each in different)])
    if order.plot is not None:
        times = [rank_times(load_XE, each) for each in (before, placings[0].ledger)]
        save_placement_plot(times[0], times[1], topology, placings[0].plan.policy, order.plot, offers)
    if as_json:
        made = placings[0].plan
        answer = {
            "loads": str(recording.source), "gpus": topology.gpus, "nodes": topology.nodes,
            "slots_per_gpu": topology.slots_W.tolist(), "before": now.as_dict(),
            "after": placings[0].balance.as_dict(), "chosen": placings[0].as_dict(),
            "compared": [each.as_dict() for each in placings[1:]], "refused": refused,
            "pareto": [each.as_dict() for each in offers],
            "physical_to_logical": made.phy2log.tolist(), "share": made.share.round(6).tolist(),
        }  # fmt: skip
        return print_json(answer)
    show(screen, recording, topology, now, placings, offers, expert_bytes)
    for policy, reasons in refused.items():
        screen.fact(f"not {policy}", reasons)
    return OK


def nodes_of(recording: Recording, placement: Slotted, topology: Topology) -> NodesPerToken | None:
    """Nodes per token of the trace; None without a trace."""
    return None if recording.trace is None else recording.trace.nodes_per_token(placement, topology)


def topology_of(order: PlaceOrder, num_experts: int) -> tuple[Topology, int]:
    """The machines, and the bytes of an expert; a preset supplies missing options."""
    if order.preset is not None and order.preset not in PRESETS:
        raise ConfigError(f"--preset {order.preset!r} is unknown{did_you_mean(order.preset, list(PRESETS))}")
    gpus, nodes, slots = PRESETS[order.preset] if order.preset else (order.gpus, order.nodes or 1, order.slots)
    gpus, nodes, slots = order.gpus or gpus, order.nodes or nodes, order.slots or slots
    if gpus is None:
        raise ConfigError("--gpus is missing; give the number of GPUs or a --preset")
    slots = slots or -(-(num_experts + gpus - 1) // gpus)
    default = DEEPSEEK_V3_EXPERT if order.preset else 0
    size = default if order.expert_bytes is None else order.expert_bytes
    return Topology(gpus, nodes, slots, speeds_of(order.speeds, gpus)), size


def speeds_of(text: str | None, gpus: int) -> tuple[float, ...] | None:
    """Relative speeds: one of every GPU, "1,1,0.5,0.5", or runs of equal ones, "1*16,0.5*16"."""
    if text is None:
        return None
    try:
        parts = [part.split("*") for part in text.split(",")]
        speeds = tuple(float(part[0]) for part in parts for _ in range(int(part[1]) if len(part) == 2 else 1))
    except (ValueError, IndexError):
        raise ConfigError(f"--speeds {text!r} is no list of numbers such as 1,1,0.5 or 1*16,0.5*16") from None
    if len(speeds) != gpus:
        raise ConfigError(f"--speeds names {len(speeds)} GPUs, there are {gpus}")
    return speeds


def policies_of(name: str) -> tuple[Policy, tuple[Policy, ...]]:
    """The policy to use, and those to compare it with: with "all", every registered one."""
    if name == "all":
        return "auto", tuple(policy for policy in EPLB_POLICIES if policy != "auto")
    if name not in EPLB_POLICIES and name not in EPLB_POLICIES.broken:
        raise ConfigError(f"--policy {name!r} is unknown{did_you_mean(name, [*EPLB_POLICIES, 'all'])}")
    return name, ()


def in_order(loads_NXE: NDArray[np.float64], topology: Topology) -> Ledger:
    """Experts in order, the first ones replicated in the remaining slots: the initial placement of an engine."""
    layers, num_experts = loads_NXE.shape[1:]
    if topology.num_slots < num_experts:
        raise ConfigError(
            f"{topology.num_slots} slots cannot hold {num_experts} experts; "
            f"use --slots {-(-num_experts // topology.gpus)} or more on {topology.gpus} GPUs"
        )
    slots_P = np.arange(topology.num_slots, dtype=np.int64) % num_experts
    share_P = 1.0 / np.bincount(slots_P, minlength=num_experts)[slots_P]
    return Ledger(
        topology, num_experts, np.tile(slots_P, (layers, 1)), np.tile(share_P.astype(np.float32), (layers, 1))
    )


def judged(
    recording: Recording, topology: Topology, policy: Policy, order: PlaceOrder, expert_bytes: int, before: Ledger
) -> Placing:
    """Plan from the initial placement, and measure the balance, also on later windows."""
    loads_NXE, groups, copies = recording.loads_NXE, recording.groups, order.min_copies
    # Without thresholds: the best placement is wanted, whether or not the change pays off.
    options = {"min_gain": 0.0, "move_cost": 0.0, "min_copies": copies, "expert_bytes": expert_bytes}
    made = plan(loads_NXE.sum(0), topology, groups=groups, policy=policy, old=before.phy2log, **options)  # type: ignore[arg-type]
    ledger = Ledger(topology, before.num_experts, made.phy2log, made.share)
    later = None
    if len(loads_NXE) > 1:
        half = len(loads_NXE) // 2
        early = plan(loads_NXE[:half].sum(0), topology, groups=groups, policy=policy, min_copies=copies)
        early_ledger = Ledger(topology, before.num_experts, early.phy2log, early.share)
        later = measure_balance(loads_NXE[half:].sum(0), early_ledger)
    balance = measure_balance(loads_NXE.sum(0), ledger)
    return Placing(policy, made, ledger, balance, later, nodes_of(recording, made, topology))


def mark_best(offers: list[Offer]) -> list[Offer]:
    """Mark the Pareto-optimal offers."""

    def beaten(one: Offer) -> bool:
        return any(
            other.costs() != one.costs() and all(a <= b for a, b in zip(other.costs(), one.costs(), strict=True))
            for other in offers
        )

    return [replace(each, best=not beaten(each)) for each in offers]


def show(
    screen: Screen,
    recording: Recording,
    topology: Topology,
    now: Balance,
    placings: list[Placing],
    offers: list[Offer],
    expert_bytes: int,
) -> None:
    """Print the machines, balance before and after, and a row per policy."""
    windows, layers, experts = recording.loads_NXE.shape
    slots = sorted(set(topology.slots_W.tolist()))
    screen.fact("load", f"{layers} layers of {experts} experts, {windows} {'window' if windows == 1 else 'windows'}")
    if recording.trace is not None:
        traced, facts = recording.trace, recording.trace.facts
        ranks = f"{facts.num_ranks} {'rank' if facts.num_ranks == 1 else 'ranks'}"
        screen.fact(
            "trace", f"{traced.num_rows} rows of {facts.top_k} experts in {traced.num_forwards} forwards of {ranks}"
        )
    where = f"{topology.gpus} GPUs on {topology.nodes} {'node' if topology.nodes == 1 else 'nodes'}"
    screen.fact("machines", f"{where}, {' or '.join(map(str, slots))} slots per GPU, {topology.num_slots} in total")
    for label, each in (("before", now), ("after", placings[0].balance)):
        values = each.as_dict()
        peak, worst = values["balance.rank_max_over_mean"], values["balance.rank_max_over_mean_worst"]
        screen.fact(
            label,
            f"busiest GPU {peak:.3f} x mean, worst layer {worst:.3f} x; expert CV {values['balance.expert_cv']:.3f}",
        )
    if expert_bytes:
        held = int(bytes_per_gpu(placings[0].plan).max())
        screen.fact("memory", f"{amount(held)} of experts on a GPU, maps {amount(placings[0].plan.map_bytes)}")
    screen.console.print(comparison(placings, expert_bytes))
    if recording.trace is not None:
        screen.console.print(pareto_table(offers, expert_bytes))
    screen.fact("because", placings[0].plan.reason)


def comparison(placings: list[Placing], expert_bytes: int) -> Table:
    """A row per policy: balance, moves, load sent to other nodes, load lost with a GPU."""
    heads = ["policy", "balance mean", "worst", "bound", "second half", "moved", "rounds", "to other nodes"]
    table = table_of([*heads, "lost with a GPU"], left=("policy",))
    for each in placings:
        made = each.plan
        moved = f"{made.moves.transfers} ({amount(moved_bytes(made))})" if expert_bytes else str(made.moves.transfers)
        later = "" if each.later is None else f"{1 / each.later.step_over_ideal:.4f}"
        balance = [f"{made.balance_X.mean():.4f}", f"{made.balance_X.min():.4f}", f"{made.bound_X.mean():.4f}", later]
        lost = f"{made.lost_XW.max():.1%}"
        table.add_row(each.name, *balance, moved, str(made.moves.rounds), f"{made.exported_X.mean():.1%}", lost)
    return table


def pareto_table(offers: list[Offer], expert_bytes: int) -> Table:
    """A row per placement; Pareto-optimal ones are marked with a star."""
    heads = ("placement", "balance", "moved", "nodes per token", "remote nodes per token", "Pareto")
    table = table_of(heads, left=heads[:1])
    for each in offers:
        moved = f"{each.moved_experts} ({amount(each.moved_bytes)})" if expert_bytes else str(each.moved_experts)
        nodes = ("", "") if each.nodes is None else (f"{each.nodes.all:.3f}", f"{each.nodes.remote:.3f}")
        table.add_row(each.name, f"{1 / each.step_over_ideal:.4f}", moved, *nodes, "*" if each.best else "")
    return table


def save_placement_plot(
    before_XW: NDArray[np.float64],
    after_XW: NDArray[np.float64],
    topology: Topology,
    policy: str,
    file: Path,
    offers: Sequence[Offer] = (),
) -> None:
    """Two heat maps, layer by GPU, in units of the layer's ideal time, and the busiest GPU of every layer below.

    With a trace, also every policy by balance, remote nodes per token and moved experts.
    Raises LibraryMissing without matplotlib.
    """
    figure = new_figure((11, 6.2))
    top, bottom = figure.subfigures(2, 1, height_ratios=(2, 1))
    sides = top.subplots(1, 2, sharey=True)
    speed_W = topology.speed_W
    relative = [each / np.maximum(each @ speed_W / speed_W.sum(), 1e-300)[:, None] for each in (before_XW, after_XW)]
    for axes, values, title in zip(sides, relative, ("before: experts in order", f"after: {policy}"), strict=True):
        image = axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=0.0, vmax=2.0, interpolation="none")
        axes.set_title(f"{title}, busiest GPU {values.max(1).mean():.3f} x ideal")
        axes.set_xlabel("GPU")
        for node in range(1, topology.nodes):
            axes.axvline(node * topology.gpus / topology.nodes - 0.5, color="black", linewidth=0.6)
    sides[0].set_ylabel("layer")
    top.colorbar(image, ax=list(sides), label="time over the layer's ideal", extend="max")
    traced = [offer for offer in offers if offer.nodes is not None]
    line, *rest = np.atleast_1d(bottom.subplots(1, 2 if traced else 1))
    for axes in rest:
        _draw_trade(axes, traced)
    layers = np.arange(len(before_XW))
    line.plot(layers, relative[0].max(1), color="tab:red", label="before", marker="." if len(layers) < 5 else None)
    line.plot(layers, relative[1].max(1), color="tab:blue", label="after", marker="." if len(layers) < 5 else None)
    line.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    line.set_xlabel("layer")
    line.set_ylabel("busiest GPU")
    line.legend()
    save_picture(figure, file)


def _draw_trade(axes: Any, offers: Sequence[Offer]) -> None:
    """Remote nodes against balance; larger discs move more experts, filled ones are Pareto-optimal."""
    most = max(max(offer.moved_experts for offer in offers), 1)
    for offer in offers:
        assert offer.nodes is not None
        at, size = (offer.nodes.remote, 1.0 / offer.step_over_ideal), 30 + 270 * offer.moved_experts / most
        colour = "tab:green" if offer.best else "none"
        axes.scatter(*at, s=size, facecolor=colour, edgecolor="tab:green", alpha=0.7)
        axes.annotate(offer.name, at, textcoords="offset points", xytext=(6, 4), fontsize="small")
    axes.margins(0.25)
    axes.set_xlabel("remote nodes per token")
    axes.set_ylabel("balance")


def bytes_per_gpu(plan: PlacementPlan) -> NDArray[np.int64]:
    """Memory the experts of all layers take on every GPU."""
    held: NDArray[np.int64] = plan.slots_per_gpu * plan.expert_bytes * len(plan.phy2log)
    return held


def moved_bytes(plan: PlacementPlan) -> int:
    """Bytes that travel between GPUs, or come from outside."""
    return plan.moves.transfers * plan.expert_bytes
