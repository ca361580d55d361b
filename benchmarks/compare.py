"""Two runs of `moe-mk bench` side by side, by ratio.

    moe-mk bench --out before.json
    moe-mk bench --out after.json
    python benchmarks/compare.py before.json after.json [--limit 1.1]

A ratio above 1 states that the second run is slower. Exit code 1 if any forward is slower than --limit allows, 2 if the
two cannot be compared. Other differences between the runs are printed first.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Facts = Mapping[str, Any]
SMALL_MS = 0.01
"""Stages below this in both runs are not compared: their ratio is noise."""


def read(file: Path) -> Facts:
    """One run; exits with code 2 for anything else."""
    try:
        facts: Facts = json.loads(file.read_text(encoding="utf-8"))
        if facts["what"] != "moe-mk bench" or not facts["results"]:
            raise ValueError("it holds no results of moe-mk bench")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        sys.stderr.write(f"{file} cannot be compared: {problem}\n")
        raise SystemExit(2) from problem
    return facts


def conditions(facts: Facts) -> Facts:
    """What may differ beside the times."""
    return {"pair": facts["pair"], **facts["environment"], **facts["layer"]}


def ratios(before: Facts, after: Facts) -> dict[int, dict[str, float]]:
    """By batch size: the ratio of the forward, under "forward", and of every stage that took long enough to report."""
    ours, theirs = ({result["tokens"]: result for result in facts["results"]} for facts in (before, after))
    found: dict[int, dict[str, float]] = {}
    for tokens in sorted(ours.keys() & theirs.keys()):
        one, other = ours[tokens], theirs[tokens]
        found[tokens] = {"forward": other["total_ms"] / one["total_ms"]}
        for stage, took in one["stages_ms"].items():
            takes = other["stages_ms"].get(stage, 0.0)
            if min(took, takes) >= SMALL_MS:
                found[tokens][stage] = takes / took
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--limit", type=float, help="the largest ratio of a forward that is still good")
    given = parser.parse_args(arguments)
    before, after = read(given.before), read(given.after)
    found = ratios(before, after)
    if not found:
        sys.stderr.write("the two runs have no batch size in common\n")
        return 2
    was, now = conditions(before), conditions(after)
    for key in sorted(key for key in was | now if was.get(key) != now.get(key)):
        print(f"differs  {key}: {was.get(key)} -> {now.get(key)}")
    stages = list(dict.fromkeys(stage for row in found.values() for stage in row))
    print(f"{'stage':<12}" + "".join(f"{tokens:>9} tok" for tokens in found))
    for stage in sorted(stages, key=lambda stage: stage == "forward"):
        cells = (f"{row[stage]:>12.2f}x" if stage in row else f"{'-':>13}" for row in found.values())
        print(f"{stage:<12}" + "".join(cells))
    slower = [tokens for tokens, row in found.items() if given.limit is not None and row["forward"] > given.limit]
    if slower:
        print(f"slower than {given.limit:g}x at {', '.join(map(str, slower))} tokens")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
