"""Break the library in small ways, and see that the tests of each row fail.

python tools/mutants.py                    every mutant of tests/mutants.yaml, one line each, and the rate
python tools/mutants.py --rows 66 108      those of some rows
python tools/mutants.py --sample 20        a fixed part of them
python tools/mutants.py --workers 4        four at a time, each in a copy of the repository; two by default
python tools/mutants.py --check            that every mutant still applies; runs no test
python tools/mutants.py --random 60 --seed 3 --rooms quant weights    changes made by machine, in these rooms

A mutant replaces a text of one source file, which must be there exactly once. The tests that `@pytest.mark.row` names
for its row then run on a copy of the repository until one fails. A mutant whose tests all pass survives: the row is
proven by tests that would not notice. Exit code 1 if one survives, cannot be applied, or breaks collection instead of a
test.

`--random` changes comparisons, numbers, operators, guards, conversions and calls of a room. The quick tests run once
under coverage.py (`pip install coverage`), which build/mutants records: a change is judged by the fastest tests that
execute its line, one case of every test first. A test that fails or hangs, or an import that fails, kills it; a change
of a line that no test executes is `uncovered`.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import accumulate
from multiprocessing import get_context
from operator import itemgetter
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
ROOMS = (
    "layer", "router", "runner", "prepare_finalize", "comm", "experts", "kernels/native", "kernels/reference", "quant",
    "weights", "placement", "rebalance", "oracle",
)  # fmt: skip
"""Packages of which `--random` takes changes."""
RANDOM_LIMIT_S = 60.0
"""Seconds that the tests of a change made by machine may take; one that hangs is noticed."""
LIMIT_S = 240.0
"""Seconds that the tests of a mutant may take. A slow test and one that hangs look the same, so neither counts."""
NOT_RUN = "not slow and not gpu"
QUICK = f"{NOT_RUN} and not thorough and not emulated and not network"
RECORD = Path("build/mutants")
"""Folder of the record of lines and tests; remove it after changes of the code."""
SECONDS = "MUTANTS_SECONDS"
"""Environment variable of the recording process: the file that receives the seconds of each test."""
TESTS, TESTS_S = 60, 20.0
"""Tests that judge a change made by machine, and their seconds."""
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning")
OWN = ("moe_mk", "tests", "tools")
"""Packages that a process with a mutant imports from the copy."""
SHARED = (hypothesis, torch)
"""Imported once for all mutants, which takes longer than most of their tests."""


_seconds: dict[str, float] = {}


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
    offset: int | None = None
    """Where the old text begins, for one that may be in the file more than once."""

    def applied_to(self, text: str) -> str:
        """The text of the file with the change. Raises ValueError where the old text is not there exactly once."""
        if self.offset is not None:
            return text[: self.offset] + self.new + text[self.offset + len(self.old) :]
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
        where = f"row {self.mutant.row}" if self.mutant.offset is None else self.mutant.row
        shown = f"{self.state:<9} {where:<9}{self.seconds:>6.1f} s  {self.mutant.name}"
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


OPERATORS: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}
CONVERSIONS = ("contiguous", "clone", "clamp", "clamp_", "clamp_min", "clamp_max", "nan_to_num", "abs", "float", "copy")
"""Methods whose call is left out."""


LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
NOT_CODE = ("annotation", "returns", "decorator_list", "bases", "keywords")
Change = tuple[ast.AST, str]
"""A node and the text that replaces it."""


def changes_of(node: ast.AST) -> Iterator[Change]:
    """The changes of a node and of all below it, without annotations, decorators, assertions and what is raised."""
    if isinstance(node, LEFT_ALONE):
        return
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield from ((node.test, text) for text in ("False", "True") if not isinstance(node.test, ast.Constant))
    yield from ((node, text) for text in _replacements(node))
    for name, value in ast.iter_fields(node):
        if name not in NOT_CODE or isinstance(node, ast.Call):
            for child in value if isinstance(value, list) else [value]:
                yield from changes_of(child) if isinstance(child, ast.AST) else ()


def _replacements(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield _with(node, ops=[*ops[:at], OPERATORS[type(op)](), *ops[at + 1 :]])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in OPERATORS:
            yield _with(node, op=OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() as value):
            yield str(value + 1)
        case ast.Constant(value=float() as value):
            yield repr(2.0 * value if value else 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield _with(node, func=ast.Name(NAMES[name]))
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in NAMES:
            yield _with(node, func=ast.Attribute(value, NAMES[name]))
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in CONVERSIONS:
            yield f"({ast.unparse(value)})"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"


def _with(node: ast.AST, **fields: object) -> str:
    old = {name: getattr(node, name) for name in node._fields}
    return f"({ast.unparse(type(node)(**old | fields))})"


def changed_at_random(root: Path, rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """As many changes of each room, one a line; one of them is independent of changes elsewhere in the code."""
    picked: list[Mutant] = []
    for at, room in enumerate(rooms):
        lines: dict[tuple[str, str], tuple[int, Mutant]] = {}
        for path in sorted((root / "moe_mk" / room).rglob("*.py")):
            file, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
            starts = list(accumulate(map(len, text.splitlines(keepends=True)), initial=0))
            for node, new in changes_of(ast.parse(text)):
                assert isinstance(node, ast.expr | ast.stmt)
                old, line = ast.get_source_segment(text, node), text.splitlines()[node.lineno - 1]
                assert old is not None
                offset = starts[node.lineno - 1] + len(line.encode()[: node.col_offset].decode())
                mutant = Mutant(room, f"{file}:{node.lineno}: {line.strip()}  ->  {new}", file, old, new, offset=offset)
                order = crc32(f"{seed} {file} {line} {old} {new}".encode())
                lines[file, line] = min(lines.get((file, line), (order, mutant)), (order, mutant), key=itemgetter(0))
        share = (at + 1) * count // len(rooms) - at * count // len(rooms)
        picked += [mutant for _, mutant in sorted(lines.values(), key=itemgetter(0))[:share]]
    return picked


class Record:
    """Which quick tests execute a line, and how long they take; as coverage.py has written it."""

    def __init__(self, root: Path) -> None:
        folder = root / RECORD
        if not (folder / "seconds.json").is_file():
            _record(root, folder)
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
        self._lines = sqlite3.connect(folder / "lines.db")

    def tests_of(self, mutant: Mutant, root: Path) -> list[str]:
        """The tests that judge a change, those of its module first, then the fastest; empty where none executes it.

        What runs at import is judged by tests that execute anything of the file. Processes that tests start are not
        recorded: a line that only they execute is judged by the tests named after its module.
        """
        assert mutant.offset is not None
        text = (root / mutant.file).read_text(encoding="utf-8")
        first = text.count("\n", 0, mutant.offset) + 1
        lines = range(first, first + mutant.old.count("\n") + 1)
        found = self._lines.execute(
            "select context, numbits from line_bits join context on context.id = context_id "
            "join file on file.id = file_id where path like ?", (f"%/{mutant.file}",),
        ).fetchall()  # fmt: skip
        executed = {test for test, bits in found if any(_has(bits, line) for line in lines)}
        named = f"/test_{Path(mutant.file).stem}"
        if executed == {""}:
            executed = {test for test, _ in found}
        elif not executed:
            executed = {test for test in self.seconds if named in test}
        seen: Counter[str] = Counter()
        cases: list[tuple[int, bool, bool, float, str]] = []
        for test in sorted(executed & self.seconds.keys(), key=self.seconds.__getitem__):
            function = test.split("[")[0]
            seen[function] += 1
            room = test.startswith(f"tests/{mutant.row}/")
            cases.append((seen[function], named not in test, not room, self.seconds[test], test))
        tests = [test for *_, test in sorted(cases)]  # one case of every function, then another one
        spent = accumulate(self.seconds[test] for test in tests)
        return [test for at, (test, until) in enumerate(zip(tests, spent, strict=True)) if at < 3 or until < TESTS_S][
            :TESTS
        ]


def _has(numbits: bytes, line: int) -> bool:
    return line // 8 < len(numbits) and bool(numbits[line // 8] >> line % 8 & 1)


def _record(root: Path, folder: Path) -> None:
    """Run the quick tests under coverage.py, which takes about ten minutes, and write what `Record` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "coverage", "run", "--source=moe_mk", f"--data-file={folder / 'lines.db'}"]
    tests = ["-m", "pytest", "-q", "-p", "tools.mutants", "-m", QUICK, "tests"]
    settings = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", SECONDS: str(folder / "seconds.json")}
    subprocess.run([*command, *tests], cwd=root, env=os.environ | settings, check=False)


