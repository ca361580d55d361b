"""What the device sustains, and a tiny call under compute-sanitizer, where it is installed.

    python benchmarks/gpu_tools.py ceilings --ceilings build/gpu/ceilings.json --results results.jsonl
    python benchmarks/gpu_tools.py sanitize --results results.jsonl

A machine without the tool is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from experts_gpu_cases import replayed, write

from moe_mk.external.library import installed_version

GIB, SIDE = 2**30, 8192
LIBRARIES = ("torch", "triton", "sgl-deep-gemm")

TOOL, FOLDER = "compute-sanitizer", Path("/usr/local/cuda/bin")
TEXT = 6000
"""Characters of its output that are kept."""


def sanitized(seconds: float) -> dict[str, str]:
    """How `tiny` ends under the sanitizer: "clean", or how it failed, and the end of what was printed."""
    line = {"kind": "tool", "tool": TOOL, "text": ""}
    tool = shutil.which(TOOL) or shutil.which(FOLDER / TOOL)
    if tool is None:
        return line | {"status": "is not installed"}
    this = [sys.executable, str(Path(__file__).resolve()), "tiny"]
    subprocess.run(this, check=True, timeout=30)  # compiles without the tool
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", *this]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return line | {"status": f"did not end within {seconds:.0f} s"}
    status = "clean" if done.returncode == 0 else f"exit status {done.returncode}"
    return line | {"status": status, "text": (done.stdout + done.stderr)[-TEXT:].strip()}


def ceilings(file: Path, results: Path | None) -> None:
    """Reads of 8 GiB, copies of 4 GiB, and square FP8 products by cuBLASLt. Every fraction is taken of these."""
    import torch

    def seconds(call: Callable[[], object]) -> float:
        return median([replayed(call, 1) for _ in range(23)][3:]) / 1e6

    data = torch.zeros((2 * GIB,), dtype=torch.int32, device="cuda")
    found = {"read_gbs": round(8 * GIB / seconds(data.sum) / 1e9, 1)}
    source, target = data.view(2, -1)
    found["copy_gbs"] = round(2 * 4 * GIB / seconds(lambda: target.copy_(source)) / 1e9, 1)
    a, b = ((torch.randn((SIDE, SIDE), device="cuda") * 0.5).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device="cuda")
    product = partial(torch._scaled_mm, a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    found["fp8_tflops"] = round(2 * SIDE**3 / seconds(product) / 1e12, 1)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(about | found, indent=2) + "\n", encoding="utf-8")
    versions = {name: version for name in LIBRARIES if (version := installed_version(name))}
    write(results, {"kind": "ceilings", "versions": versions, **about, **found})


def tiny() -> None:
    """Run each engine once on layers whose K loop is shorter than the number of pipeline stages."""
    import torch
    from experts_gpu_peers import GLUON

    from moe_mk.config.tuned import Tuned
    from moe_mk.experts import ExpertsContext
    from moe_mk.experts.triton.experts import TritonExperts
    from moe_mk.experts.triton.tuning import BUILT_IN
    from moe_mk.lab.testing.experts import random_experts
    from moe_mk.quant import BF16, FP8_1x128, FP8_128x128
    from moe_mk.tokens import RowTokens

    device = torch.device("cuda")
    stack = random_experts(FP8_128x128, 3, 256, 256, device)
    for tile in (BUILT_IN[0][1], GLUON[0][1], *(tile for _, tile in GLUON[-2:])):
        backend = TritonExperts(ExpertsContext(BF16, FP8_1x128, "silu", 3, 256, 256, device))
        backend.tuned = Tuned.fixed(tile)
        ids = torch.tensor([[0, 2], [-1, 1], [2, -1], [1, 0], [-1, -1]], dtype=torch.int32, device=device)
        x = torch.randn((5, 256), device=device).bfloat16()
        tokens = RowTokens(BF16.quantize(x), ids, torch.rand((5, 2), device=device), 3)
        assert bool(torch.isfinite(backend.run(tokens, backend.relayout(stack)).y).all())
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ceilings", "sanitize", "tiny"])
    parser.add_argument("--ceilings", type=Path, default=Path("build/gpu/ceilings.json"))
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    if given.what == "ceilings":
        ceilings(given.ceilings, given.results)
    elif given.what == "tiny":
        tiny()
    else:
        line = sanitized(45.0)
        write(given.results, line)
        return int(line["status"] == "exit status 9")
    return 0


if __name__ == "__main__":
    sys.exit(main())
