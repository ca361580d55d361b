"""What `eplb.py` measures over time and over nodes: moves from window to window, and what tokens of a trace reach."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from eplb_loads import Report, counts, drifting, even_balance, look_alike, mixed, route, shared_balance

from moe_mk.lab.trace.routing import RoutingTrace, TracedForward, TraceFacts
from moe_mk.placement.balance.moves import num_arrivals
from moe_mk.placement.eplb import Policy, Topology, plan, rebalance_experts


def routed(base: np.ndarray, tokens: int, ranks: int) -> RoutingTrace:
    """Group-limited routing of all layers in two steps, dealt out to the ranks, written to a file and read again."""
    ids = [torch.from_numpy(route(row, tokens, layer)) for layer, row in enumerate(base)]
    forwards = [
        TracedForward(step, layer, rank, "prefill", every_TK[step::2][rank::ranks])
        for step in range(2)
        for layer, every_TK in enumerate(ids)
        for rank in range(ranks)
    ]
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder:
        file = Path(folder) / "trace.safetensors"
        RoutingTrace.of(TraceFacts(base.shape[1], 8, 8, ranks, "look-alike"), forwards).write(file)
        print(
            f"       trace: {len(forwards)} forwards, {file.stat().st_size / ids[0].numel() / len(ids):.3f} bytes an id"
        )
        return RoutingTrace.read(file)


def locality(report: Report) -> None:
    """Nodes a token must reach and balance, planned on one half of a trace and measured on the other.

    Copies are drawn by share, as the anchors' figures were; what they are with near copies first is printed beside.
    """
    for slots, nodes, gpus, goal in ((288, 4, 32, 1.06), (320, 8, 64, 1.21)):
        topology, trace = Topology(gpus, nodes, slots // gpus), routed(look_alike(5, layers=4), 16_000, gpus)
        past, future = (trace.filter(steps=[step]) for step in (0, 1))
        far, near, even = {}, {}, {}
        policies: dict[str, tuple[Policy, int]] = {
            "hierarchical": ("compat", 8),
            "global": ("flat", 1),
            "hybrid": ("hybrid", 8),
        }
        for name, (policy, groups) in policies.items():
            split = "equal" if policy == "compat" else "weighted"
            placed = plan(past.loads(), topology, groups=groups, policy=policy, split=split)  # type: ignore[arg-type]
            far[name] = future.nodes_per_token(placed, topology, choice="share").remote
            near[name] = future.nodes_per_token(placed, topology).remote
            even[name] = float(shared_balance(placed.phy2log, placed.share, future.loads(), topology).mean())
        print(
            f"       {nodes} nodes: "
            + ", ".join(f"{n} {far[n]:.3f} remote nodes ({near[n]:.3f} near), balance {even[n]:.3f}" for n in far)
        )
        relative = {name: value / far["hierarchical"] for name, value in far.items()}
        note = f"global {relative['global']:.3f}; with near copies first {near['hybrid'] / near['hierarchical']:.3f}"
        report.add(f"{nodes} nodes: remote nodes, hybrid / hierarchical", relative["hybrid"], goal, False, note)
        report.add(f"{nodes} nodes: hybrid balance - global", even["hybrid"] - even["global"], -0.01, True)


def movement(report: Report) -> None:
    """Plan on one window, serve the next: balance there, and experts that had to arrive."""
    steady = [counts(look_alike(7), step) for step in range(8)]
    prefill, decode = Topology(32, 4, 9), Topology(144, 18, 2)
    for name, windows, goal in (
        ("stationary", steady, 0.001),
        ("mixed", mixed(10), 0.03),
        ("drift .998", drifting(8, 0.998), 0.03),
    ):
        for policy, groups in (("hybrid", 8), ("flat", 1)):
            _served(report, f"{name}, {policy}", windows, prefill, policy, groups, goal)
    # Two slots a GPU leave placement little to gain, and a window that is the opposite of the last one takes it back:
    # what may move is capped, as it would be while serving.
    _served(report, "decode stationary, auto", steady, decode, "auto", 8, 0.001)
    cap = int(0.03 * decode.num_slots * len(steady[0]))
    _served(report, "decode mixed, auto, capped", mixed(10), decode, "auto", 8, 0.03, max_moves=cap)
    _aligned(report, mixed(4), decode)


def _aligned(report: Report, windows: list[np.ndarray], topology: Topology) -> None:
    """A full re-plan whose GPUs are renamed so that experts stay, against DeepSeek's on the same windows."""
    old, theirs, moved, arrived, even, ds_even = None, None, 0, 0, [], []
    for now in windows:
        new = plan(now, topology, groups=8, old=old, min_gain=0.0, move_cost=0.0)
        sizes = (topology.num_slots, 8, topology.nodes, topology.gpus)
        anchor = rebalance_experts(torch.from_numpy(now), *sizes)[0].numpy()
        if old is not None and theirs is not None:
            moved += new.moves.transfers
            arrived += int(num_arrivals(theirs, anchor, topology.live_sites()).sum())
            even.append(new.balance_X.mean())
            ds_even.append(even_balance(anchor, now, topology).mean())
        old, theirs = new, anchor
    note = f"balance {np.mean(even):.4f}, DeepSeek {np.mean(ds_even):.4f}"
    report.add("decode mixed, full re-plan aligned: moves / DeepSeek's", moved / arrived, 0.52, False, note)
    report.add("decode mixed, full re-plan aligned: balance - DeepSeek's", np.mean(even) - np.mean(ds_even), 0.0, True)


def _served(
    report: Report,
    name: str,
    windows: list[np.ndarray],
    topology: Topology,
    policy: Policy,
    groups: int,
    goal: float,
    max_moves: int | None = None,
) -> None:
    """Goals of one policy on one series of windows."""
    sizes = (topology.num_slots, groups, topology.nodes, topology.gpus)
    old, theirs, rows = None, None, []
    for now, later in itertools.pairwise(windows):
        new = plan(now, topology, groups=groups, policy=policy, old=old, max_moves=max_moves if old else None)
        anew = plan(now, topology, groups=groups, policy=policy)
        anchor = rebalance_experts(torch.from_numpy(now), *sizes)[0].numpy()
        moved = (np.nan, np.nan)
        if old is not None and theirs is not None:
            arrived = num_arrivals(theirs, anchor, topology.live_sites()).sum()
            moved = (new.moves.transfers / anchor.size, arrived / anchor.size)
        served = [shared_balance(each.phy2log, each.share, later, topology).mean() for each in (new, anew)]
        rows.append((*moved, *served, even_balance(anchor, later, topology).mean()))
        old, theirs = new, anchor
    moved_, ds_moved, even, fresh_even, ds_even = np.nanmean(np.array(rows), 0)
    note = f"DeepSeek moves {ds_moved:.3f} for balance {ds_even:.4f}"
    report.add(f"{name}: part of slots moved", moved_, goal, False, note)
    report.add(f"{name}: balance - full re-plan", even - fresh_even, -0.005, True, f"{even:.4f}")
