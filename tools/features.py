"""Write docs/capabilities.md: what the system should do, which tests prove that it does, and how they ended.

The rows come from tests/rows.yaml, the proofs from `@pytest.mark.row(...)` in tests/, found by reading the source, so
that nothing needs to be imported or run. How a proof ended comes from tests/results.yaml, which keeps what junit files
of test runs state: `make test` and `make test-all` leave them in build/junit, and `make features` takes them over.

python tools/features.py                                 write the page; results of build/junit are recorded first
python tools/features.py --results gpu.xml --machine H100    record what ran elsewhere
python tools/features.py --check                         write nothing, fail where the page is stale
python tools/features.py --check --results build/junit   also fail where this run contradicts the page

A run contradicts the page where a proof that the page states as passed fails, is skipped though it passed on this kind
of machine, or is missing although neither its marks nor its folder leave it out.
"""

from __future__ import annotations

import argparse
import ast
import platform
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

import yaml

from tools.pages import write_or_compare

SHOWN = 3
ROOT = Path(__file__).resolve().parent.parent
NEVER_PROVES = {"skip", "xfail"}
NEEDS_GPU = {"gpu"}
NO_GPU = "needs a CUDA device"
"""The reason for which tests/conftest.py skips a test marked `gpu`."""
HAS_IT = re.compile(r"(\S+) is not installed: make \1 has it")
"""The reason of a test that another target runs, in an environment of its own."""
CPU_KINDS = {
    "amx_tile": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
"""By flag of /proc/cpuinfo, the best first."""
RESULTS = Path("tests/results.yaml")
JUNIT = Path("build/junit")
HEADER = (
    "# How the proofs of tests/rows.yaml ended, by machine; written by `make features` from junit files. Do not edit.\n"
)
TestNode = ast.FunctionDef | ast.AsyncFunctionDef


class MarkError(Exception):
    """A mark that names no known row, or that belongs to no test; one line per mark."""


@dataclass(frozen=True, order=True)
class Proof:
    """One test that proves a row, as a path relative to the repository and a qualified name."""

    path: str
    name: str
    gpu: bool = False
    """It needs a GPU."""
    stress: bool = False
    """Only `make stress` runs it."""

    @property
    def test(self) -> str:
        """As pytest takes it."""
        return f"{self.path}::{self.name}"


@dataclass(frozen=True)
class Result:
    """How the cases of one test ended on one machine."""

    passed: int = 0
    failed: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Cases by the reason for which they were skipped."""

    def __add__(self, other: Result) -> Result:
        skipped = Counter(self.skipped) + Counter(other.skipped)
        return Result(self.passed + other.passed, self.failed + other.failed, dict(sorted(skipped.items())))

    def proves(self, proof: Proof) -> bool:
        """Whether cases passed and none failed; a test that needs a GPU is not proven by a run without one."""
        return self.passed > 0 and not self.failed and not (proof.gpu and NO_GPU in self.skipped)


Results = Mapping[str, Mapping[str, Result]]
"""By test and machine."""


@dataclass(frozen=True)
class Mark:
    """One use of `pytest.mark.NAME` in the source, with its arguments where it is called."""

    name: str
    node: ast.expr
    args: Sequence[ast.expr]


@dataclass(frozen=True)
class Claim:
    """A test, or a single case of it, with its row marks and the names of all marks that hold for it."""

    test: str
    rows: Sequence[Mark]
    names: frozenset[str]


def read_sections(path: Path) -> dict[str, dict[str, str]]:
    """By title, in the order of the file: rows by id, with what the system should do."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {entry["title"]: dict(entry["rows"]) for entry in content["sections"]}


def find_proofs(root: Path, known: set[str]) -> dict[str, list[Proof]]:
    """Find every row mark in the tests; raises MarkError with all that are wrong, each with file and line."""
    proofs: dict[str, set[Proof]] = defaultdict(set)
    problems: list[str] = []
    folders = (root / "tests", root / "contrib" / "moe_mk_contrib" / "tests")
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        where = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), where)
        claims = list(claims_of(tree.body)) if path.name.startswith("test_") else []
        problems += wrong_marks(tree, where, known, {mark.node for claim in claims for mark in claim.rows})
        for claim in claims:
            if claim.names & NEVER_PROVES:
                continue
            for row in (row for mark in claim.rows for row in row_ids(mark)):
                proofs[row].add(Proof(where, claim.test, bool(claim.names & NEEDS_GPU), "stress" in claim.names))
    if problems:
        raise MarkError("\n".join(problems))
    for found in proofs.values():  # of cases of one test, those that need less prove as much
        less = {proof: (replace(proof, gpu=False), replace(proof, stress=False)) for proof in found}
        found -= {proof for proof in found if found & {each for each in less[proof] if each != proof}}
    return {row: sorted(found) for row, found in proofs.items()}


