"""Generated pages, and generated parts of pages between two marks."""

import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("moe_mk", "moe_mk_contrib")


def of_this_repository(registry: Any) -> Iterator[tuple[str, Any]]:
    """Backends of both distributions of this repository by name, plugins of others left out."""
    return ((name, kind) for name, kind in registry.items() if kind.__module__.partition(".")[0] in PACKAGES)


def markdown(rows: Iterable[Sequence[object]]) -> str:
    """A table; the first row is its head."""
    head, *body = rows
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *body)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def between(page: str, begin: str, end: str, text: str) -> str:
    """The page with a text on the lines between two marks. Raises ValueError unless each is there once."""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs one line {begin} and one line {end}")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


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
