"""Break the library in small ways, and see that the tests of each row fail.

python tools/mutants.py                    every mutant of tests/mutants.yaml, one line each, and the rate
python tools/mutants.py --rows 66 108      those of some rows
python tools/mutants.py --sample 20        a fixed part of them
python tools/mutants.py --workers 4        four at a time, each in a copy of the repository; two by default
python tools/mutants.py --check            that every mutant still applies; runs no test

A mutant replaces a text of one source file, which must be there exactly once. The tests that `@pytest.mark.row` names
for its row then run on a copy of the repository until one fails. A mutant whose tests all pass survives: the row is
proven by tests that would not notice. Exit code 1 if one survives, cannot be applied, or breaks collection instead of a
test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn
from zlib import crc32

import hypothesis
import pytest
import torch
import yaml

from tools.features import find_proofs, read_sections

ROOT = Path(__file__).resolve().parent.parent
LIST = Path("tests/mutants.yaml")
COPIED = ("moe_mk", "tests", "tools", "examples", "benchmarks", "docs", "pyproject.toml", "README.md", "configs")
LIMIT_S = 240.0
"""Seconds that the tests of a mutant may take. A slow test and one that hangs look the same, so neither counts."""
NOT_RUN = "not slow and not gpu"
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning")
OWN = ("moe_mk", "tests", "tools")
"""Packages that a process with a mutant imports from the copy."""
SHARED = (hypothesis, torch)
"""Imported once for all mutants, which takes longer than most of their tests."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file that the tests of a row must notice."""

    row: str
    name: str
    file: str
    old: str
    new: str
    tests: str = ""
    """Part of the path or name of the row's tests that are run; all of them by default."""

    def applied_to(self, text: str) -> str:
        """The text of the file with the change. Raises ValueError where the old text is not there exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"row {self.row}, {self.name}: {self.old!r} is {count} times in {self.file}, expected once"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What the tests of a row made of a mutant."""

    mutant: Mutant
    state: str
    """killed, survived, late: the time limit came first, or broken: no test ran, or tests could not be collected."""
    seconds: float
    detail: str = ""

    def line(self) -> str:
        """As it is printed."""
        shown = f"{self.state:<9} row {self.mutant.row:<5}{self.seconds:>6.1f} s  {self.mutant.name}"
        return f"{shown}\n{self.detail}" if self.detail else shown


def read_mutants(path: Path) -> list[Mutant]:
    """The mutants of a file, in its order."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Mutant(str(entry.pop("row")), **entry) for entry in content]


def chosen(mutants: Sequence[Mutant], rows: Sequence[str], sample: int | None) -> list[Mutant]:
    """Those of some rows, and of these a part that is the same on every machine and changes with no other mutant."""
    some = [mutant for mutant in mutants if not rows or mutant.row in rows]
    if sample is None:
        return some
    kept = set(sorted(some, key=lambda mutant: crc32(f"{mutant.row} {mutant.name}".encode()))[:sample])
    return [mutant for mutant in some if mutant in kept]


def problems_of(mutants: Sequence[Mutant], root: Path, tests: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Mutants that cannot be applied or whose row has no test that runs without a GPU."""
    for mutant in mutants:
        try:
            mutant.applied_to((root / mutant.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            yield str(problem)
        if not any(mutant.tests in test for test in tests.get(mutant.row, ())):
            yield f"row {mutant.row}, {mutant.name}: no test{' ' + mutant.tests if mutant.tests else ''} names the row"


def tests_of_rows(root: Path) -> dict[str, list[str]]:
    """By row: the tests that name it, as pytest takes them, without those that need a GPU."""
    known = {row for section in read_sections(root / "tests/rows.yaml") for row in section.rows}
    found = find_proofs(root, known)
    return {row: [f"{proof.path}::{proof.name}" for proof in proofs if not proof.gpu] for row, proofs in found.items()}


def run(mutant: Mutant, copy: Path, tests: Sequence[str]) -> Outcome:
    """Change the copy, run the tests of the row until one fails, and change it back."""
    file = copy / mutant.file
    original = file.read_text(encoding="utf-8")
    file.write_text(mutant.applied_to(original), encoding="utf-8")
    started = time.monotonic()
    try:
        code, printed = _pytest(copy, [test for test in tests if mutant.tests in test])
    finally:
        file.write_text(original, encoding="utf-8")
    state = {0: "survived", 1: "killed", None: "late"}.get(code, "broken")
    detail = "" if state == "killed" else "\n".join(f"    {line}" for line in printed.splitlines()[-8:])
    return Outcome(mutant, state, time.monotonic() - started, detail)


def _pytest(copy: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Exit code of pytest in the copy, None after the time limit, and what it printed.

    A forked process runs it, which has torch and pytest imported already, and nothing of the copy.
    """
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            _in_child(copy, tests, printed.fileno())
        code = _exit_code(child)
        printed.seek(0)
        return code, printed.read().decode(errors="replace")


def _in_child(copy: Path, tests: Sequence[str], output: int) -> NoReturn:
    code = 3
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
        code = int(pytest.main([*PYTEST, "-m", NOT_RUN, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _exit_code(child: int) -> int | None:
    """Wait for a process; None and its whole group killed after the time limit."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def copied(root: Path, into: Path) -> Path:
    """A copy of what the tests need, which mutants change."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy2(source, into / name)
    return into


def run_in_own_copy(root: Path, folder: Path, tests: Mapping[str, Sequence[str]], mutant: Mutant) -> Outcome:
    """Judge a mutant in the copy of this process, which the first one makes."""
    copy = folder / str(os.getpid())
    if not copy.exists():
        copy.mkdir()
        copied(root, copy)
    return run(mutant, copy, tests[mutant.row])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants and print the rate; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], help="only mutants of these rows")
    parser.add_argument("--sample", type=int, help="only as many, always the same ones")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="only whether every mutant can be applied")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    mutants = read_mutants(options.root / LIST)
    tests = tests_of_rows(options.root)
    if problems := list(problems_of(mutants, options.root, tests)):
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    if options.check:
        print(f"{len(mutants)} mutants of {len({mutant.row for mutant in mutants})} rows apply")
        return 0
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="moe-mk-mutants-") as folder:
        judge = partial(run_in_own_copy, options.root, Path(folder), tests)
        with get_context("fork").Pool(options.workers) as workers:  # they have torch and pytest already
            for outcome in workers.imap(judge, chosen(mutants, options.rows, options.sample)):
                outcomes.append(outcome)
                print(outcome.line(), flush=True)
    killed = sum(outcome.state == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} mutants killed" + (f", {killed / len(outcomes):.0%}" if outcomes else ""))
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
