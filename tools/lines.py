"""Which tests execute a line of the library, in whichever process: `tools/mutants.py` chooses tests by it.

As a plugin of pytest (`-p tools.lines`), it imports `moe_mk` with a mark before every statement of a function. A mark
sets one byte of a file that is mapped into the process of the tests and, through `sitecustomize`, into every process
that these start. The number of a mark follows from the file and the text of its line, which may move: the bytes that a
test has set are its lines. What runs at import is not recorded.
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
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARKS = "MOE_MK_MARKS"
"""Environment variable of the recording processes: the file of the marks."""
OUTPUT = "MOE_MK_MARKS_OUTPUT"
"""And the one that receives the seconds and lines of each test."""
NUM_MARKS = 1 << 20
AS_THEY_ARE = ("kernels/triton/",)
"""Modules whose functions are compiled by others."""
SITE = f"import sys; sys.path.append({str(ROOT)!r}); from tools.lines import install; install()\n"


def mark_of(file: str, line: str) -> int:
    """The mark of a line of a source file, relative to the root. Few lines share one."""
    return zlib.crc32(f"{file} {line.strip()}".encode()) % NUM_MARKS


def statement_line(text: str, line: int) -> int | None:
    """Where the innermost statement that contains a line begins; None outside functions."""
    inside, found = False, None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = inside or node.body[0].lineno <= line
            found = max(found or 0, node.lineno)
    return found if inside else None


def _marked(body: list[ast.stmt], marks: list[int], *, inside: bool) -> list[ast.stmt]:
    """Statements with a mark before each one that is inside a function. marks: of the lines of the source."""
    marked: list[ast.stmt] = []
    for at, statement in enumerate(body):
        is_docstring = at == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if inside and not is_docstring and not isinstance(statement, ast.Global | ast.Nonlocal):
            mark = ast.parse(f"__marks__[{marks[statement.lineno - 1]}] = 1").body[0]
            for node in ast.walk(mark):
                ast.copy_location(node, statement)
            marked.append(mark)
        marked.append(statement)
        within = inside or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            for name in ("body", "orelse", "finalbody"):
                if nested := getattr(part, name, None):
                    setattr(part, name, _marked(nested, marks, inside=within))
    return marked


def install() -> None:
    """Import modules of `moe_mk` with marks from now on, if this process belongs to a recording."""
    if MARKS not in os.environ:
        return
    with open(os.environ[MARKS], "r+b") as file:
        builtins.__marks__ = mmap.mmap(file.fileno(), 0)  # type: ignore[attr-defined]
    package, plain = ROOT / "moe_mk", SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        path = Path(self.path).resolve()
        if not path.is_relative_to(package) or any(part in path.as_posix() for part in AS_THEY_ARE):
            return plain(self, name)
        text = path.read_text(encoding="utf-8")
        tree, file = ast.parse(text), path.relative_to(ROOT).as_posix()
        tree.body = _marked(tree.body, [mark_of(file, line) for line in text.splitlines()], inside=False)
        return compile(tree, str(path), "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


class Recording:
    """A plugin of pytest that writes the seconds and lines of the tests that passed."""

    def __init__(self, output: Path) -> None:
        self.output, self.seconds, self.lines = output, dict[str, float](), dict[str, str]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        builtins.__marks__[:] = bytes(NUM_MARKS)  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: Any) -> None:
        seconds = report.duration if report.passed else math.inf  # one that fails or is skipped judges nothing
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + seconds

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.lines[nodeid] = zlib.compress(builtins.__marks__[:], 1).hex()  # type: ignore[attr-defined]

    def pytest_sessionfinish(self) -> None:
        passed = {test: seconds for test, seconds in self.seconds.items() if seconds < math.inf}
        tests = {test: (round(seconds, 3), self.lines[test]) for test, seconds in passed.items() if test in self.lines}
        self.output.write_text(json.dumps(tests), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    """As a plugin: record this process and those that it starts, before anything of moe_mk is imported."""
    assert not any(name.split(".")[0] == "moe_mk" for name in sys.modules)
    folder = Path(tempfile.mkdtemp(prefix="moe-mk-marks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    (folder / "marks").write_bytes(bytes(NUM_MARKS))
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {MARKS: str(folder / "marks"), "PYTHONPATH": os.pathsep.join(paths)}
    install()
    config.pluginmanager.register(Recording(Path(os.environ[OUTPUT])))
