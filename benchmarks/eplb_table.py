"""What `eplb.py` measures with: other policies as modules, CPU times in turns, balance, and the goal table."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from moe_mk.placement.balance.shares import balance_of, equal_shares, gpu_time
from moe_mk.placement.eplb import Topology


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
