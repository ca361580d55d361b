"""`moe-mk place`: where experts should lie for a recorded load, before and after, policy beside policy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from moe_mk.cli.exits import OK
from moe_mk.cli.loads import read_loads
from moe_mk.cli.place_picture import save_placement_plot
from moe_mk.cli.screen import Screen, amount
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.placement.eplb import PlacementPlan, Policy, Topology, plan
from moe_mk.rebalance.ledger import Ledger
from moe_mk.rebalance.metrics import Balance, measure_balance, rank_times
from moe_mk.registry import did_you_mean

DEEPSEEK_V3_EXPERT = 3 * 7168 * 2048 + 3 * 56 * 16 * 4
"""Bytes of an expert of DeepSeek-V3: e4m3 codes and f32 scales of 128 x 128 blocks."""
PRESETS = {"prefill-ep32": (32, 4, 9), "decode-ep144": (144, 18, 2)}
"""DeepSeek-V3's deployments: GPUs, nodes, slots a GPU for its 256 experts."""
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True)
class PlaceOrder:
    """What `moe-mk place` was asked."""

    loads: Path
    gpus: int | None = None
    nodes: int | None = None
    slots: int | None = None
    """Physical experts a GPU; None is the least with which any load can be made even."""
    groups: int = 1
    policy: str = "auto"
    speeds: str | None = None
    preset: str | None = None
    min_copies: int = 1
    expert_bytes: int | None = None
    plot: Path | None = None


@dataclass(frozen=True)
class Placing:
    """One policy's answer and how it stands up."""

    asked: Policy
    plan: PlacementPlan
    ledger: Ledger
    balance: Balance
    later: Balance | None
    """Under the second half of a recording, where the plan was made from the first."""

    def as_dict(self) -> dict[str, object]:
        """Numbers for JSON."""
        made = self.plan
        return {
            "policy": made.policy,
            "balance_mean": float(made.balance_X.mean()),
            "balance_worst": float(made.balance_X.min()),
            "bound_mean": float(made.bound_X.mean()),
            "step_over_ideal": self.balance.step_over_ideal,
            "later_step_over_ideal": None if self.later is None else self.later.step_over_ideal,
            "moved_experts": made.moves.transfers,
            "moved_bytes": made.moved_bytes,
            "rounds": made.moves.rounds,
            "lent_to_other_nodes": float(made.exported_X.mean()),
            "lost_with_worst_gpu": float(made.lost_XW.max()),
            "bytes_per_gpu": made.bytes_per_gpu.tolist(),
            "map_bytes": made.map_bytes,
            "reason": made.reason,
        }


def place(screen: Screen, order: PlaceOrder, *, as_json: bool) -> int:
    """Plan, compare and show. Raises ConfigError for what cannot be read or placed."""
    loads_NXE = read_loads(order.loads)
    topology, expert_bytes = topology_of(order, loads_NXE.shape[-1])
    chosen, others = policies_of(order.policy)
    before = in_order(loads_NXE, topology)
    placings, refused = [judged(loads_NXE, topology, chosen, order, expert_bytes, before)], {}
    for each in others:
        try:
            placings.append(judged(loads_NXE, topology, each, order, expert_bytes, before))
        except UnsupportedError as problem:
            refused[each] = "; ".join(problem.reasons)
    now = measure_balance(loads_NXE.sum(0), before)
    if order.plot is not None:
        times = [rank_times(loads_NXE.sum(0), each) for each in (before, placings[0].ledger)]
        save_placement_plot(times[0], times[1], topology, placings[0].plan.policy, order.plot)
    if as_json:
        made = placings[0].plan
        answer = {
            "loads": str(order.loads), "gpus": topology.gpus, "nodes": topology.nodes,
            "slots_per_gpu": topology.slots_W.tolist(), "before": now.as_dict(),
            "after": placings[0].balance.as_dict(), "chosen": placings[0].as_dict(),
            "compared": [each.as_dict() for each in placings[1:]], "refused": refused,
            "physical_to_logical": made.phy2log.tolist(), "share": made.share.round(6).tolist(),
        }  # fmt: skip
        typer.echo(json.dumps(answer, indent=2))
        return OK
    show(screen, loads_NXE, topology, now, placings, expert_bytes)
    for policy, reasons in refused.items():
        screen.fact(f"not {policy}", reasons)
    return OK