def wrong_marks(tree: ast.Module, where: str, known: set[str], attached: set[ast.expr]) -> Iterator[str]:
    """Say what is wrong with the row marks of one file."""
    for mark in marks_in([tree]):
        if mark.name != "row":
            continue
        place = f"{where}:{mark.node.lineno}"
        unknown = [row for row in row_ids(mark) if row not in known]
        if not mark.args:
            yield f"{place}: a row mark without a row id"
        elif len(row_ids(mark)) < len(mark.args):
            yield f"{place}: row ids must be written out as numbers or strings"
        elif unknown:
            yield f"{place}: unknown row {', '.join(unknown)}; tests/rows.yaml names the rows"
        elif mark.node not in attached:
            yield f"{place}: this mark belongs to no test; put it on a test, a Test class or `pytestmark`"


def claims_of(body: Sequence[ast.stmt], prefix: str = "", outer: Sequence[Mark] = ()) -> Iterator[Claim]:
    """Yield what every test of a module or class claims to prove, inherited marks included."""
    marks = [*outer, *(mark for statement in body if _is_pytestmark(statement) for mark in marks_in([statement]))]
    for statement in body:
        if isinstance(statement, ast.ClassDef) and statement.name.startswith("Test"):
            own = marks_in(statement.decorator_list)
            yield from claims_of(statement.body, f"{prefix}{statement.name}::", [*marks, *own])
        elif isinstance(statement, TestNode) and statement.name.startswith("test"):
            yield from _claims_of_test(statement, f"{prefix}{statement.name}", marks)


def _claims_of_test(test: TestNode, name: str, outer: Sequence[Mark]) -> Iterator[Claim]:
    """One claim of the whole test, and one of each case that has marks of its own."""
    cases = [node for node in ast.walk(test) if isinstance(node, ast.Call) and _last_name(node.func) == "param"]
    own = [list(marks_in([case])) for case in cases]
    in_cases = {mark.node for marks in own for mark in marks}
    shared = [*outer, *(mark for mark in marks_in(test.decorator_list) if mark.node not in in_cases)]
    for marks in ([], *own):
        rows = [mark for mark in marks or shared if mark.name == "row"]
        yield Claim(name, rows, frozenset(mark.name for mark in [*shared, *marks]))


