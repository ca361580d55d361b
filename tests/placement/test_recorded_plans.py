"""What plans are worth on fifty drawn problems: balance, arrivals, copies and methods, as they were recorded.

Every policy is a heuristic whose parts no worked example shows: limits of search, orders, thresholds. A change of one
of them moves these numbers.

python tests/placement/test_recorded_plans.py       writes the record anew, after a change that is meant
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.placement.eplb import Cost, Topology, plan, resplit, slot_loads
from tests.placement.plans import skewed
from tests.support.alone import alone

FILE = Path(__file__).parent / "recorded_plans.json"
PROBLEMS = 50


def worth(seed: int) -> dict[str, Any]:
    """A placement from nothing, one that follows a changed load, one after a loss, and new shares alone."""
    draw = np.random.default_rng(seed)
    nodes, each = int(draw.integers(1, 4)), int(draw.integers(2, 5))
    gpus, groups = nodes * each, int(draw.choice([1, 2, 4]))
    experts = groups * int(draw.integers(max(2, gpus // groups), 2 * gpus // groups + 4))
    slots = -(-experts // gpus) + int(draw.integers(0, 3))
    uneven, slow = bool(draw.random() < 0.3), bool(draw.random() < 0.3)
    held = [slots + int(uneven and gpu % 2) for gpu in range(gpus)]
    speeds = [1.0 + 0.5 * (gpu % 3 == 0) for gpu in range(gpus)] if slow else None
    load = skewed(2, experts, groups, seed) * (draw.random((2, experts)) < 0.9)
    later = load * draw.lognormal(0.0, 0.8, load.shape)
    options: dict[str, Any] = {
        "groups": groups,
        "policy": ("auto", "flat", "hybrid", "compat")[seed % 4],
        "split": ("weighted", "weighted", "equal")[seed % 3],
        "min_copies": 1 + int(slots * gpus >= 2 * experts and seed % 5 == 0),
        "cost": Cost(1.0, 300.0) if seed % 7 == 0 else Cost(),
        "target": (0.995, 1.0, 0.9)[seed // 2 % 3],
    }
    alive = [gpu != 1 for gpu in range(gpus)]
    whole = Topology(gpus, nodes, held, speeds)
    try:
        first = plan(load, whole, **options)
    except UnsupportedError:  # the policy has no answer for these sizes
        options["policy"] = "auto"
        first = plan(load, whole, **options)
    after = plan(later, whole, old=first, max_moves=(None, 3)[seed % 2], **options)
    made = {"first": first, "after": after}
    if sum(held) - held[1] >= experts * options["min_copies"]:
        options["policy"] = "flat" if options["policy"] == "compat" else options["policy"]
        made["lost"] = plan(load, Topology(gpus, nodes, held, speeds, alive), old=first, **options)
    found: dict[str, Any] = {
        name: {
            "balance": [round(float(b), 4) for b in each.balance_X],
            "bound": [round(float(b), 4) for b in each.bound_X],
            "exported": [round(float(x), 4) for x in each.exported_X],
            "lost": round(float(each.lost_XW.max()), 4),
            "moves": [each.moves.transfers, each.moves.rounds],
            "copies": [sorted(row.tolist(), reverse=True)[:6] for row in each.logcnt],
            "method": list(each.method),
        }
        for name, each in made.items()
    }
    split = resplit(first, later)
    tokens = (slot_loads(first, later) / np.maximum(first.share, 1e-30) * split).round(1)
    found["resplit"] = [round(float(x), 1) for x in np.sort(tokens, axis=1)[:, -3:].ravel()]
    return found


@cache
def recorded() -> list[dict[str, Any]]:
    return list(json.loads(FILE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("seed", range(PROBLEMS))
def test_plans_are_worth_what_was_recorded(seed: int) -> None:
    now, then = worth(seed), recorded()[seed]
    assert now.keys() == then.keys()
    for name in now.keys() - {"resplit"}:
        for key in ("balance", "bound", "exported", "lost"):
            assert now[name][key] == pytest.approx(then[name][key], abs=2e-4), (name, key)
        assert now[name]["moves"] == pytest.approx(then[name]["moves"], abs=1), "equally good names of GPUs may differ"
        assert [now[name][key] for key in ("copies", "method")] == [then[name][key] for key in ("copies", "method")]
    assert now["resplit"] == pytest.approx(then["resplit"], rel=1e-3, abs=0.3)


def worths() -> list[Any]:
    return [worth(seed) for seed in range(PROBLEMS)]


@pytest.mark.slow
def test_plans_are_the_same_on_other_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    # numpy takes its products and solutions from OpenBLAS, which has others for each processor, with other last bits.
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    assert alone(worths) == worths()


def main() -> None:
    FILE.write_text("[\n" + ",\n".join(json.dumps(worth(seed)) for seed in range(PROBLEMS)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
