"""What `eplb.py` measures with: loads like those of served DeepSeek-V3 layers, CPU times in turns, the goal table."""

import time
from collections.abc import Callable

import numpy as np

from moe_mk.placement.balance.shares import balance_of, equal_shares, gpu_time
from moe_mk.placement.eplb import Topology


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
    """Ids [tokens, 8] of group-limited routing (4 of 8 groups by their two best) whose expert loads follow `load`."""
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
