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

`--random` changes comparisons, numbers, operators, guards, conversions, calls, keys and errors of a room. Which lines
quick tests execute, in whichever process, is recorded once (build/mutants.json); `--record tests/quant` adds those of
all its cases. A change is judged by the fastest tests that execute its line, one case of every test first. A test that
fails or hangs, or an import that fails, kills it. `tests/equivalent.yaml` has those that change nothing, with the
reason: they are left out of the sample.
"""

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

import hypothesis
import pytest
import torch
import yaml

from tools.features import find_proofs, read_sections
from tools.lines import AS_THEY_ARE, OUTPUT, mark_of, statement_line
from tools.mutants_python import changes_of

ROOT = Path(__file__).resolve().parent.parent
LIST = Path("tests/mutants.yaml")
EQUIVALENT = Path("tests/equivalent.yaml")
COPIED = "moe_mk contrib tests tools examples benchmarks docs pyproject.toml README.md configs".split()
ROOMS = (
    "layer", "router", "runner", "prepare_finalize", "comm", "experts", "kernels/native", "kernels/reference",
    "kernels/triton", "quant", "weights", "placement", "rebalance", "oracle", "config",
)  # fmt: skip
"""Packages of which `--random` takes changes."""
RANDOM_LIMIT_S = 120.0
"""Seconds that the tests of a change made by machine may take; one that hangs is noticed."""
LIMIT_S = 240.0
"""Seconds that the tests of a mutant may take. A slow test and one that hangs look the same, so neither counts."""
NOT_RUN = "not stress and not gpu"
QUICK = f"{NOT_RUN} and not slow"
RECORD = Path("build/mutants.json")
"""The recording: seconds and executed lines of each test."""
AT_IMPORT = "tests/architecture/test_defaults"
"""Tests of what runs at import, of any file."""
TESTS, TESTS_S = 400, 25.0
"""Tests that judge a change made by machine, and their seconds."""
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning")
OWN = ("moe_mk", "moe_mk_contrib", "contrib", "tests", "tools")
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
    """killed, survived, crashed: by a signal, late: at the time limit, lost: a test is not there, broken: none ran."""
    seconds: float
    detail: str = ""

    def line(self) -> str:
        where = f"row {self.mutant.row}" if self.mutant.offset is None else self.mutant.row
        shown = f"{self.state:<9} {where:<9}{self.seconds:>6.1f} s  {self.mutant.name}"
        return f"{shown}\n{self.detail}" if self.detail else shown


def read_mutants(path: Path) -> list[Mutant]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Mutant(str(entry.pop("row")), **entry) for entry in content]


def chosen(mutants: Sequence[Mutant], rows: Sequence[str], sample: int | None) -> list[Mutant]:
    """Those of some rows, and of these a part that is the same on every machine and changes with no other mutant."""
    some = [mutant for mutant in mutants if not rows or mutant.row in rows]
    if sample is None:
        return some
    kept = set(sorted(some, key=lambda mutant: zlib.crc32(f"{mutant.row} {mutant.name}".encode()))[:sample])
    return [mutant for mutant in some if mutant in kept]


def changed_at_random(root: Path, rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """As many changes of each room, one a line; one of them is independent of changes elsewhere in the code."""
    picked: list[Mutant] = []
    same = {(entry["file"], entry["line"], entry["new"]) for entry in equivalent(root)}
    for at, room in enumerate(rooms):
        lines: dict[tuple[str, str], tuple[int, Mutant]] = {}
        for path in sorted((root / "moe_mk" / room).rglob("*.py")):
            file, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
            source = text.splitlines()
            starts = list(accumulate((len(line) + 1 for line in source), initial=0))
            for node, new in changes_of(ast.parse(text)):
                assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset
                ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
                offset, end = (starts[n - 1] + len(source[n - 1].encode()[:at].decode()) for n, at in ends)
                line, old = source[node.lineno - 1], text[offset:end]
                if (file, line.strip(), new) in same:
                    continue
                mutant = Mutant(room, f"{file}:{node.lineno}: {line.strip()}  ->  {new}", file, old, new, offset=offset)
                order = zlib.crc32(f"{seed} {file} {line} {old} {new}".encode())
                lines[file, line] = min(lines.get((file, line), (order, mutant)), (order, mutant), key=itemgetter(0))
        share = (at + 1) * count // len(rooms) - at * count // len(rooms)
        picked += [mutant for _, mutant in sorted(lines.values(), key=itemgetter(0))[:share]]
    return picked


def equivalent(root: Path) -> list[dict[str, str]]:
    """Changes that no test can notice: the file, its line, the text that replaces a part of it, and why."""
    file = root / EQUIVALENT
    return yaml.safe_load(file.read_text(encoding="utf-8")) or [] if file.is_file() else []


class Record:
    """Which quick tests execute a line, in whichever process, and how long they take, as tools/lines.py records it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / RECORD).is_file():
            record(root, ["tests"])
        found: dict[str, tuple[float, str]] = json.loads((root / RECORD).read_text(encoding="utf-8"))
        self._marks = {test: marks for test, (_, marks) in found.items() if _is_there(root, test)}
        self.seconds = {test: found[test][0] for test in self._marks}

    def tests_of(self, mutants: Sequence[Mutant]) -> list[list[str]]:
        """The tests that judge each change, those of its module first, then the fastest."""
        asked = [self._marks_of(mutant) for mutant in mutants]
        found: list[set[str]] = [set() for _ in mutants]
        for test, packed in self._marks.items():
            marks = zlib.decompress(bytes.fromhex(packed))
            for at, places in enumerate(asked):
                if any(marks[place] for place in places):
                    found[at].add(test)
        at_import = {test for test in self.seconds if test.startswith(AT_IMPORT)}
        found = [tests | at_import if len(places) != 1 else tests for tests, places in zip(found, asked, strict=True)]
        return [self._chosen(*work) for work in zip(mutants, found, strict=True)]

    def _marks_of(self, mutant: Mutant) -> list[int]:
        """The mark of the line of a change; of one that is in no function, those of all lines of its file."""
        file = self.root / mutant.file
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        lines = text.splitlines()
        line = statement_line(text, text.count("\n", 0, mutant.offset) + 1)
        return [mark_of(mutant.file, each) for each in (lines if line is None else lines[line - 1 : line])]

    def _chosen(self, mutant: Mutant, executing: set[str]) -> list[str]:
        """Those that execute its line, or the file if it runs at import; else those named after the module."""
        named, room = f"/test_{Path(mutant.file).stem}", f"tests/{mutant.row}/"
        sought = "triton" if any(part in room for part in AS_THEY_ARE) else ""  # which no mark finds
        tests = {test for test in self.seconds if (sought or named) in test} if sought or not executing else executing
        seen: Counter[str] = Counter()
        cases: list[tuple[int, bool, bool, float, str]] = []
        for test in sorted(tests, key=self.seconds.__getitem__):
            function = test.split("[")[0]
            seen[function] += 1
            is_named, is_of_room = named in test or test.startswith(AT_IMPORT), test.startswith(room)
            turn = 0 if is_named else seen[function] // 4 if is_of_room else seen[function]
            cases.append((turn, not is_named, not is_of_room, self.seconds[test], test))
        order = [test for *_, test in sorted(cases)]  # all cases of the module's, some of the room's, one of others
        spent = accumulate(self.seconds[test] / (10 if sought else 1) for test in order)
        kept = [test for at, (test, until) in enumerate(zip(order, spent, strict=True)) if at < 3 or until < TESTS_S]
        return kept[:TESTS]


