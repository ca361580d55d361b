"""Turn the GPU benchmark's results into the table of docs/performance.md and a plot.

python tools/gpu_report.py --results build/gpu/results --plot build/gpu/experts_gpu.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- experts_gpu: begin -->", "<!-- experts_gpu: end -->"


def table(results: Sequence[dict[str, Any]]) -> str:
    """One line a case: the floor, and each candidate's median with its share of the floor."""
    names = list(dict.fromkeys(name for result in results for line in result["lines"] for name in line["results"]))
    head = ["experts", "tokens a rank", "rows an expert", "floor us", *names]
    rows = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for result in results:
        for line in result["lines"]:
            cells = [f"{line[key]}" for key in ("experts", "tokens")]
            cells += [f"{line['rows_an_expert']:.2f}", f"{line['floor_us']:.0f}"]
            for name in names:
                found = line["results"].get(name)
                cells.append("-" if found is None else f"{found['median_us']:.0f} us ({100 * found['of_floor']:.0f} %)")
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def section(results: Sequence[dict[str, Any]]) -> str:
    """What the table was measured with, the table, and who did not take part."""
    first = results[0]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    rates = first["rates"]
    ceilings = f"{rates['memory_gbs']:.0f} GB/s read and {rates['fp8_tflops']:.0f} FP8 TFLOP/s, {first['rates_are']}"
    skipped = {name: why for result in results for line in result["lines"] for name, why in line["skipped"].items()}
    lines = [f"{first['device']}, Python {first['python']}, {versions}. Ceilings: {ceilings}.", "", table(results)]
    lines += ["", *(f"{name} did not take part: {why}." for name, why in sorted(skipped.items()))]
    return "\n".join(lines).rstrip()


def replaced(page: str, text: str) -> str:
    """The page with its generated part exchanged. Raises ValueError if the marks are not there."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one line {BEGIN} and one line {END}")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def plot(results: Sequence[dict[str, Any]], file: Path) -> bool:
    """Share of the floor over tokens, one line a candidate and case; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5))
    axes = figure.subplots()
    for result in results:
        curves: dict[str, list[tuple[int, float]]] = {}
        for line in result["lines"]:
            for name, found in line["results"].items():
                curves.setdefault(f"{name}, {line['experts']} experts", []).append((line["tokens"], found["of_floor"]))
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", xlabel="tokens a rank", ylabel="floor / median", ylim=(0, 1), title=results[0]["device"])
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, bbox_inches="tight")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and the plot; without results there is nothing to write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    files = sorted(given.results.glob("experts_gpu_e*.json"))
    if given.dry_run or not files:
        sys.stdout.write(f"{len(files)} results in {given.results}; they would go into {given.page}\n")
        return 0 if given.dry_run else 1
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    results.sort(key=lambda result: -int(result["lines"][0]["experts"]))
    given.page.write_text(replaced(given.page.read_text(encoding="utf-8"), section(results)), encoding="utf-8")
    drawn = plot(results, given.plot)
    sys.stdout.write(f"{given.page}\n" + (f"{given.plot}\n" if drawn else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
