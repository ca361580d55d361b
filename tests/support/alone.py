"""Measurements in a process of its own: what the allocator keeps from other tests is in none of its figures."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

NEEDS_PEAKS = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not count peaks of memory"
)


def alone(function: Callable[..., Any], *args: Any, first: Sequence[Any] | None = None) -> Any:
    """What a function gives in JSON in a new process, after one with `first`, if what libraries take once matters."""
    code = f"import json, sys; from {function.__module__} import {function.__name__} as measure\n"
    code += "print(json.dumps([measure(*args) for args in json.loads(sys.argv[1]) if args is not None][-1]))"
    command = [sys.executable, "-c", code, json.dumps([first, args], default=str)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def peak_above(call: Callable[[], object]) -> tuple[int, int]:
    """Bytes above the resident ones of before: at the peak during a call, and after it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins again
    before = status("VmRSS")
    kept = call()
    peak = status("VmHWM") - before
    gc.collect()
    after = status("VmRSS") - before
    del kept
    return peak, after


def status(field: str) -> int:
    """Bytes that /proc/self/status states."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
