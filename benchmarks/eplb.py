"""Expert placement against its goals: plan time, balance, moves, maps, and remote nodes per token.

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
from eplb_online import Report, cpu_ms, even_balance, locality, movement, workloads

from moe_mk.lab.cli.outputs import output_file
from moe_mk.placement.balance.moves import plan_moves
from moe_mk.placement.balance.plan import csr_maps
from moe_mk.placement.eplb import Topology, plan, rebalance_experts, resplit

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


def add_options(parser: argparse.ArgumentParser) -> None:
    for option, (what, tails, _) in KNOWN.items():
        parser.add_argument(
            f"--{option}", type=Path, metavar="FOLDER", help=f"{what}: the folder that holds {tails[0]}"
        )


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


def _deepseek(module: ModuleType) -> Call:
    return lambda load, sizes: module.rebalance_experts(load, *sizes)


def _vllm(module: ModuleType) -> Call:
    """Its map of slots alone; the two others vLLM makes elsewhere."""
    return lambda load, sizes: module.DefaultEplbPolicy.rebalance_experts(load, *sizes)


def _sglang(module: ModuleType) -> Call:
    def place(load: torch.Tensor, sizes: Sizes) -> Any:
        slots, groups, nodes, gpus = sizes
        return module.rebalance_experts(load[None], slots, slots // gpus, groups, nodes, groups % nodes == 0)

    return place


KNOWN: dict[str, tuple[str, tuple[str, ...], Callable[[ModuleType], Call]]] = {
    "deepseek": ("DeepSeek", ("eplb.py",), _deepseek),
    "vllm": ("vLLM", ("distributed/eplb/policy/default.py", "policy/default.py"), _vllm),
    "sglang": ("SGLang vectorised", ("srt/eplb/eplb_algorithms/deepseek_vec.py", "deepseek_vec.py"), _sglang),
}


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


CONFIGS = {  # physical experts, groups, nodes, GPUs
    "prefill 288/32, 4 nodes": (288, 8, 4, 32),
    "flat 288/32": (288, 1, 4, 32),
    "decode 288/144, 18 nodes": (288, 8, 18, 144),
    "prefill 320/64, 8 nodes": (320, 8, 8, 64),
    "flat 320/64": (320, 1, 8, 64),
}
PARTS = ["speed", "beside", "balance", "locality", "movement", "maps"]
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


def balance(report: Report, loads: dict[str, np.ndarray]) -> None:
    """In-sample balance; the anchor column is the compatible policy with equal shares, which equals DeepSeek's."""
    for config, sizes, mean_goal, worst_goal in (
        ("prefill 288/32, 4 nodes", CONFIGS["prefill 288/32, 4 nodes"], 0.999, 0.995),
        ("prefill 320/64, 8 nodes", CONFIGS["prefill 320/64, 8 nodes"], 0.998, 0.98),
        ("flat 288/32", CONFIGS["flat 288/32"], 0.9995, 0.0),
        ("decode 288/144, 18 nodes", CONFIGS["decode 288/144, 18 nodes"], 0.0, 0.0),
    ):
        slots, groups, nodes, gpus = sizes
        topology, alike = Topology(gpus, nodes, slots // gpus), []
        for name, load in loads.items():
            placed = plan(load, topology, groups=groups)
            anchor = even_balance(rebalance_experts(load, *sizes)[0].numpy(), load, topology)
            line = f"       {config:<26}{name:<14}{placed.policy:<7}"
            for who, each in {"ours": placed.balance_X, "DeepSeek": anchor, "bound": placed.bound_X}.items():
                line += f"  {who} {each.mean():.4f}/{each.min():.4f}"
            print(line, flush=True)
            if name.startswith("look"):
                alike.append((placed.balance_X, anchor, placed.bound_X))
        ours, theirs, bound = (np.concatenate(each) for each in zip(*alike, strict=True))
        note = f"DeepSeek {theirs.mean():.4f}/{theirs.min():.4f}, bound {bound.mean():.4f}"
        if mean_goal:
            report.add(f"{config}: mean balance, look-alikes", ours.mean(), mean_goal, True, note)
        if worst_goal:
            report.add(f"{config}: worst layer, look-alikes", ours.min(), worst_goal, True, note)
        report.add(f"{config}: layers behind DeepSeek", int((ours < theirs - 1e-9).sum()), 0, False)
        if config.startswith("decode"):
            report.add(f"{config}: mean gain over DeepSeek", ours.mean() - theirs.mean(), 0.001, True, note)
            more = plan(loads["look-alike 0"], Topology(gpus, nodes, 3), groups=groups)
            print(f"       decode with 3 slots a GPU (432): {more.balance_X.mean():.4f}/{more.balance_X.min():.4f}")
    worst = min(
        plan(load * 10.0**power, Topology(gpus, 1, slots), policy="flat", target=1.0).balance_X.min()
        for load in loads.values() for gpus, slots, power in ((32, 9, 0), (64, 5, -9), (37, 8, 9))
    )  # fmt: skip
    report.add("any load, slots >= experts + GPUs - 1, cut to measure", worst, 1 - 1e-6, True)
    for name, speeds in {"half at 0.6": (0.6, 1.0), "half at 0.45": (0.45, 1.0)}.items():
        topology = Topology(32, 4, 9, speeds=speeds * 16)
        placed = plan(loads["look-alike 0"], topology, policy="flat")
        even = even_balance(
            rebalance_experts(loads["look-alike 0"], 288, 1, 1, 32)[0].numpy(), loads["look-alike 0"], topology
        )
        report.add(
            f"unequal GPUs, {name}: mean balance", placed.balance_X.mean(), 0.999, True, f"DeepSeek {even.mean():.4f}"
        )


def maps(report: Report, load: np.ndarray) -> None:
    """Bytes and time of the maps, and rounds of a full re-plan."""
    for gpus, nodes, slots in ((32, 4, 9), (64, 8, 5), (144, 18, 2)):
        placed = plan(load, Topology(gpus, nodes, slots), groups=8)
        ms = cpu_ms({
            "csr": (lambda placed=placed: csr_maps(placed.phy2log, 256), 9),
            "one rank": (lambda placed=placed: placed.nearest([1]), 9),
            "all ranks": (lambda placed=placed: placed.nearest(), 5),
            "resplit": (lambda placed=placed: resplit(placed, load), 3),
        })  # fmt: skip
        print(f"       {gpus} GPUs: " + ", ".join(f"{name} {value:.2f} ms" for name, value in ms.items()))
        if slots * gpus == 288:
            report.add(
                f"{gpus} GPUs: maps and shares, bytes", placed.map_bytes, 1e5, False, "dense int64 x 1024: 116 MB"
            )
        report.add(f"{gpus} GPUs: map build, ms", ms["csr"], 1, False)
        report.add(f"{gpus} GPUs: rank-dispatch map of all ranks, ms", ms["all ranks"], 10, False)
        other = plan(np.roll(load, 7, 1), placed.topology, groups=8)
        moves = plan_moves(placed.phy2log, other.phy2log, placed.topology)
        worst = 0.0
        for layer in range(len(load)):
            mine = (moves.layer == layer) & (moves.round >= 0)
            degree = max(np.bincount(moves.src[mine]).max(), np.bincount(moves.dst[mine]).max())
            worst = max(worst, (moves.round[mine].max() + 1) / degree)
        report.add(
            f"{gpus} GPUs: rounds / busiest GPU, full re-plan", worst, 1.0, False, f"{moves.transfers} transfers"
        )


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
    add_options(parser)
    parser.add_argument("--json", type=output_file, help="write the table here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; all if not given")
    torch.set_num_threads(1)
    chosen = parser.parse_args()
    report, loads = Report(), workloads()
    anchors = anchors_of(chosen)
    parts: dict[str, Callable[[], None]] = {
        "speed": lambda: speed(report, anchors, loads),
        "beside": lambda: beside(report, anchors, loads),
        "balance": lambda: balance(report, loads),
        "locality": lambda: locality(report),
        "movement": lambda: movement(report),
        "maps": lambda: maps(report, loads["look-alike 0"]),
    }
    for part in chosen.parts:
        parts[part]()
    missed = [line for line in report.lines if not line["met"]]
    print(f"{len(report.lines) - len(missed)} of {len(report.lines)} goals met")
    write(chosen.json, written(report, anchors))


if __name__ == "__main__":
    main()