def pytest_runtest_logstart(nodeid: str) -> None:
    """As a plugin of pytest under coverage.py: what runs from now on is of this test."""
    if SECONDS in os.environ:
        import_module("coverage").Coverage.current().switch_context(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """As a plugin: add up the seconds of a test."""
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + (report.duration if report.passed else math.inf)


def pytest_sessionfinish() -> None:
    """As a plugin: write the seconds of the tests that passed."""
    if SECONDS in os.environ:
        passed = {test: seconds for test, seconds in _seconds.items() if seconds < math.inf}
        Path(os.environ[SECONDS]).write_text(json.dumps(passed), encoding="utf-8")


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


def run(mutant: Mutant, copy: Path, tests: Sequence[str], limit_s: float = LIMIT_S) -> Outcome:
    """Change the copy, run the tests of the row until one fails, and change it back."""
    file = copy / mutant.file
    original = file.read_text(encoding="utf-8")
    file.write_text(mutant.applied_to(original), encoding="utf-8")
    started = time.monotonic()
    try:
        code, printed = _pytest(copy, [test for test in tests if mutant.tests in test], limit_s)
    finally:
        file.write_text(original, encoding="utf-8")
    state = {0: "survived", 1: "killed", None: "late"}.get(code, "broken")
    detail = "" if state == "killed" else "\n".join(f"    {line}" for line in printed.splitlines()[-8:])
    return Outcome(mutant, state, time.monotonic() - started, detail)


def _pytest(copy: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit code of pytest in the copy, None after the time limit, and what it printed.

    A forked process runs it, which has torch and pytest imported already, and nothing of the copy.
    """
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            _in_child(copy, tests, printed.fileno())
        code = _exit_code(child, limit_s)
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


def _exit_code(child: int, limit_s: float) -> int | None:
    """Wait for a process; None and its whole group killed after the time limit."""
    ends = time.monotonic() + limit_s
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


def run_in_own_copy(root: Path, folder: Path, work: tuple[Mutant, Sequence[str]]) -> Outcome:
    """Judge a mutant by its tests in the copy of this process, which the first one makes."""
    mutant, tests = work
    copy = folder / str(os.getpid())
    if not copy.exists():
        copy.mkdir()
        copied(root, copy)
    if mutant.offset is None:
        return run(mutant, copy, tests)
    if not tests:
        return Outcome(mutant, "uncovered", 0.0)
    outcome = run(mutant, copy, tests, RANDOM_LIMIT_S)
    return replace(outcome, state="survived" if outcome.state == "survived" else "killed", detail="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants and print the rate; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], help="only mutants of these rows")
    parser.add_argument("--sample", type=int, help="only as many, always the same ones")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="only whether every mutant can be applied")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    parser.add_argument("--random", type=int, metavar="N", help="changes made by machine instead of the list")
    parser.add_argument("--seed", type=int, default=0, help="of the changes made by machine")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help="packages of moe_mk that they change, equally often")
    options = parser.parse_args(arguments)
    if options.random is not None:
        record = Record(options.root)
        changes = changed_at_random(options.root, options.rooms, options.random, options.seed)
        work = [(mutant, record.tests_of(mutant, options.root)) for mutant in changes]
    else:
        mutants = read_mutants(options.root / LIST)
        tests = tests_of_rows(options.root)
        if problems := list(problems_of(mutants, options.root, tests)):
            print(*problems, sep="\n", file=sys.stderr)
            return 1
        if options.check:
            print(f"{len(mutants)} mutants of {len({mutant.row for mutant in mutants})} rows apply")
            return 0
        work = [(mutant, tests[mutant.row]) for mutant in chosen(mutants, options.rows, options.sample)]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="moe-mk-mutants-") as folder:
        judge = partial(run_in_own_copy, options.root, Path(folder))
        with get_context("fork").Pool(options.workers) as workers:  # they have torch and pytest already
            for outcome in workers.imap(judge, work):
                outcomes.append(outcome)
                print(outcome.line(), flush=True)
    killed = sum(outcome.state == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} mutants killed" + (f", {killed / len(outcomes):.0%}" if outcomes else ""))
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
