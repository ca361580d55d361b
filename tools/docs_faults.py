"""The table of docs/fault-tests.md, from benchmarks/results/faults_cpu.json; see pages.py.

moe-mk chaos --worlds 1000 --out build/chaos.json
python tools/pages.py docs_faults --report build/chaos.json
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_mk.lab.testing.faults import ACCEPTED, OUTCOMES
from tools.pages import filled, markdown

PAGE, RESULT = "docs/fault-tests.md", "benchmarks/results/faults_cpu.json"
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


def commit(report: Mapping[str, Any], root: Path) -> None:
    """Replace the committed result by the summary of a report."""
    text = json.dumps({key: report[key] for key in SUMMARY}, indent=1)
    (root / RESULT).write_text(text + "\n", encoding="utf-8")


def pages(root: Path) -> dict[str, str]:
    """The page with the table of the committed result."""
    text = table(json.loads((root / RESULT).read_text(encoding="utf-8")))
    return filled(root, PAGE, "faults", f"\n{text}\n")