@cache
def _text_of_tests(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _is_there(root: Path, test: str) -> bool:
    """Whether a recorded test still exists: pytest runs nothing if one of its names is unknown."""
    file, *_, function = test.split("[")[0].split("::")
    return f"def {function}(" in _text_of_tests(root / file)


def record(root: Path, tests: Sequence[str]) -> None:
    """Run quick tests with marks in a copy, which takes as long as without, and keep their lines."""
    known = json.loads((root / RECORD).read_text(encoding="utf-8")) if (root / RECORD).is_file() else {}
    with tempfile.TemporaryDirectory(prefix="moe-mk-record-") as name:
        copy, output = copied(root, Path(name)), Path(name) / "recorded.json"
        marks = QUICK if tests == ["tests"] else NOT_RUN
        command = [sys.executable, "-m", "pytest", *PYTEST[1:], "-p", "tools.lines", "-m", marks, *tests]
        settings = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", OUTPUT: str(output)}
        subprocess.run(command, cwd=copy, env=os.environ | settings, check=False)
        known |= json.loads(output.read_text(encoding="utf-8"))
    (root / RECORD).parent.mkdir(exist_ok=True)
    (root / RECORD).write_text(json.dumps(known), encoding="utf-8")


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
    """By row: the tests that name it, as pytest takes them, without those that need a GPU.

    Contrib repeats tests of the core with cases of its own, in files of the same names (`with_cases`).
    """
    known = {row for rows in read_sections(root / "tests/rows.yaml").values() for row in rows}
    found = find_proofs(root, known)
    contrib = {path.name: path for path in (root / "contrib" / "moe_mk_contrib" / "tests").glob("test_*.py")}

    def tests_of(path: str, name: str) -> Iterator[str]:
        yield f"{path}::{name}"
        again = contrib.get(Path(path).name)
        if again is not None and f"\n{name} = with_cases(" in again.read_text(encoding="utf-8"):
            yield f"{again.relative_to(root)}::{name}"

    return {
        row: [test for proof in proofs if not proof.gpu for test in tests_of(str(proof.path), proof.name)]
        for row, proofs in found.items()
    }


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
    state = {0: "survived", 1: "killed", None: "late"}.get(code) or (
        "crashed" if code is not None and code < 0 else "lost" if "not found: " in printed else "broken"
    )
    detail = "" if state == "killed" else "\n".join(f"    {line}" for line in printed.splitlines()[-8:])
    return Outcome(mutant, state, time.monotonic() - started, detail)


def _pytest(copy: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit code of pytest in the copy, None after the time limit, and what it printed.

    A forked process runs it, which has torch and pytest imported already, and nothing of the copy.
    """
    with tempfile.TemporaryFile() as printed:
        child = get_context("fork").Process(target=_in_child, args=(copy, tests, printed.fileno()))
        child.start()
        child.join(limit_s)
        code = child.exitcode
        with suppress(ProcessLookupError):  # a server of forks outlives the tests that used it
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        printed.seek(0)
        return code, printed.read().decode(errors="replace")


class _InOrder:
    """A plugin that runs tests as they are listed, those of a file together: their processes start once."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._place = {test: at for at, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        of_file: dict[str, int] = {}
        for test, at in self._place.items():
            of_file.setdefault(test.split("::")[0], at)
        last = len(self._place)
        items.sort(key=lambda item: (of_file.get(item.nodeid.split("::")[0], last), self._place.get(item.nodeid, last)))


def _in_child(copy: Path, tests: Sequence[str], output: int) -> NoReturn:
    code = 3
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
            del sys.modules[name]
        contrib = ROOT / "contrib" / "moe_mk_contrib"
        own = [str(copy / contrib.relative_to(ROOT)), str(copy)]
        os.environ |= {"PYTHONPATH": ":".join(own), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        sys.path[:] = [*own, *(p for p in sys.path if p and Path(p).resolve() not in (ROOT, contrib))]
        code = int(pytest.main([*PYTEST, "-m", NOT_RUN, *tests], plugins=[_InOrder(tests)]))
    finally:
        sys.stdout.flush()
        os._exit(code)


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
        copied(root, copy)
    if mutant.offset is None:
        return run(mutant, copy, tests)
    if not tests:
        return Outcome(mutant, "uncovered", 0.0)
    outcome = run(mutant, copy, tests, RANDOM_LIMIT_S * (5 if "triton" in mutant.row else 1))
    return replace(outcome, state=outcome.state if outcome.state in ("survived", "lost") else "killed", detail="")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], help="only mutants of these rows")
    parser.add_argument("--sample", type=int, help="only as many, always the same ones")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="only whether every mutant can be applied")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    parser.add_argument("--random", type=int, metavar="N", help="changes made by machine instead of the list")
    parser.add_argument("--seed", type=int, default=0, help="of the changes made by machine")
    parser.add_argument("--record", nargs="+", metavar="PATH", help="record the lines of these tests anew, no mutants")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help="packages of moe_mk that they change, equally often")
    options = parser.parse_args(arguments)
    if options.record:
        record(options.root, options.record)
        return 0
    if options.random is not None:
        changes = changed_at_random(options.root, options.rooms, options.random, options.seed)
        work = list(zip(changes, Record(options.root).tests_of(changes), strict=True))
    else:
        mutants = read_mutants(options.root / LIST)
        tests = tests_of_rows(options.root)
        if problems := list(problems_of(mutants, options.root, tests)):
            print(*problems, sep="\n", file=sys.stderr)
            return 1
        if options.check:
            for entry in equivalent(options.root):
                if entry["line"] not in (options.root / entry["file"]).read_text(encoding="utf-8"):
                    print(f"{EQUIVALENT}: {entry['file']} has no line {entry['line']!r} any more; remove the entry")
            print(f"{len(mutants)} mutants of {len({mutant.row for mutant in mutants})} rows apply")
            return 0
        work = [(mutant, tests[mutant.row]) for mutant in chosen(mutants, options.rows, options.sample)]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="moe-mk-mutants-") as folder:
        judge = partial(run_in_own_copy, options.root, Path(folder))
        with ProcessPoolExecutor(options.workers, get_context("fork")) as workers:  # with torch and pytest already
            for outcome in workers.map(judge, work):
                outcomes.append(outcome)
                print(outcome.line(), flush=True)
    killed = sum(outcome.state == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} mutants killed" + (f", {killed / len(outcomes):.0%}" if outcomes else ""))
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
