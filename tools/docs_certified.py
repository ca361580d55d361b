"""The table of docs/certify.md: certifies every backend of this repository, which takes minutes; see pages.py."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_mk.errors import UnsupportedError
from moe_mk.experts.base import EXPERTS
from moe_mk.lab.testing.certificate import Certificate, environment
from moe_mk.lab.testing.certify import certify
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from tools.pages import filled, of_this_repository

PAGE = "docs/certify.md"
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
    table = page.partition("certified: begin")[2].partition("certified: end")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): row[2].strip() for row in rows}


def pages(root: Path) -> dict[str, str]:
    """The page with a row for each backend, certified between ranks of this process."""
    lines = []
    for line, _ in lines_of(backends(), processes=False):
        print(line, flush=True)
        lines.append(line)
    here = environment()
    stated = f"torch {here['torch']}, Python {here['python']}, {here['device']}; ranks of one process"
    table = f"\n{HEAD}\n" + "\n".join(lines) + f"\n\nBy `make certify` on {stated}.\n"
    return filled(root, PAGE, "certified", table)
