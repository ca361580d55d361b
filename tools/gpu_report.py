"""Turn the results of the GPU queue into a page, and into the table of docs/performance.md.

    python tools/gpu_report.py --results build/gpu/out/results.jsonl

A result is one JSON object a line, with a `kind`: "ceilings", "latency", "skipped", "tool". Of several
latencies of the same case the last one counts.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.pages import between, markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
OURS = "moe_mk, "
"""How the names of this project's own contenders begin."""
HEAD = (
    "case", "contender", "median us", "p25", "p75", "GB/s", "TFLOP/s", "of floor", "SM MHz", "error", "time / ours",
)  # fmt: skip
FIGURES = {
    "median_us": ".1f", "p25_us": ".1f", "p75_us": ".1f", "gbs": ".0f", "tflops": ".0f", "of_floor": ".0%",
    "sm_mhz": ".0f", "error": ".4f",
}  # fmt: skip
"""What stands in the columns between the contender and the ratio."""
Line = dict[str, Any]


def read(file: Path) -> list[Line]:
    """All complete lines of a results file; a line that was cut off is left out."""
    found: list[Line] = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def latest(lines: Iterable[Line]) -> list[Line]:
    """Latencies, the last of each case and contender, in the order of cases."""
    found = {(line["case"], line["contender"]): line for line in lines if line["kind"] == "latency"}
    return sorted(found.values(), key=lambda line: (*line["order"], not line["contender"].startswith(OURS)))


def table(lines: Iterable[Line]) -> str:
    """One row a contender and case. The last column compares a peer with ours, which took turns with it, and one of
    ours with the fastest of ours.
    """
    found = latest(lines)
    best: dict[str, float] = {}
    for line in found:
        if line["contender"].startswith(OURS):
            best[line["case"]] = min(line["median_us"], best.get(line["case"], line["median_us"]))
    rows = [HEAD]
    for line in found:
        ours = line.get("ours_us") or best.get(line["case"])
        ratio = line["median_us"] / ours if ours else None
        shown = [_number(line.get(key), form) for key, form in FIGURES.items()]
        rows.append((line["case"], line["contender"], *shown, _number(ratio, ".2f")))
    return markdown(rows)


def page(lines: Sequence[Line]) -> str:
    """Everything that was measured. Raises ValueError without results."""
    if not lines:
        raise ValueError("no results; nothing to report")
    parts: list[str] = []
    ceilings = [line for line in lines if line["kind"] == "ceilings"]
    if ceilings:
        last = ceilings[-1]
        versions = ", ".join(f"{name} {number}" for name, number in last["versions"].items())
        parts.append(
            f"{last['device']}, {versions}. Ceilings: {last['read_gbs']:.0f} GB/s read and "
            f"{last['fp8_tflops']:.0f} FP8 TFLOP/s, measured.\n"
        )
    if latest(lines):
        parts.append(table(lines) + "\n")
    for line in {line["tool"]: line for line in lines if line["kind"] == "tool"}.values():
        parts.append(
            f"{line['tool']}: {line['status']}.\n" + (f"\n```text\n{line['text']}\n```\n" if line["text"] else "")
        )
    skipped = {line["contender"]: line["reason"] for line in lines if line["kind"] == "skipped"}
    parts += [f"{name} did not take part: {why}.\n" for name, why in sorted(skipped.items())]
    return "\n".join(parts)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    lines = read(given.results)
    if not latest(lines):
        sys.stdout.write(f"no measured results in {given.results}; {given.page} stays as it is\n")
        return 1
    old = given.page.read_text(encoding="utf-8")
    given.page.write_text(between(old, "experts_gpu", page(lines).rstrip()), encoding="utf-8")
    sys.stdout.write(f"{given.page}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
