"""Expert placement against that of others: plan time with equal placements, and balance of our own placements.

    python benchmarks/eplb.py --deepseek EPLB --vllm vllm-wheel --sglang sglang-wheel --json eplb_cpu.json

Times are CPU times of this process, one thread, the least of several alternating runs; only their ratios mean anything.
Loads are look-alikes of served DeepSeek-V3 layers, not recordings.

The anchors are the policies of others: the real files, read from the user's folders, never copied, each named with its
release in what is written.

    --deepseek FOLDER    github.com/deepseek-ai/EPLB                      eplb.py
    --vllm FOLDER        vLLM: a wheel, unpacked, or the source           distributed/eplb/policy/default.py
    --sglang FOLDER      SGLang, likewise                                 srt/eplb/eplb_algorithms/deepseek_vec.py

Only the file and the modules next to it that it imports are loaded, not the package: neither engine need be installed.
"""

import argparse
import hashlib
import importlib
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import scipy
import torch
from common import parser_of, versions, write

from moe_mk.lab.cli.outputs import output_file
from moe_mk.placement.balance.shares import balance_of, equal_shares, gpu_time
from moe_mk.placement.eplb import Topology, plan, rebalance_experts

LAYERS, EXPERTS = 58, 256
Sizes = tuple[int, int, int, int]
"""Slots, groups, nodes, GPUs."""
Call = Callable[[torch.Tensor, Sizes], Any]


@dataclass(frozen=True)
class Anchor:
    """One policy of somebody else."""

    name: str
    call: Call
    """Places experts for a load [layers, experts]."""
    file: Path
    release: str
    """What its folder states it is, and the beginning of the file's SHA-256."""

    def slots(self, load: torch.Tensor, sizes: Sizes) -> np.ndarray:
        """The logical expert of each slot, [layers, slots]."""
        placed = self.call(load, sizes)
        return np.asarray(placed[0] if isinstance(placed, tuple) else placed)


def anchors_of(chosen: argparse.Namespace) -> dict[str, Anchor]:
    """Load the anchors whose folders were given and print the others; exits if a folder lacks the file."""
    found = {}
    for option, (what, tails, calls) in KNOWN.items():
        folder = getattr(chosen, option)
        if folder is None:
            print(f"       {what}: not measured, no --{option} FOLDER given")
            continue
        file = _file_in(folder, tails)
        if file is None:
            raise SystemExit(f"--{option} {folder} holds no {' and no '.join(tails)}")
        anchor = Anchor(what, calls(_load(file, f"anchor_{option}")), file, _release(folder, file))
        print(f"       {what}: {file.name}, {anchor.release}")
        found[what] = anchor
    return found


