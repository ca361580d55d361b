"""The policies of others that `eplb.py` measures against: the real files, read from the user's folders, never copied.

    --deepseek FOLDER    github.com/deepseek-ai/EPLB                      eplb.py
    --vllm FOLDER        vLLM: a wheel, unpacked, or the source           distributed/eplb/policy/default.py
    --sglang FOLDER      SGLang, likewise                                 srt/eplb/eplb_algorithms/deepseek_vec.py

One file is run and what it imports beside itself, never the package around it: neither engine needs to be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

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
    """--deepseek, --vllm and --sglang."""
    for option, (what, tails, _) in KNOWN.items():
        parser.add_argument(
            f"--{option}", type=Path, metavar="FOLDER", help=f"{what}: the folder that holds {tails[0]}"
        )


def anchors_of(chosen: argparse.Namespace) -> dict[str, Anchor]:
    """Those whose folders were given; the others are named on the screen. Exits where a folder lacks the file."""
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
    """The version of the wheel where its metadata lies beside it, and what the file is."""
    digest = f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    for above in (folder, *file.parents):
        for metadata in sorted(above.glob("*.dist-info")):
            if metadata.name.startswith(("vllm", "sglang")):
                return f"{metadata.name.removesuffix('.dist-info')}, {digest}"
    return digest
