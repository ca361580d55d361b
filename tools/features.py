"""Write docs/capabilities.md: what the system should do, and which tests prove that it does.

The rows come from tests/rows.yaml, the proofs from `@pytest.mark.row(...)` in tests/, found by reading the source, so
that nothing needs to be imported or run. `--check` writes nothing and fails where the file is stale.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

SHOWN = 3
ROOT = Path(__file__).resolve().parent.parent
NEVER_PROVES = {"skip", "xfail"}
NEEDS_GPU = {"gpu"}
TestNode = ast.FunctionDef | ast.AsyncFunctionDef


class MarkError(Exception):
    """A mark that names no known row, or that belongs to no test; one line per mark."""


@dataclass(frozen=True)
class Section:
    """A heading with its rows: id -> what the system should do."""

    title: str
    rows: Mapping[str, str]


@dataclass(frozen=True, order=True)
class Proof:
    """One test that proves a row, as a path relative to the repository and a qualified name."""

    path: str
    name: str
    gpu: bool = False


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


def read_sections(path: Path) -> list[Section]:
    """Read the rows by section, in the order of the file."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Section(entry["title"], dict(entry["rows"])) for entry in content["sections"]]


def find_proofs(root: Path, known: set[str]) -> dict[str, list[Proof]]:
    """Find every row mark under root/tests; raises MarkError with all that are wrong, each with file and line."""
    proofs: dict[str, set[Proof]] = defaultdict(set)
    problems: list[str] = []
    for path in sorted((root / "tests").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), where)
        claims = list(claims_of(tree.body)) if path.name.startswith("test_") else []
        problems += wrong_marks(tree, where, known, {mark.node for claim in claims for mark in claim.rows})
        for claim in claims:
            if claim.names & NEVER_PROVES:
                continue
            for row in (row for mark in claim.rows for row in row_ids(mark)):
                proofs[row].add(Proof(where, claim.test, gpu=bool(claim.names & NEEDS_GPU)))
    if problems:
        raise MarkError("\n".join(problems))
    return {
        row: sorted(proof for proof in found if not _is_also_proven_without_gpu(proof, found))
        for row, found in proofs.items()
    }


def _is_also_proven_without_gpu(proof: Proof, found: set[Proof]) -> bool:
    return proof.gpu and replace(proof, gpu=False) in found


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


def render(sections: Sequence[Section], proofs: Mapping[str, Sequence[Proof]]) -> str:
    """The page: a total, then a table a section."""
    every = [row for section in sections for row in section.rows]
    proven = [row for row in every if row in proofs]
    tests = {(proof.path, proof.name) for found in proofs.values() for proof in found}
    lines = [
        "# Capabilities",
        "",
        "Generated by `make features` from `tests/rows.yaml` and the `row` marks in `tests/`; do not edit.",
        "",
        f"**{len(proven)} of {len(every)} rows are proven, by {len(tests)} tests.**",
    ]
    for section in sections:
        count = sum(row in proofs for row in section.rows)
        lines += ["", f"## {section.title}", "", f"{count} of {len(section.rows)}", ""]
        lines += ["| Row | What it is | Proven by |", "|---|---|---|"]
        lines += [f"| {row} | {_cell(what)} | {_links(proofs.get(row, ()))} |" for row, what in section.rows.items()]
    return "\n".join(lines) + "\n"


def _links(found: Sequence[Proof]) -> str:
    if not found:
        return "not yet"
    shown = [f"[{proof.path}::{proof.name}](../{proof.path}){' (GPU)' if proof.gpu else ''}" for proof in found[:SHOWN]]
    rest = len(found) - SHOWN
    return "<br>".join(shown + ([f"and {rest} more"] if rest > 0 else []))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if docs/capabilities.md is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    page = options.root / "docs" / "capabilities.md"
    sections = read_sections(options.root / "tests" / "rows.yaml")
    try:
        new = render(sections, find_proofs(options.root, {row for section in sections for row in section.rows}))
    except MarkError as problem:
        print(problem, file=sys.stderr)
        return 1
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    total = new.split("**")[1]
    if new == old:
        print(f"docs/capabilities.md is up to date: {total}")
    elif options.check:
        changes = difflib.unified_diff(
            old.splitlines(), new.splitlines(), "as it stands", "as it should be", "", "", 0, ""
        )
        print("\n".join(list(changes)[:40]), file=sys.stderr)
        print("docs/capabilities.md is stale; run `make features` and commit it", file=sys.stderr)
        return 1
    else:
        page.parent.mkdir(exist_ok=True)
        page.write_text(new, encoding="utf-8")
        print(f"docs/capabilities.md written: {total}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