def _sglang(module: ModuleType) -> Call:
    def place(load: torch.Tensor, sizes: Sizes) -> Any:
        slots, groups, nodes, gpus = sizes
        return module.rebalance_experts(load[None], slots, slots // gpus, groups, nodes, groups % nodes == 0)

    return place


KNOWN: dict[str, tuple[str, tuple[str, ...], Callable[[ModuleType], Call]]] = {
    "deepseek": (
        "DeepSeek", ("eplb.py",),
        lambda module: lambda load, sizes: module.rebalance_experts(load, *sizes),
    ),
    "vllm": (  # its map of slots alone; the two others vLLM makes elsewhere
        "vLLM", ("distributed/eplb/policy/default.py", "policy/default.py"),
        lambda module: lambda load, sizes: module.DefaultEplbPolicy.rebalance_experts(load, *sizes),
    ),
    "sglang": ("SGLang vectorised", ("srt/eplb/eplb_algorithms/deepseek_vec.py", "deepseek_vec.py"), _sglang),
}  # fmt: skip


def _file_in(folder: Path, tails: tuple[str, ...]) -> Path | None:
    """The file below a folder, however deep the folder was pointed at."""
    for tail in tails:
        if (folder / tail).is_file():
            return folder / tail
        if below := sorted(folder.rglob(tail)):
            return below[0]
    return None


def _load(file: Path, package: str) -> ModuleType:
    """The file as a module of an empty package over its folder, so that it finds its neighbours and runs no more."""
    spec = ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [str(file.parent)]
    sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{file.stem}")


def _release(folder: Path, file: Path) -> str:
    """The version of the wheel, if its metadata is next to it, and a description of the file."""
    digest = f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    for above in (folder, *file.parents):
        for metadata in sorted(above.glob("*.dist-info")):
            if metadata.name.startswith(("vllm", "sglang")):
                return f"{metadata.name.removesuffix('.dist-info')}, {digest}"
    return digest


def counts(load: np.ndarray, seed: int, tokens: int = 2_000_000) -> np.ndarray:
    """Tokens per expert of one window drawn from a load."""
    return np.random.default_rng(seed).poisson(load / load.sum(1, keepdims=True) * tokens).astype(float)


def look_alike(seed: int) -> np.ndarray:
    """Expert max/mean about 5-8 in the median and at most 13.7, coefficient of variation 0.72-1.0, uneven groups."""
    rng = np.random.default_rng(seed)
    shape = rng.normal(size=(LAYERS, 8, EXPERTS // 8)) + 0.8 * rng.normal(size=(LAYERS, 8, 1))
    shape, wanted = shape.reshape(LAYERS, EXPERTS), rng.uniform(0.72, 1.0, LAYERS)
    low, high = np.zeros(LAYERS), np.full(LAYERS, 3.0)
    for _ in range(40):
        load = np.exp(shape * ((low + high) / 2)[:, None])
        load = np.minimum(load, 13.7 * load.mean(1, keepdims=True))
        wide = load.std(1) / load.mean(1) > wanted
        low, high = np.where(wide, low, (low + high) / 2), np.where(wide, (low + high) / 2, high)
    return load


def synthetic(kind: str) -> np.ndarray:
    """A load of a known shape: "zipf S", "log-normal", "uniform" or "hot experts"."""
    rng, even = np.random.default_rng(0), np.ones((LAYERS, EXPERTS))
    if kind.startswith("zipf"):
        return rng.permuted(even * np.arange(1.0, EXPERTS + 1) ** -float(kind[5:]), axis=1)
    if kind == "log-normal":
        return rng.lognormal(0, 1, even.shape)
    if kind == "hot experts":
        np.put_along_axis(even, rng.permuted(np.tile(np.arange(EXPERTS), (LAYERS, 1)), axis=1)[:, :4], 20.0, 1)
    return even


def workloads() -> dict[str, np.ndarray]:
    """Three look-alikes and six known shapes, as counted tokens."""
    named = {f"look-alike {seed}": counts(look_alike(seed), seed) for seed in range(3)}
    return named | {
        kind: counts(synthetic(kind), 0)
        for kind in ("uniform", "zipf 0.5", "zipf 1.0", "zipf 1.5", "log-normal", "hot experts")
    }


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
    sites, share = topology.live_sites(), equal_shares(phy2log, load.shape[1])
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


CONFIGS = {  # physical experts, groups, nodes, GPUs
    "prefill 288/32, 4 nodes": (288, 8, 4, 32),
    "flat 288/32": (288, 1, 4, 32),
    "decode 288/144, 18 nodes": (288, 8, 18, 144),
    "prefill 320/64, 8 nodes": (320, 8, 8, 64),
    "flat 320/64": (320, 1, 8, 64),
}
PARTS = ["speed", "beside"]
SPEED_GOAL = dict(zip(CONFIGS, (100, 150, 300, 100, 150), strict=True))


def speed(report: Report, anchors: dict[str, Anchor], loads: dict[str, np.ndarray]) -> None:
    """Compat time, three maps each, and equality with DeepSeek's."""
    for config, sizes in CONFIGS.items():
        load = torch.from_numpy(loads["look-alike 0"])
        calls: dict[str, tuple[Callable[[], object], int]] = {
            name: (lambda call=anchor.call, load=load, sizes=sizes: call(load, sizes), 3)
            for name, anchor in anchors.items()
        }
        calls["ours"] = (lambda load=load, sizes=sizes: rebalance_experts(load, *sizes), 25)
        ms = cpu_ms(calls)
        print(f"       compat {config}: " + ", ".join(f"{name} {value:.2f} ms" for name, value in ms.items()))
        for name in anchors:
            goal = {"DeepSeek": SPEED_GOAL[config], "vLLM": 6}.get(name, 2)
            report.add(f"compat {config}: times {name}", ms[name] / ms["ours"], goal, True)
    big = torch.from_numpy(np.random.default_rng(0).random((61, 256)))
    ours = cpu_ms({"ours": (lambda: rebalance_experts(big, 288, 8, 4, 32), 9)})["ours"]
    report.add("61 x 256 layers, three maps, ms", ours, 50, False)
    if "DeepSeek" in anchors:
        rng, unequal, cases = np.random.default_rng(0), 0, 0
        hostile = [rng.integers(0, 3, (4, 256)) * (rng.random((4, 256)) < 0.5) for _ in range(20)]
        for rows in [*loads.values(), *hostile]:
            for sizes in CONFIGS.values():
                weight = torch.from_numpy(rows[:: max(len(rows) // 6, 1)].astype(float))
                theirs = anchors["DeepSeek"].call(weight, sizes)
                assert isinstance(theirs, tuple)
                pairs = zip(rebalance_experts(weight, *sizes), theirs, strict=True)
                unequal, cases = unequal + (not all(torch.equal(a, b) for a, b in pairs)), cases + 1
        report.add("cases where a map differs from DeepSeek's", unequal, 0, False, f"of {cases}")


def beside(report: Report, anchors: dict[str, Anchor], loads: dict[str, np.ndarray]) -> None:
    """Balance of our plan beside that of each anchor's own placement, layer by layer."""
    for config, sizes in CONFIGS.items():
        slots, groups, nodes, gpus = sizes
        topology = Topology(gpus, nodes, slots // gpus)
        alike = [load for name, load in loads.items() if name.startswith("look")]
        ours = np.concatenate([plan(load, topology, groups=groups).balance_X for load in alike])
        for name, anchor in anchors.items():
            placed = [(load, anchor.slots(torch.from_numpy(load), sizes)) for load in alike]
            theirs = np.concatenate([even_balance(slots, load, topology) for load, slots in placed])
            note = f"{ours.mean():.4f}/{ours.min():.4f}, {name} {theirs.mean():.4f}/{theirs.min():.4f}"
            behind = int((ours < theirs - 1e-9).sum())
            report.add(f"{config}: layers behind {name}'s own placement", behind, 0, False, note)


def written(report: Report, anchors: dict[str, Anchor]) -> dict[str, object]:
    """What the file holds: where, with what, beside which releases, and every line."""
    others = max(os.getloadavg()[1] - 1.0, 0.0)
    cores = f"{os.cpu_count()} cores, shared with {others:.1f} other busy ones"
    return {
        "device": f"CPU {platform.machine()}, 1 thread of {cores}",
        "versions": {**versions(), "numpy": np.__version__, "scipy": scipy.__version__},
        "command": " ".join(["python", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)]),
        "anchors": {name: f"{anchor.file.name}, {anchor.release}" for name, anchor in anchors.items()},
        "goals": report.lines,
    }


def main() -> None:
    parser = parser_of(__doc__)
    for option, (what, tails, _) in KNOWN.items():
        parser.add_argument(
            f"--{option}", type=Path, metavar="FOLDER", help=f"{what}: the folder that holds {tails[0]}"
        )
    parser.add_argument("--json", type=output_file, help="write the table here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; all if not given")
    torch.set_num_threads(1)
    chosen = parser.parse_args()
    report, loads = Report(), workloads()
    anchors = anchors_of(chosen)
    for part in chosen.parts:
        {"speed": speed, "beside": beside}[part](report, anchors, loads)
    missed = [line for line in report.lines if not line["met"]]
    print(f"{len(report.lines) - len(missed)} of {len(report.lines)} goals met")
    write(chosen.json, written(report, anchors))


if __name__ == "__main__":
    main()
