"""Write the figures of overlap and of popular claims into the docs, from the files under `benchmarks/results/`.

`--check` writes nothing and fails where a page is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Facts = Mapping[str, Any]


def claims(found: Facts) -> str:
    """One row per claim: the cited speedup, and that of the same change on this machine."""
    rows = []
    for claim in found["claims"]:
        reported = f"{claim['reported']} | {_reported(claim['reported_ratio'])}"
        rows.append(f"| {claim['name']} | {reported} | **{claim['ratio']:.2f}** | {claim['how']} |")
    head = "| change | cited | as a ratio | measured | method: before / after |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n\n" + _where(found)


def overlap(found: Facts) -> str:
    """One row per setting: the time of one batch in ms, and each method as a ratio to it with the hidden fraction."""
    ways = list(found["rows"][0]["ratio"])
    head = (
        "| transport | tokens | one batch | " + " | ".join(map(_way, ways)) + " |\n|---|---|---|" + "---|" * len(ways)
    )
    rows = []
    for row in found["rows"]:
        cells = []
        for way in ways:
            hidden = f" ({row['hidden'][way]:.0%})" if way in row["hidden"] else ""
            cells.append(f"{row['ratio'][way]:.2f}{hidden}")
        rows.append(f"| `{row['transport']}` | {row['tokens']} | {row['ms']['whole']:.2f} ms | {' | '.join(cells)} |")
    return "\n".join([head, *rows]) + "\n\n" + _where(found)


BLOCKS: Mapping[str, tuple[str, str, Callable[[Facts], str]]] = {
    "docs/performance.md": ("popular_claims", "popular_claims_cpu.json", claims),
    "docs/overlap.md": ("overlap", "overlap_cpu.json", overlap),
}
"""By page: the name between its marks, the file of the figures, and how they are shown."""


def with_figures(page: str, text: str, results: Path) -> str:
    """A page's text with its figures between its marks. Raises ValueError if the marks are missing."""
    name, file, show = BLOCKS[page]
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    if begin not in text or end not in text:
        raise ValueError(f"{page} lacks the marks {begin.strip()} and {end}")
    before, rest = text.split(begin)
    found = json.loads((results / file).read_text(encoding="utf-8"))
    return before + begin + show(found) + end + rest.split(end)[1]


def _reported(ratio: list[float]) -> str:
    low, high = ratio
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"


def _way(name: str) -> str:
    if name == "dual":
        return "two micro-batches"
    tiles, carrier = name.split()
    return f"{tiles} {'tile' if tiles == '1' else 'tiles'}, {carrier}"


def _where(found: Facts) -> str:
    note = f"; {found['note']}" if found["note"] else ""
    device, torch = found["device"], found["versions"]["torch"]
    place = (
        f"{device['processor']}, {device['cores']} cores, torch {torch}, `{found['backend']}`, {found['ranks']} ranks"
    )
    return f"Measured on {place}{note}:\n\n```text\n{found['command']}\n```\n"


def main() -> int:
    """Write the pages, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check, stale = parser.parse_args().check, 0
    for page in BLOCKS:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = with_figures(page, before, RESULTS)
        if check and before != after:
            print(f"{page}: figures are stale; run `make features`", file=sys.stderr)
            stale = 1
        elif not check:
            path.write_text(after, encoding="utf-8")
            print(f"{page}: figures written")
    return stale


if __name__ == "__main__":
    sys.exit(main())
