"""Write the generated pages, and the generated parts of pages between two marks.

    python tools/pages.py                      all that are read from sources and results in a few seconds
    python tools/pages.py accuracy             by name, see --help
    python tools/pages.py docs_faults --report build/chaos.json

`--check` writes nothing, prints how pages differ and exits 1. docs/capabilities.md is written by features.py, from test
runs.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("moe_mk", "moe_mk_contrib")
QUICK = ("results", "transports", "docs_api", "docs_faults")
WRITERS = (*QUICK, "accuracy", "docs_certified")
"""Modules of this folder with `pages(root)`: pages by name, and their text."""


def of_this_repository(registry: Any) -> Iterator[tuple[str, Any]]:
    """Backends of both distributions of this repository by name, plugins of others left out."""
    return ((name, kind) for name, kind in registry.items() if kind.__module__.partition(".")[0] in PACKAGES)


def markdown(rows: Iterable[Sequence[object]]) -> str:
    """A table; the first row is its head."""
    head, *body = rows
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *body)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def between(page: str, mark: str, text: str) -> str:
    """A page with a text between the lines `<!-- mark: begin -->` and `<!-- mark: end -->`.

    Raises ValueError unless each is there once.
    """
    begin, end = (f"<!-- {mark}: {edge} -->" for edge in ("begin", "end"))
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs one line {begin} and one line {end}")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def filled(root: Path, page: str, mark: str, text: str) -> dict[str, str]:
    """A page of the repository by its name, with a text between two marks."""
    return {page: between((root / page).read_text(encoding="utf-8"), mark, text)}


def write_or_compare(root: Path, name: str, new: str, what: str, *, check: bool, remedy: str = "make features") -> int:
    """Write a page, or with check print how it differs; returns the exit code. what: its contents, for the message."""
    page = root / name
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    if new == old:
        print(f"{name} is up to date: {what}")
    elif check:
        pages = (old.splitlines(), new.splitlines())
        changes = difflib.unified_diff(*pages, "as it stands", "as it should be", "", "", 0, "")
        print("\n".join(list(changes)[:40]), file=sys.stderr)
        print(f"{name} is stale; run `{remedy}` and commit it", file=sys.stderr)
        return 1
    else:
        page.parent.mkdir(exist_ok=True)
        page.write_text(new, encoding="utf-8")
        print(f"{name} written: {what}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(WRITERS)}; all but the last two if left out"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is stale")
    parser.add_argument("--report", type=Path, help="of moe-mk chaos: its summary replaces the committed result first")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(WRITERS):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(WRITERS)}")
    if options.report is not None:
        from tools import docs_faults

        docs_faults.commit(json.loads(options.report.read_text(encoding="utf-8")), ROOT)
    stale = 0
    for name in options.names or QUICK:
        for page, text in import_module(f"tools.{name}").pages(ROOT).items():
            remedy = f"python tools/pages.py {name}"
            stale |= write_or_compare(ROOT, page, text, name, check=options.check, remedy=remedy)
    return stale


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
