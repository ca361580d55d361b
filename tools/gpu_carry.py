"""Bring wheels to where there is no network: what the GPU queue needs beside torch and triton, at the pinned versions.

    python tools/gpu_carry.py            then take the tree, with .peers/whl, to the machine with the GPU: make gpu
    python tools/gpu_carry.py --peers    and DeepGEMM, to be measured against

torch, triton and numpy are the machine's own. Nothing of this is committed: git ignores `.peers`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "annotated-doc annotated-types click execnet hypothesis iniconfig markdown-it-py mdurl packaging pluggy pydantic "
    "pydantic_core Pygments pytest pytest-timeout pytest-xdist PyYAML rich safetensors scipy shellingham "
    "sortedcontainers typer typing-inspection typing_extensions"
).split()
"""The library's own requirements and those of its tests, with all that they need in turn."""
PEERS = ("sgl-deep-gemm==0.1.5.post1", "apache-tvm-ffi==0.1.11")
"""The newest that link against torch 2.11."""


def pinned(names: Sequence[str], constraints: str) -> list[str]:
    """Requirements at the versions that continuous integration installs. Raises KeyError for a name without one."""
    versions = dict(line.split("==") for line in constraints.splitlines() if "==" in line and not line.startswith("#"))
    return [f"{name}=={versions[name]}" for name in names]


def command(requirements: Sequence[str], folder: Path, python: str) -> list[str]:
    """The pip command that fetches wheels for another machine."""
    target = ["--python-version", python, "--only-binary=:all:", "--platform", "manylinux_2_28_x86_64"]
    older = ["--platform", "manylinux_2_17_x86_64", "--platform", "manylinux2014_x86_64"]
    return [sys.executable, "-m", "pip", "download", "--no-deps", *target, *older, "-d", str(folder), *requirements]


def main(arguments: Sequence[str] | None = None) -> int:
    """Download into .peers/whl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers" / "whl")
    parser.add_argument("--peers", action="store_true", help="DeepGEMM as well")
    parser.add_argument("--dry-run", action="store_true", help="print the command")
    given = parser.parse_args(arguments)
    wanted = pinned(NEEDED, (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    fetch = command([*wanted, *(PEERS if given.peers else ())], given.folder, given.python)
    if given.dry_run:
        sys.stdout.write(" ".join(fetch) + "\n")
        return 0
    given.folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(fetch, check=False, timeout=900).returncode


if __name__ == "__main__":
    sys.exit(main())
