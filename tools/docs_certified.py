"""Certify every backend of this repository and write the table of docs/certify.md. Takes minutes.

`--check` writes nothing and fails where the table has other backends or other verdicts, not where a digest differs.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_mk.errors import UnsupportedError
from moe_mk.experts.base import EXPERTS
from moe_mk.lab.testing.certificate import Certificate, environment
from moe_mk.lab.testing.certify import certify
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from tools.pages import between, of_this_repository

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/certify.md"
BEGIN, END = "<!-- certified: begin -->", "<!-- certified: end -->"
HEAD = "| backend | verdict | checks | cases | digest | note |\n|---|---|---|---|---|---|"


def backends() -> list[str]:
    """Transports, then experts, in the order of their names; none of other repositories."""
    return [name for registry in (PREPARE_FINALIZE, EXPERTS) for name, _ in sorted(of_this_repository(registry))]


def line_of(certificate: Certificate) -> str:
    laws = {failure.law for failure in certificate.failures} or {"nothing was checked"}
    verdict = "certified" if certificate.passed else "**refused**: " + ", ".join(sorted(laws))
    cases = sum(check.cases for check in certificate.coverage)
    emulated = [text.split()[0] for text in certificate.not_covered if text.endswith("tested on its emulation")]
    note = f"emulated {emulated[0]}" if emulated else ""
    digest = certificate.digest[:12] if any(check.digest for check in certificate.coverage) else "-"
    cells = (f"`{certificate.backend}`", verdict, len(certificate.coverage), cases, digest, note)
    return "| " + " | ".join(map(str, cells)) + " |"


def lines_of(names: Sequence[str], *, processes: bool) -> Iterator[tuple[str, bool]]:
    """A row for each backend and whether it is certified; one that cannot run here states why."""
    for name in names:
        try:
            certificate = certify(name, processes=processes)
        except UnsupportedError as problem:
            yield f"| `{name}` | cannot run here | | | | {'; '.join(problem.reasons)} |", True
        else:
            yield line_of(certificate), certificate.passed


def verdicts(page: str) -> dict[str, str]:
    """The row of each backend in the table of a page."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): row[2].strip() for row in rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help=f"exit 1 if the table of {PAGE} is stale")
    parser.add_argument("--processes", action="store_true", help="run transports on real processes as well")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("names", nargs="*", help="backends; all of this repository if none are given")
    options = parser.parse_args(arguments)
    lines: list[str] = []
    passed = True
    for line, good in lines_of(options.names or backends(), processes=options.processes):
        print(line, flush=True)
        lines, passed = [*lines, line], passed and good
    page = options.root / PAGE
    here = environment()
    where = f"torch {here['torch']}, Python {here['python']}, {here['device']}; "
    stated = where + ("ranks of one process and real processes" if options.processes else "ranks of one process")
    table = f"\n{HEAD}\n" + "\n".join(lines) + f"\n\nBy `make certify` on {stated}.\n"
    text = between(page.read_text(encoding="utf-8"), BEGIN, END, table)
    if options.check:
        stale = verdicts(text) != verdicts(page.read_text(encoding="utf-8"))
        print(f"{PAGE} is {'stale; run `make certify`' if stale else 'up to date'}")
        return int(stale or not passed)
    if not options.names:
        page.write_text(text, encoding="utf-8")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