def _is_pytestmark(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return False
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def marks_in(nodes: Sequence[ast.AST]) -> Iterator[Mark]:
    """Yield every `pytest.mark.NAME` and `pytest.mark.NAME(...)` below some nodes."""
    called: set[ast.expr] = set()
    for outer in nodes:
        for node in ast.walk(outer):
            if isinstance(node, ast.Call) and (name := _mark_name(node.func)):
                called.add(node.func)
                yield Mark(name, node, node.args)
            elif isinstance(node, ast.expr) and node not in called and (name := _mark_name(node)):
                yield Mark(name, node, ())


def _mark_name(node: ast.expr) -> str:
    """NAME of `pytest.mark.NAME` or `mark.NAME`, else nothing."""
    return node.attr if isinstance(node, ast.Attribute) and _last_name(node.value) == "mark" else ""


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, `a` of `a`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def row_ids(mark: Mark) -> list[str]:
    """The ids of a row mark that are written out."""
    values = [arg.value for arg in mark.args if isinstance(arg, ast.Constant)]
    return [str(value) for value in values if isinstance(value, int | str) and not isinstance(value, bool)]


def read_weaker(path: Path) -> dict[str, str]:
    """Rows whose proof shows less than the row states, with what is missing."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    weaker = {str(row): str(what) for row, what in (content.get("weaker") or {}).items()}
    if unknown := set(weaker) - {row for entry in content["sections"] for row in entry["rows"]}:
        raise MarkError(f"{path.name}: weaker names unknown rows {', '.join(sorted(unknown))}")
    return weaker


def read_junit(paths: Iterable[Path]) -> dict[str, Result]:
    """How each test of some junit files ended, over its cases; folders stand for the files in them."""
    found: dict[str, Result] = defaultdict(Result)
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("*.xml")))]
    for case in (case for file in files for case in ElementTree.parse(file).iter("testcase")):
        parts = case.get("classname", "").split(".")  # tests.cli.test_run.TestA: tests/cli/test_run.py, TestA
        end = next((n for n, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1) + 1
        result = Result(passed=1)
        if case.find("failure") is not None or case.find("error") is not None:
            result = Result(failed=1)
        elif (skip := case.find("skipped")) is not None:
            result = Result(skipped={" ".join(skip.get("message", "no reason").split()): 1})
        name = case.get("name", "").split("[")[0]
        found["::".join(["/".join(parts[:end]) + ".py", *parts[end:], name])] += result
    return dict(found)


def read_results(path: Path) -> dict[str, dict[str, Result]]:
    """What was recorded of earlier runs; nothing where there is no file."""
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {test: {on: Result(**counts) for on, counts in by.items()} for test, by in (content or {}).items()}


def write_results(path: Path, results: Results) -> None:
    """One line a test, in order, so that two branches that add tests rarely conflict."""
    lines = []
    for test, by_machine in sorted(results.items()):
        counts = {
            on: {name: dict(v) if isinstance(v, Mapping) else v for name, v in vars(result).items() if v}
            for on, result in sorted(by_machine.items())
        }
        flow = yaml.safe_dump(counts, default_flow_style=True, sort_keys=False, width=10_000).strip()
        lines.append(f"{test}: {flow}\n")
    path.write_text(HEADER + "".join(lines), encoding="utf-8")


def this_machine() -> str:
    """The kind of this machine, as far as tests depend on it: two machines of one kind skip the same tests."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text(encoding="utf-8").split()) if info.exists() else set()
    best = next((name for flag, name in CPU_KINDS.items() if flag in flags), "")
    gpu = "with a GPU" if Path("/dev/nvidia0").exists() else ""
    return " ".join(word for word in (platform.machine(), best, gpu) if word)


def with_run(
    results: Results, run: Mapping[str, Result], machine: str, tests: set[str]
) -> dict[str, dict[str, Result]]:
    """The recorded results with those of a run on a machine, of known tests only."""
    kept = {test: dict(by) for test, by in results.items() if test in tests}
    for test in tests & set(run):
        kept[test] = kept.get(test, {}) | {machine: run[test]}
    return kept


def state_of(proof: Proof, results: Results) -> str:
    """How a proof ended: `passed`, or what it is instead."""
    by_machine = results.get(proof.test, {})
    if failed := [on for on, result in by_machine.items() if result.failed]:
        return f"failed on {', '.join(failed)}"
    if any(result.proves(proof) for result in by_machine.values()):
        return "passed"
    reasons = sorted({reason for result in by_machine.values() for reason in result.skipped})
    if proof.gpu:
        return f"never run: {NO_GPU}"
    return f"skipped: {'; '.join(reasons)}" if reasons else "never run"


def state_of_row(proofs: Sequence[Proof], results: Results, weaker: str) -> str:
    """The state of a row in words, from those of its proofs."""
    states = Counter(state_of(proof, results) for proof in proofs)
    others = [f"{count} {state}" for state, count in sorted(states.items()) if state != "passed"]
    if not proofs:
        shown = "no test"
    elif not others:
        shown = "passed"
    elif states["passed"]:
        shown = f"passed, but {', '.join(others)}" if "failed" not in str(others) else ", ".join(others)
    else:
        shown = ", ".join(sorted(states))
    return f"{shown}; weaker: {weaker}" if weaker else shown


def render(
    sections: Mapping[str, Mapping[str, str]],
    proofs: Mapping[str, Sequence[Proof]],
    results: Results,
    weaker: Mapping[str, str],
) -> str:
    """The page: a total, then a table a section."""
    states = {
        row: state_of_row(proofs.get(row, ()), results, weaker.get(row, ""))
        for rows in sections.values()
        for row in rows
    }
    passed = {row for row, state in states.items() if state.startswith("passed")}
    tests = {(proof.path, proof.name) for found in proofs.values() for proof in found}
    lines = [
        "# Capabilities",
        "",
        "Generated by `make features` from `tests/rows.yaml`, the `row` marks in `tests/` and what test runs left in",
        "`tests/results.yaml`; do not edit.",
        "",
        f"**{len(passed - set(weaker))} of {len(states)} rows are proven by tests that passed, "
        f"{len(passed & set(weaker))} more by tests that show less than the row states, by {len(tests)} tests.**",
    ]
    for title, rows in sections.items():
        count = sum(row in passed and row not in weaker for row in rows)
        lines += ["", f"## {title}", "", f"{count} of {len(rows)}", ""]
        lines += ["| Row | What it is | Result | Proven by |", "|---|---|---|---|"]
        lines += [
            f"| {row} | {_cell(what)} | {_cell(states[row])} | {_links(proofs.get(row, ()), results)} |"
            for row, what in rows.items()
        ]
    return "\n".join(lines) + "\n"


def _links(found: Sequence[Proof], results: Results) -> str:
    """The first proofs, those that passed before others."""
    if not found:
        return "not yet"
    ordered = sorted(found, key=lambda proof: (state_of(proof, results) != "passed", proof))
    shown = []
    for proof in ordered[:SHOWN]:
        state = state_of(proof, results)
        note = "" if state == "passed" else f" ({_cell(state)})"
        shown.append(f"[{proof.test}](../{proof.path}){note}")
    rest = len(found) - SHOWN
    return "<br>".join(shown + ([f"and {rest} more"] if rest > 0 else []))


def contradictions(
    proofs: Mapping[str, Sequence[Proof]],
    results: Results,
    run: Mapping[str, Result],
    machine: str,
) -> Iterator[str]:
    """Where a run on a kind of machine differs from what is recorded.

    A skip is no contradiction where the test passed on machines of
    other kinds alone, or where another target has the library that it needs.
    """
    for proof in sorted({proof for found in proofs.values() for proof in found}):
        now, recorded = run.get(proof.test), results.get(proof.test, {}).get(machine, Result())
        if state_of(proof, results) != "passed":
            continue
        if now is None:
            if not (proof.gpu or proof.stress):
                yield f"{proof.test}: the page states passed, and this run does not have it"
        elif now.failed:
            yield f"{proof.test}: the page states passed, and {now.failed} of its cases failed"
        elif not now.passed and recorded.passed and not all(HAS_IT.fullmatch(reason) for reason in now.skipped):
            reasons = "; ".join(sorted(now.skipped))
            yield f"{proof.test}: the page states passed, and this run on {machine} skipped it: {reasons}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if docs/capabilities.md is stale")
    parser.add_argument("--results", nargs="+", type=Path, help=f"junit files or folders with them; {JUNIT} by default")
    parser.add_argument("--machine", help="kind of machine that the results come from; that of this one by default")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    root = options.root
    sections = read_sections(root / "tests" / "rows.yaml")
    try:
        proofs = find_proofs(root, {row for rows in sections.values() for row in rows})
        weaker = read_weaker(root / "tests" / "rows.yaml")
    except MarkError as problem:
        print(problem, file=sys.stderr)
        return 1
    results = read_results(root / RESULTS)
    tests = {proof.test for found in proofs.values() for proof in found}
    if options.check:
        problems = [f"{test}: recorded in {RESULTS}, and proves no row" for test in sorted(set(results) - tests)]
        if options.results:
            run = read_junit(options.results)
            problems += contradictions(proofs, results, run, options.machine or this_machine())
        if problems:
            print(*problems, "run `make features` after the tests, and commit", sep="\n", file=sys.stderr)
            return 1
    else:
        run = read_junit(options.results or [root / JUNIT])
        results = with_run(results, run, options.machine or this_machine(), tests)
        write_results(root / RESULTS, results)
    new = render(sections, proofs, results, weaker)
    return write_or_compare(root, "docs/capabilities.md", new, new.split("**")[1], check=options.check)


if __name__ == "__main__":
    sys.exit(main())
