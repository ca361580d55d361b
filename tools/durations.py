"""Write tests/durations.json: the tests that took longest; tests/conftest.py takes tiers and order from it.

python tools/durations.py build/junit/all.xml [more.xml ...]    a later file counts where several have a test
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).resolve().parent.parent / "tests" / "durations.json"
LEAST = 0.3
"""Seconds on an idle machine above which a test is left out of `make test`."""


def durations(reports: Sequence[Path]) -> dict[str, float]:
    """Seconds by node id of the tests that passed, and as recorded before of those that the reports lack."""
    found: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None and case.find("failure") is None:
                path = str(case.get("classname")).replace(".", "/") + ".py"
                if not (FILE.parents[1] / path).is_file():
                    continue  # of a class, which is made while tests are collected
                found[f"{path}::{case.get('name')}"] = round(float(str(case.get("time"))), 1)
    return {name: found[name] for name in sorted(found)}


def main(reports: Sequence[str]) -> None:
    found = {name: seconds for name, seconds in durations([*map(Path, reports)]).items() if seconds > LEAST}
    FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    print(f"{FILE.name}: {len(found)} tests of {sum(found.values()):.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
