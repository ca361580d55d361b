"""A tiny call under compute-sanitizer, and one launch of decode and of prefill under Nsight Compute, where they exist.

    python benchmarks/gpu_tools.py sanitize --results results.jsonl
    python benchmarks/gpu_tools.py profile --results results.jsonl

A machine without a tool, or one that does not allow reading performance counters, is a result, not a failure.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from experts_gpu_cases import write

FOLDERS = (Path("/usr/local/cuda/bin"), Path("/opt/nvidia/nsight-compute"))
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "LaunchStats")
PROFILES = {"decode w13": ("16", "0"), "prefill w2": ("8192", "1")}
"""Tokens, and launches of the Gluon kernel to skip: the first one is w13."""
TEXT = 6000
"""Characters of a tool's output that are kept."""


def found(tool: str) -> str | None:
    """A tool of the CUDA toolkit on this machine."""
    return shutil.which(tool) or next((str(path) for folder in FOLDERS for path in folder.rglob(tool)), None)


def run(name: str, command: list[str], seconds: float) -> dict[str, str]:
    """A tool's result: "clean", or how it failed, and the end of what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"kind": "tool", "tool": name, "status": f"did not end within {seconds:.0f} s", "text": ""}
    status = "clean" if done.returncode == 0 else f"exit status {done.returncode}"
    return {"kind": "tool", "tool": name, "status": status, "text": (done.stdout + done.stderr)[-TEXT:].strip()}


def tiny() -> None:
    """Run each engine once on layers whose K loop is shorter than the number of pipeline stages."""
    import torch
    from experts_gpu import GLUON

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


def decode(tokens: int) -> None:
    """One call of the Gluon kernels, without a graph."""
    import torch
    from experts_gpu import GLUON, ours
    from experts_gpu_cases import Case

    from moe_mk.config.tuned import Tuned

    case, device = Case(32), torch.device("cuda")
    _, call_of = ours(case, case.weights(device), Tuned((), GLUON))
    call_of(case.tokens(tokens, device, sets=1)[0])()
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sanitize", "profile", "tiny", "decode"])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    if given.what == "tiny":
        tiny()
        return 0
    if given.what == "decode":
        decode(given.tokens)
        return 0
    this = [sys.executable, str(Path(__file__).resolve())]
    name = "compute-sanitizer" if given.what == "sanitize" else "ncu"
    tool = found(name)
    if tool is None:
        write(given.results, {"kind": "tool", "tool": name, "status": "is not installed", "text": ""})
        return 0
    if given.what == "sanitize":
        subprocess.run([*this, "tiny"], check=True, timeout=30)  # compiles without the tool
        line = run(name, [tool, "--tool", "memcheck", "--error-exitcode", "9", *this, "tiny"], 45.0)
        write(given.results, line)
        return int(line["status"] == "exit status 9")
    sections = [word for section in SECTIONS for word in ("--section", section)]
    for what, (tokens, skipped) in PROFILES.items():
        chosen = ["--kernel-name", "regex:_by_hand", "--launch-skip", skipped, "--launch-count", "1"]
        command = [tool, *sections, *chosen, *this, "decode", "--tokens", tokens]
        write(given.results, run(f"ncu, {what}", command, 40.0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
