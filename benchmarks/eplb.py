"""Time of expert placement against that of others, for the same loads and the same placements.

    python benchmarks/eplb.py --deepseek EPLB --vllm vllm-wheel --sglang sglang-wheel --json eplb_cpu.json

Times are CPU times of this process, one thread, the least of several alternating runs; only their ratios mean anything.
Loads are look-alikes of served DeepSeek-V3 layers, not recordings. The maps of DeepSeek must be equal to ours.

The anchors are the policies of others: the real files, read from the user's folders, never copied, each named with its
release in what is written.

    --deepseek FOLDER    github.com/deepseek-ai/EPLB                      eplb.py
    --vllm FOLDER        vLLM: a wheel, unpacked, or the source           distributed/eplb/policy/default.py
    --sglang FOLDER      SGLang, likewise                                 srt/eplb/eplb_algorithms/deepseek_vec.py

Only the file and the modules next to it that it imports are loaded, not the package: neither engine need be installed.
"""

import hashlib
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from common import about, parser_of, with_output, write

from moe_mk.placement.eplb import rebalance_experts

LAYERS, EXPERTS = 58, 256
CONFIGS = {
    "prefill 288/32, 4 nodes": (288, 8, 4, 32),
    "flat 288/32": (288, 1, 4, 32),
    "decode 288/144, 18 nodes": (288, 8, 18, 144),
    "prefill 320/64, 8 nodes": (320, 8, 8, 64),
    "flat 320/64": (320, 1, 8, 64),
}
"""Physical experts, groups, nodes, GPUs."""
Place = Callable[..., Any]
"""Places experts for a load [layers, experts] and sizes of CONFIGS."""


def _of_sglang(module: ModuleType, load: torch.Tensor, slots: int, groups: int, nodes: int, gpus: int) -> Any:
    return module.rebalance_experts(load[None], slots, slots // gpus, groups, nodes, groups % nodes == 0)


KNOWN: dict[str, tuple[str, str, Callable[[ModuleType], Place]]] = {
    "deepseek": ("DeepSeek", "eplb.py", lambda module: module.rebalance_experts),
    # its map of slots alone; the two others vLLM makes elsewhere
    "vllm": ("vLLM", "policy/default.py", lambda module: module.DefaultEplbPolicy.rebalance_experts),
    "sglang": ("SGLang vectorised", "deepseek_vec.py", lambda module: partial(_of_sglang, module)),
}
"""By option: the name, the end of the path of the file, and its function."""


def anchor_of(folder: Path, tail: str) -> tuple[ModuleType, str]:
    """A file below a folder as a module of an empty package, so that it finds its neighbours, and its release."""
    file = next(iter(sorted(folder.rglob(tail))), None)
    if file is None:
        raise SystemExit(f"{folder} holds no {tail}")
    package = f"anchor_{file.stem}"
    spec = ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [str(file.parent)]
    sys.modules[package] = importlib.util.module_from_spec(spec)
    stated = [each.stem for above in (folder, *file.parents) for each in sorted(above.glob("*.dist-info"))]
    wheel = next((f"{name}, " for name in stated if name.startswith(("vllm", "sglang"))), "")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return importlib.import_module(f"{package}.{file.stem}"), f"{file.name}, {wheel}sha256 {digest}"


def look_alike(seed: int, tokens: int = 2_000_000) -> torch.Tensor:
    """Tokens of experts with max/mean 5-8 in the median and 13.7 at most, deviation 0.72-1.0, uneven groups."""
    rng = np.random.default_rng(seed)
    shape = rng.normal(size=(LAYERS, 8, EXPERTS // 8)) + 0.8 * rng.normal(size=(LAYERS, 8, 1))
    shape, wanted = shape.reshape(LAYERS, EXPERTS), rng.uniform(0.72, 1.0, LAYERS)
    low, high = np.zeros(LAYERS), np.full(LAYERS, 3.0)
    for _ in range(40):
        load = np.exp(shape * ((low + high) / 2)[:, None])
        load = np.minimum(load, 13.7 * load.mean(1, keepdims=True))
        wide = load.std(1) / load.mean(1) > wanted
        low, high = np.where(wide, low, (low + high) / 2), np.where(wide, (low + high) / 2, high)
    chances = load / load.sum(1, keepdims=True)
    return torch.from_numpy(np.random.default_rng(seed).poisson(chances * tokens).astype(float))


def cpu_ms(calls: Mapping[str, Place], load: torch.Tensor, sizes: tuple[int, ...], rounds: int = 9) -> dict[str, float]:
    """Least CPU time of each call in ms; the calls take turns, those of others in every third round."""
    best = dict.fromkeys(calls, float("inf"))
    for number in range(rounds):
        for name, call in calls.items():
            if name == "ours" or number % 3 == 0:
                begin = time.process_time()
                call(load, *sizes)
                best[name] = min(best[name], (time.process_time() - begin) * 1e3)
    return best


def main() -> None:
    parser = parser_of(__doc__)
    for option, (what, tail, _) in KNOWN.items():
        parser.add_argument(f"--{option}", type=Path, metavar="FOLDER", help=f"{what}: the folder that holds {tail}")
    options = with_output(parser, "--json").parse_args()
    torch.set_num_threads(1)
    calls: dict[str, Place] = {"ours": rebalance_experts}
    releases, load, goals = {}, look_alike(0), list[dict[str, object]]()
    for option, (name, tail, function) in KNOWN.items():
        if (folder := getattr(options, option)) is not None:
            module, releases[name] = anchor_of(folder, tail)
            calls[name] = function(module)
    for config, sizes in CONFIGS.items():
        if "DeepSeek" in calls:
            maps = zip(rebalance_experts(load, *sizes), calls["DeepSeek"](load, *sizes), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in maps), f"{config}: a map differs"
        ms = cpu_ms(calls, load, sizes)
        goals += [{"what": f"compat {config}: times {n}", "value": ms[n] / ms["ours"]} for n in releases]
        print(f"{config}: " + ", ".join(f"{name} {value:.2f} ms" for name, value in ms.items()), flush=True)
    write(options.json, {**about(options), "anchors": releases, "goals": goals})


if __name__ == "__main__":
    main()
