"""What the GPU sustains: reading memory, and FP8 products of cuBLASLt. Every fraction is taken of these.

python tools/gpu_ceilings.py --json build/gpu/ceilings.json
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
SIDE = 8192
LIBRARIES = ("torch", "triton", "sgl-deep-gemm")


def seconds(call: Callable[[], Any], rounds: int = 20) -> float:
    """Median time of one call on the device."""
    taken = []
    for number in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        if number >= 3:
            taken.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(taken))


def read_gbs() -> float:
    """Bytes a second of a sum over 8 GiB, far more than any cache."""
    data = torch.zeros((8 * GIB // 4,), dtype=torch.int32, device="cuda")
    return float(8 * GIB / seconds(lambda: data.sum()) / 1e9)


def copy_gbs() -> float:
    """Bytes read and written a second of a copy of 4 GiB."""
    source = torch.zeros((4 * GIB,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * GIB / seconds(lambda: target.copy_(source)) / 1e9


def fp8_tflops() -> float:
    """Products a second of a square FP8 GEMM on random values, by cuBLASLt."""
    a, b = ((torch.randn((SIDE, SIDE), device="cuda") * 0.5).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device="cuda")

    def call() -> torch.Tensor:
        return torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * SIDE**3 / seconds(call) / 1e12


def versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="a file of results, to which a line is appended")
    given = parser.parse_args()
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "read_gbs": round(read_gbs(), 1)}
    found |= {"copy_gbs": round(copy_gbs(), 1), "fp8_tflops": round(fp8_tflops(), 1)}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    text = json.dumps({"kind": "ceilings", "versions": versions(), **found})
    if given.results:
        given.results.parent.mkdir(parents=True, exist_ok=True)
        with given.results.open("a", encoding="utf-8") as kept:
            kept.write(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
