"""Write the table of docs/fault-tests.md from benchmarks/results/faults_cpu.json.

    moe-mk chaos --worlds 1000 --out build/chaos.json
    python tools/docs_faults.py build/chaos.json

With a report, its summary replaces the committed result first. `--check` writes nothing and fails where the page does
not show the committed result.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_mk.lab.testing.faults import ACCEPTED, OUTCOMES
from tools.pages import between, markdown, write_or_compare

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULT = "docs/fault-tests.md", "benchmarks/results/faults_cpu.json"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
SUMMARY = (
    "what", "command", "seed", "passed", "seconds", "environment", "by_transport", "by_fault", "shared_memory_left",
    "failed",
)  # fmt: skip
"""The keys of a report that are committed: not its worlds, which the command draws again."""


def table(result: Mapping[str, Any]) -> str:
    """Outcomes by transport and by fault, and what they were measured with."""
    parts = [_lines("transport", result["by_transport"]), _lines("fault", result["by_fault"])]
    here, worlds = result["environment"], sum(line["worlds"] for line in result["by_transport"])
    failed = f"{len(result['failed'])} failed" if result["failed"] else "none failed"
    versions = f"torch {here['torch']}, Python {here['python']}, {here['device']}"
    return "\n\n".join(
        [
            *parts,
            f"`{result['command']}`: {worlds} worlds in {result['seconds'] / 60:.0f} minutes, {failed}. {versions}.",
        ]
    )


def _lines(what: str, lines: Sequence[Mapping[str, Any]]) -> str:
    others = [name for name in OUTCOMES if name not in ACCEPTED]
    head = [what, "worlds", *(name for name in OUTCOMES if name in ACCEPTED), "anything else", "names the victim"]
    rows = [[*head, "median", "maximum"]]
    for line in lines:
        seen = line["outcomes"]
        bad = ", ".join(f"{seen[name]} {name}" for name in others if seen[name]) or "0"
        accepted = [str(seen[name]) for name in OUTCOMES if name in ACCEPTED]
        named = "/".join(map(str, line["named"])) if line["named"][1] else ""
        delays = ["" if s is None else f"{s:.3f} s" for s in (line["delay_median_s"], line["delay_max_s"])]
        rows.append([line["key"], str(line["worlds"]), *accepted, bad, named, *delays])
    return markdown(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path, help="a report of moe-mk chaos, to be committed")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if the table of {PAGE} is stale")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    result = options.root / RESULT
    if options.report is not None and not options.check:
        report = json.loads(options.report.read_text(encoding="utf-8"))
        result.write_text(json.dumps({key: report[key] for key in SUMMARY}, indent=1) + "\n", encoding="utf-8")
    text = table(json.loads(result.read_text(encoding="utf-8")))
    new = between((options.root / PAGE).read_text(encoding="utf-8"), BEGIN, END, f"\n{text}\n")
    remedy = "python tools/docs_faults.py"
    return write_or_compare(options.root, PAGE, new, "the table of faults", check=options.check, remedy=remedy)


if __name__ == "__main__":
    sys.exit(main())
