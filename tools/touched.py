"""Print the marks of tests that CI must run beside `make test`, as an expression for `pytest -m`.

`thorough` is always among them; `emulated` and `network` are where their sources differ from the merge base with the
main branch, or where that cannot be determined.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASES = ("origin/main", "main")
SOURCES = {
    "emulated": (
        "moe_mk/lab/testing/emulated/",
        "moe_mk/external/deepep_limits.py",
        "moe_mk/comm/threads.py",
        "moe_mk/comm/communicator.py",
        "tests/testing/emulated/",
    ),
    "network": (
        "moe_mk/comm/network/",
        "moe_mk/comm/symmetric/",
        "moe_mk/comm/distributed.py",
        "moe_mk/comm/failure.py",
        "moe_mk/prepare_finalize/one_sided/",
        "tests/comm/network/",
        "tests/prepare_finalize/one_sided/",
        "tests/support/network",
    ),
}
"""The paths whose changes can break the tests of a mark; tests/conftest.py gives the marks."""
EVERYTHING = ("pyproject.toml", "constraints.txt", "tests/conftest.py", "tools/touched.py")
"""Changes to these run every mark."""


def changed_files(root: Path) -> list[str] | None:
    """Paths that differ from the merge base with the main branch, uncommitted ones too; None where there is no base."""
    for base in BASES:
        found = _git(root, "merge-base", "HEAD", base)
        if not found:
            continue
        fork = found[0]
        if [fork] == _git(root, "rev-parse", "HEAD"):  # on the main branch: what earlier runs tested is not known
            return None
        differing, untracked = (
            _git(root, "diff", "--name-only", fork),
            _git(root, "ls-files", "-o", "--exclude-standard"),
        )
        return None if differing is None or untracked is None else [*differing, *untracked]
    return None


def _git(root: Path, *words: str) -> list[str] | None:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[:-1]


def marks_for(changed: Iterable[str] | None) -> list[str]:
    """The marks to run for changed paths; all of them for None."""
    if changed is None:
        return ["thorough", *SOURCES]
    paths = list(changed)
    return [
        "thorough",
        *(mark for mark, own in SOURCES.items() if any(p.startswith((*own, *EVERYTHING)) for p in paths)),
    ]


def main() -> int:
    """Print the expression; returns the exit code."""
    print(" or ".join(marks_for(changed_files(ROOT))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
