"""How fast a layer loads, against `cat` of the same files, and how much memory that takes.

    python benchmarks/load.py build/ds3 --layer 3 --rounds 5
    python benchmarks/load.py build/ds3 --layer 3 --cold        # evict the files from the page cache first

Each round runs `cat FILES > /dev/null` and then a load in a fresh process, so that both meet the same machine; the best
of each is compared. Memory is what the load added to the process at its peak, over the bytes that the rank owns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from moe_mk.trace.clock import now
from moe_mk.weights import SafetensorsSource, inspect_checkpoint, load_layer


def main() -> None:
    """Run the rounds and print what they showed."""
    options = parse()
    if options.child:
        print(json.dumps(load_once(options)))
        return
    files = sorted(str(path) for path in options.directory.glob("*.safetensors"))
    size = sum(os.path.getsize(file) for file in files)
    cats, loads = [], []
    for _ in range(options.rounds):
        cats.append(size / cat(files, cold=options.cold) / 1e9)
        loads.append(in_a_child(files, cold=options.cold))
    best_cat, best = max(cats), max(loads, key=lambda it: it["gb_per_s"])
    peak = max(it["peak_over_owned"] for it in loads)
    print(f"files     {len(files)}, {size / 1e9:.3f} GB, {'cold' if options.cold else 'in the page cache'}")
    print(f"owned     {best['owned_gb']:.3f} GB, {best['threads']} threads, {os.cpu_count()} cores")
    print(f"cat       best {best_cat:.2f} GB/s, all {' '.join(f'{rate:.2f}' for rate in cats)}")
    rates = " ".join(f"{it['gb_per_s']:.2f}" for it in loads)
    print(f"load      best {best['gb_per_s']:.2f} GB/s, all {rates}")
    print(f"ratio     {best['gb_per_s'] / best_cat:.2f} of cat")
    print(f"memory    peak {peak:.3f} x owned bytes")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--ep", type=int, default=1, help="load as the first of so many expert-parallel ranks")
    parser.add_argument("--tp", type=int, default=1, help="load as the first of so many tensor-parallel ranks")
    parser.add_argument("--cold", action="store_true", help="evict the files from the page cache before each run")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def cat(files: list[str], *, cold: bool) -> float:
    """Seconds that `cat` takes."""
    if cold:
        evict(files)
    start = now()
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
    return now() - start


def in_a_child(files: list[str], *, cold: bool) -> dict[str, float]:
    """Load once in a fresh process, whose peak memory is that of the load alone."""
    if cold:
        evict(files)
    done = subprocess.run([sys.executable, *sys.argv, "--child"], stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def load_once(options: argparse.Namespace) -> dict[str, float]:
    """Load in this process and say how it went."""
    torch.set_num_threads(options.threads)
    facts = {layer.layer: layer for layer in inspect_checkpoint(options.directory).layers}
    spec = facts[options.layer].layer_spec()
    owned = range(spec.num_experts // options.ep)
    before = memory("VmRSS")
    start = now()
    source = SafetensorsSource(options.directory)
    weights = load_layer(source, options.layer, spec, owned=owned, tp_size=options.tp)
    seconds = now() - start
    return {
        "gb_per_s": weights.num_bytes / seconds / 1e9,
        "owned_gb": weights.num_bytes / 1e9,
        "threads": options.threads,
        "peak_over_owned": (memory("VmHWM") - before) / weights.num_bytes,
    }


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def evict(files: list[str]) -> None:
    """Drop the clean pages of the files from the page cache."""
    os.sync()
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


if __name__ == "__main__":
    main()
