"""`moe-mk place`: where experts should lie for a recorded load or trace, before and after, policy beside policy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray

from moe_mk.cli.exits import OK
from moe_mk.cli.loads import Recording, read_recording
from moe_mk.cli.outputs import expect_outputs, format_of
from moe_mk.cli.place_compare import Offer, Placing, mark_best, offer_of, show
from moe_mk.cli.place_picture import save_placement_plot
from moe_mk.cli.screen import Screen
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.placement.eplb import EPLB_POLICIES, Policy, Topology, plan
from moe_mk.placement.traffic import NodesPerToken, Slotted
from moe_mk.rebalance.ledger import Ledger
from moe_mk.rebalance.metrics import measure_balance, rank_times
from moe_mk.registry import did_you_mean

DEEPSEEK_V3_EXPERT = 3 * 7168 * 2048 + 3 * 56 * 16 * 4
"""Bytes of an expert of DeepSeek-V3: e4m3 codes and f32 scales of 128 x 128 blocks."""
PRESETS = {"prefill-ep32": (32, 4, 9), "decode-ep144": (144, 18, 2)}
"""DeepSeek-V3's deployments: GPUs, nodes, slots a GPU for its 256 experts."""


@dataclass(frozen=True)
class PlaceOrder:
    """What `moe-mk place` was asked."""

    loads: Path | None = None
    gpus: int | None = None
    nodes: int | None = None
    slots: int | None = None
    """Physical experts a GPU; None is the least with which any load can be made even."""
    groups: int | None = None
    """Expert groups that routing keeps together; None is what the trace says, or 1."""
    policy: str = "auto"
    speeds: str | None = None
    preset: str | None = None
    min_copies: int = 1
    expert_bytes: int | None = None
    plot: Path | None = None
    trace: Path | None = None
    """A routing trace in place of loads: tells what crosses nodes, too."""
    phase: str | None = None
    """The part of a trace to place for; None is all of it."""
    experts: int | None = None
    """Routed experts, where a trace of another program does not say."""


def place(screen: Screen, order: PlaceOrder, *, as_json: bool) -> int:
    """Plan, compare and show. Raises ConfigError or TraceError for what cannot be read or placed."""
    expect_outputs({"--plot": order.plot})
    if order.plot is not None:
        format_of(order.plot)
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
    offers = mark_best([start, *map(offer_of, different(placings))])
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
        typer.echo(json.dumps(answer, indent=2))
        return OK
    show(screen, recording, topology, now, placings, offers, expert_bytes)
    for policy, reasons in refused.items():
        screen.fact(f"not {policy}", reasons)
    return OK


def nodes_of(recording: Recording, placement: Slotted, topology: Topology) -> NodesPerToken | None:
    """Nodes a token of the trace reaches; None without a trace."""
    return None if recording.trace is None else recording.trace.nodes_per_token(placement, topology)


def different(placings: list[Placing]) -> list[Placing]:
    """Without the policy that "auto" stands for, which has the same answer."""
    return placings[:1] + [each for each in placings[1:] if each.plan.policy != placings[0].plan.policy]


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
    """The policy to use, and those to show beside it: with "all", every one, those of other wheels too."""
    if name == "all":
        return "auto", tuple(policy for policy in EPLB_POLICIES if policy != "auto")
    if name not in EPLB_POLICIES and name not in EPLB_POLICIES.broken:
        raise ConfigError(f"--policy {name!r} is unknown{did_you_mean(name, [*EPLB_POLICIES, 'all'])}")
    return name, ()


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
    recording: Recording, topology: Topology, policy: Policy, order: PlaceOrder, expert_bytes: int, before: Ledger
) -> Placing:
    """Plan from what an engine starts with, and see how even the load becomes, on later windows too."""
    loads_NXE, groups, copies = recording.loads_NXE, recording.groups, order.min_copies
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
    balance = measure_balance(loads_NXE.sum(0), ledger)
    return Placing(policy, made, ledger, balance, later, nodes_of(recording, made, topology))
