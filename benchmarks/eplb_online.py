"""What `eplb.py` measures with, and over time and nodes: loads like those of served DeepSeek-V3 layers, CPU times in
turns, the goal table; moves from window to window, and what tokens of a trace reach.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from moe_mk.lab.trace.routing import RoutingTrace, TracedForward, TraceFacts
from moe_mk.placement.balance.moves import num_arrivals
from moe_mk.placement.balance.shares import balance_of, equal_shares, gpu_time
from moe_mk.placement.eplb import Policy, Topology, plan, rebalance_experts


def counts(load: np.ndarray, seed: int, tokens: int = 2_000_000) -> np.ndarray:
    """Tokens per expert of one window drawn from a load."""
    return np.random.default_rng(seed).poisson(load / load.sum(1, keepdims=True) * tokens).astype(float)


def look_alike(seed: int, layers: int = 58, experts: int = 256, groups: int = 8) -> np.ndarray:
    """Expert max/mean about 5-8 in the median and at most 13.7, coefficient of variation 0.72-1.0, uneven groups."""
    rng = np.random.default_rng(seed)
    shape = rng.normal(size=(layers, groups, experts // groups)) + 0.8 * rng.normal(size=(layers, groups, 1))
    shape, wanted = shape.reshape(layers, experts), rng.uniform(0.72, 1.0, layers)
    low, high = np.zeros(layers), np.full(layers, 3.0)
    for _ in range(40):
        load = np.exp(shape * ((low + high) / 2)[:, None])
        load = np.minimum(load, 13.7 * load.mean(1, keepdims=True))
        wide = load.std(1) / load.mean(1) > wanted
        low, high = np.where(wide, low, (low + high) / 2), np.where(wide, (low + high) / 2, high)
    return load


def synthetic(kind: str, seed: int = 0, layers: int = 58, experts: int = 256) -> np.ndarray:
    """A load of a known shape: "zipf S", "log-normal", "uniform" or "hot experts"."""
    rng = np.random.default_rng(seed)
    if kind.startswith("zipf"):
        return rng.permuted(np.tile(np.arange(1.0, experts + 1) ** -float(kind[5:]), (layers, 1)), axis=1)
    if kind == "log-normal":
        return rng.lognormal(0, 1, (layers, experts))
    if kind == "uniform":
        return np.ones((layers, experts))
    hot = np.ones((layers, experts))
    np.put_along_axis(hot, rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)[:, :4], 20.0, 1)
    return hot


def workloads() -> dict[str, np.ndarray]:
    """Three look-alikes and six known shapes, as counted tokens."""
    named = {f"look-alike {seed}": counts(look_alike(seed), seed) for seed in range(3)}
    return named | {
        kind: counts(synthetic(kind), 0)
        for kind in ("uniform", "zipf 0.5", "zipf 1.0", "zipf 1.5", "log-normal", "hot experts")
    }


def drifting(steps: int, rho: float, seed: int = 0) -> list[np.ndarray]:
    """Windows of a slow random walk of the logarithm of every load."""
    rng, windows = np.random.default_rng(seed), []
    walk = 0.75 * rng.normal(size=(58, 256))
    for step in range(steps):
        windows.append(counts(np.exp(walk), step))
        walk = rho * walk + 0.75 * np.sqrt(1 - rho**2) * rng.normal(size=walk.shape)
    return windows


def mixed(steps: int, seed: int = 0) -> list[np.ndarray]:
    """Two kinds of requests in alternating proportion."""
    one = look_alike(seed)
    two = one * np.exp(0.25 * np.random.default_rng(seed + 1).normal(size=one.shape))
    return [counts(one * (0.8 - 0.6 * (step % 2)) + two * (0.2 + 0.6 * (step % 2)), step) for step in range(steps)]


def route(load: np.ndarray, tokens: int, seed: int, groups: int = 8) -> np.ndarray:
    """Expert ids [tokens, 8] of grouped top-k routing (4 of 8 groups), with expert loads proportional to `load`."""
    rng = np.random.default_rng(seed)
    noise, bias = rng.gumbel(size=(tokens, len(load))), np.log(load / load.sum())
    for _ in range(12):
        score = noise + bias
        best = np.sort(score.reshape(tokens, groups, -1), 2)[:, :, -2:].sum(2)
        kept = best >= np.sort(best, 1)[:, -4:-3]
        ids = np.argpartition(np.where(np.repeat(kept, len(load) // groups, 1), -score, np.inf), 8, 1)[:, :8]
        got = np.maximum(np.bincount(ids.ravel(), minlength=len(load)), 0.5)
        bias += 0.7 * np.log(load / load.sum() * ids.size / got)
    return ids


def cpu_ms(calls: dict[str, tuple[Callable[[], object], int]]) -> dict[str, float]:
    """Least CPU time of each call in ms; the calls take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(max(repeats for _, repeats in calls.values())):
        for name, (call, repeats) in calls.items():
            if turn < repeats:
                begin = time.process_time()
                call()
                best[name] = min(best[name], (time.process_time() - begin) * 1e3)
    return best


def even_balance(phy2log: np.ndarray, load: np.ndarray, topology: Topology) -> np.ndarray:
    """Balance of each layer when copies share evenly."""
    return shared_balance(phy2log, equal_shares(phy2log, load.shape[1]), load, topology)


def shared_balance(phy2log: np.ndarray, share: np.ndarray, load: np.ndarray, topology: Topology) -> np.ndarray:
    """Balance of each layer with the given shares."""
    sites = topology.live_sites()
    return balance_of(gpu_time(phy2log, share.astype(float), load, sites), sites.speed_W)


class Report:
    """Lines of the goal table, printed as they come and kept for the file."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def add(self, what: str, value: float, goal: float, at_least: bool, note: str = "") -> None:
        met = bool(value >= goal if at_least else value <= goal)
        self.lines.append({"what": what, "value": value, "goal": goal, "at_least": at_least, "met": met, "note": note})
        sign = ">=" if at_least else "<="
        print(f"{'met   ' if met else 'MISSED'} {what:<58} {value:>12.6g} {sign} {goal:<10g} {note}", flush=True)


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