def topology_of(order: PlaceOrder, num_experts: int) -> tuple[Topology, int]:
    """The machines, and the bytes of an expert; a preset gives what was not said."""
    if order.preset is not None and order.preset not in PRESETS:
        raise ConfigError(f"--preset {order.preset!r} is unknown{did_you_mean(order.preset, list(PRESETS))}")
    gpus, nodes, slots = PRESETS[order.preset] if order.preset else (order.gpus, order.nodes or 1, order.slots)
    gpus, nodes, slots = order.gpus or gpus, order.nodes or nodes, order.slots or slots
    if gpus is None:
        raise ConfigError("--gpus is missing; say how many GPUs share out the experts, or take a --preset")
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
    """The policy to use, and those to show beside it: with "all", every one."""
    if name == "all":
        return "auto", tuple(policy for policy in POLICIES if policy != "auto")
    for policy in POLICIES:
        if policy == name:
            return policy, ()
    raise ConfigError(f"--policy {name!r} is unknown{did_you_mean(name, [*POLICIES, 'all'])}")


def in_order(loads_NXE: NDArray[np.float64], topology: Topology) -> Ledger:
    """Experts in their order, the first ones once more in the slots that are left: what an engine starts with."""
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
    loads_NXE: NDArray[np.float64],
    topology: Topology,
    policy: Policy,
    order: PlaceOrder,
    expert_bytes: int,
    before: Ledger,
) -> Placing:
    """Plan from what an engine starts with, and see how even the load becomes, on later windows too."""
    groups, copies = order.groups, order.min_copies
    # Without thresholds: what is asked is where experts should lie, not whether a change pays today.
    options = {"min_gain": 0.0, "move_cost": 0.0, "min_copies": copies, "expert_bytes": expert_bytes}
    made = plan(loads_NXE.sum(0), topology, groups=groups, policy=policy, old=before.phy2log, **options)  # type: ignore[arg-type]
    ledger = Ledger(topology, before.num_experts, made.phy2log, made.share)
    later = None
    if len(loads_NXE) > 1:
        half = len(loads_NXE) // 2
        early = plan(loads_NXE[:half].sum(0), topology, groups=groups, policy=policy, min_copies=copies)
        early_ledger = Ledger(topology, before.num_experts, early.phy2log, early.share)
        later = measure_balance(loads_NXE[half:].sum(0), early_ledger)
    return Placing(policy, made, ledger, measure_balance(loads_NXE.sum(0), ledger), later)


def show(
    screen: Screen,
    loads_NXE: NDArray[np.float64],
    topology: Topology,
    now: Balance,
    placings: list[Placing],
    expert_bytes: int,
) -> None:
    """The machines, both sides in two lines, and a row for every policy."""
    windows, layers, experts = loads_NXE.shape
    slots = sorted(set(topology.slots_W.tolist()))
    screen.fact("load", f"{layers} layers of {experts} experts, {windows} {'window' if windows == 1 else 'windows'}")
    where = f"{topology.gpus} GPUs on {topology.nodes} {'node' if topology.nodes == 1 else 'nodes'}"
    screen.fact("machines", f"{where}, {' or '.join(map(str, slots))} slots a GPU, {topology.num_slots} in all")
    for label, each in (("before", now), ("after", placings[0].balance)):
        values = each.as_dict()
        peak, worst = values["balance.rank_max_over_mean"], values["balance.rank_max_over_mean_worst"]
        screen.fact(
            label,
            f"busiest GPU {peak:.3f} x mean, worst layer {worst:.3f} x; expert CV {values['balance.expert_cv']:.3f}",
        )
    if expert_bytes:
        held = int(placings[0].plan.bytes_per_gpu.max())
        screen.fact("memory", f"{amount(held)} of experts on a GPU, maps {amount(placings[0].plan.map_bytes)}")
    screen.console.print(comparison(placings, expert_bytes))
    screen.fact("because", placings[0].plan.reason)


def comparison(placings: list[Placing], expert_bytes: int) -> Table:
    """A row for every policy: how even, what it costs to get there, what crosses nodes, what a lost GPU takes along."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    heads = ("policy", "balance mean", "worst", "no better than", "later", "moved", "rounds", "lent", "lost with a GPU")
    for head in heads:
        table.add_column(head, justify="left" if head == "policy" else "right")
    for each in placings:
        made = each.plan
        moved = f"{made.moves.transfers} ({amount(made.moved_bytes)})" if expert_bytes else str(made.moves.transfers)
        name = made.policy if each.asked == made.policy else f"{each.asked}: {made.policy}"
        later = "" if each.later is None else f"{1 / each.later.step_over_ideal:.4f}"
        balance = [f"{made.balance_X.mean():.4f}", f"{made.balance_X.min():.4f}", f"{made.bound_X.mean():.4f}", later]
        lost = f"{made.lost_XW.max():.1%}"
        table.add_row(name, *balance, moved, str(made.moves.rounds), f"{made.exported_X.mean():.1%}", lost)
    return table
