"""Which tests execute a line of the library, in whichever process: `tools/mutants.py` chooses tests by it.

As a plugin of pytest (`-p tools.lines`), it imports `moe_mk` with a mark before every statement of a function. A mark
sets one byte of a file that is mapped into the process of the tests and, through `sitecustomize`, into every process
that these start. The bytes that a test has set are its lines. What runs at import is not recorded.
"""

import ast
import atexit
import builtins
import json
import math
import mmap
import os
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARKS = "MOE_MK_MARKS"
"""Environment variable of the recording processes: the file of the marks."""
OUTPUT = "MOE_MK_MARKS_OUTPUT"
"""And the one that receives the seconds and lines of each test."""
AS_THEY_ARE = ("kernels/triton/",)
"""Modules whose functions are compiled by others."""
SITE = f"import sys; sys.path.append({str(ROOT)!r}); from tools.lines import install; install()\n"


def first_lines(root: Path) -> dict[str, int]:
    """By source file, relative to the root: the mark of the line before its first one; the last entry is the end."""
    files = sorted((root / "moe_mk").rglob("*.py"))
    ends = accumulate((len(file.read_bytes().splitlines()) + 2 for file in files), initial=0)
    return dict(zip([file.relative_to(root).as_posix() for file in files] + [""], ends, strict=True))


def statement_line(text: str, line: int) -> int | None:
    """Where the innermost statement that contains a line begins; None outside functions."""
    inside, found = False, None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = inside or node.body[0].lineno <= line
            found = max(found or 0, node.lineno)
    return found if inside else None


def _marked(body: list[ast.stmt], first: int, *, inside: bool) -> list[ast.stmt]:
    """Statements with a mark before each one that is inside a function."""
    marked: list[ast.stmt] = []
    for at, statement in enumerate(body):
        is_docstring = at == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if inside and not is_docstring and not isinstance(statement, ast.Global | ast.Nonlocal):
            mark = ast.parse(f"__marks__[{first + statement.lineno}] = 1").body[0]
            marked.append(_at(mark, statement))
        marked.append(statement)
        within = inside or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            for name in ("body", "orelse", "finalbody"):
                if nested := getattr(part, name, None):
                    setattr(part, name, _marked(nested, first, inside=within))
    return marked


def _at(mark: ast.stmt, place: ast.stmt) -> ast.stmt:
    for node in ast.walk(mark):
        ast.copy_location(node, place)
    return mark


def install() -> None:
    """Import modules of `moe_mk` with marks from now on, if this process belongs to a recording."""
    if MARKS not in os.environ:
        return
    with open(os.environ[MARKS], "r+b") as file:
        builtins.__marks__ = mmap.mmap(file.fileno(), 0)  # type: ignore[attr-defined]
    firsts, plain = first_lines(ROOT), SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        path = Path(self.path).resolve()
        file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if file not in firsts or not file or any(part in file for part in AS_THEY_ARE):
            return plain(self, name)
        tree = ast.parse(path.read_bytes())
        tree.body = _marked(tree.body, firsts[file], inside=False)
        return compile(tree, str(path), "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


@dataclass
class _Recording:
    """What the plugin has of the tests so far."""

    output: Path
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)

    def begin(self) -> None:
        builtins.__marks__[:] = bytes(len(builtins.__marks__))  # type: ignore[attr-defined]

    def end(self, test: str) -> None:
        marks: bytes = builtins.__marks__[:]  # type: ignore[attr-defined]
        self.lines[test] = zlib.compress(marks).hex()


_recording: list[_Recording] = []


def _start() -> None:
    """Record this process and those that it starts; before anything of moe_mk is imported."""
    assert not any(name.split(".")[0] == "moe_mk" for name in sys.modules)
    folder = Path(tempfile.mkdtemp(prefix="moe-mk-marks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    (folder / "marks").write_bytes(bytes(first_lines(ROOT)[""]))
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {MARKS: str(folder / "marks"), "PYTHONPATH": os.pathsep.join(paths)}
    install()
    _recording.append(_Recording(Path(os.environ[OUTPUT])))


def pytest_runtest_logstart(nodeid: str) -> None:
    """As a plugin: what is marked from now on is of this test."""
    _recording[0].begin()


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin: add up the seconds of a test; one that fails or is skipped judges nothing."""
    seconds = report.duration if report.passed else math.inf
    _recording[0].seconds[report.nodeid] = _recording[0].seconds.get(report.nodeid, 0.0) + seconds


def pytest_runtest_logfinish(nodeid: str) -> None:
    """As a plugin: keep the lines of a test."""
    _recording[0].end(nodeid)


def pytest_sessionfinish() -> None:
    """As a plugin: write the tests that passed."""
    recording = _recording[0]
    passed = {test: s for test, s in recording.seconds.items() if s < math.inf and test in recording.lines}
    tests = {test: (round(seconds, 3), recording.lines[test]) for test, seconds in passed.items()}
    recording.output.write_text(json.dumps(tests), encoding="utf-8")


if OUTPUT in os.environ and MARKS not in os.environ:  # pytest imports plugins before the conftest files
    _start()
