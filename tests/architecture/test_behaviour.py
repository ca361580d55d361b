"""What shipped models cost on shipped devices: the cheapest pairs with their prices, the sum of all prices, bytes.

The golden table (tests/oracle/) has winners and rejections; this has the numbers, which a refactoring must not change.

python tests/architecture/test_behaviour.py      writes behaviour.json anew, after a change that is meant
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moe_mk.config import shipped_devices, shipped_models
from moe_mk.lab.cli import app

FILE = Path(__file__).parent / "behaviour.json"
WORKLOADS = {"decode": (16, 16), "prefill": (16, 4096)}
"""Ranks, and tokens of each."""
SHOWN = 3
"""Pairs whose price is kept by name."""


@cache
def all_libraries() -> str:
    return ",".join(sorted(json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["libraries"]))


def prices(model: str, device: str, workload: str) -> dict[str, Any]:
    """With every library there is; a problem that nothing serves has no price."""
    ranks, tokens = WORKLOADS[workload]
    words = f"explain {model} --device {device} --ranks {ranks} --tokens {tokens} --installed {all_libraries()} --json"
    done = CliRunner().invoke(app, words.split())
    if done.exit_code:
        return {"refused": True}
    decision = json.loads(done.stdout)
    pairs = {f"{each['prepare_finalize']} + {each['experts']}": each for each in decision["verdicts"]}
    prices = [(name, each["cost_us"]) for name, each in pairs.items() if each["cost_us"] is not None]
    made = {"chosen": next(name for name, each in pairs.items() if each["chosen"])}
    made |= {name: decision[name] for name in ("wire", "compute")} | {"pairs": len(prices)}
    made |= {"cheapest_us": dict(prices[:SHOWN]), "all_us": round(sum(price for _, price in prices), 1)}
    return made | {"bytes": {name: count for name, count in decision["bytes"].items() if name != "buffers_by"}}


@cache
def recorded() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def problems() -> list[tuple[str, str, str]]:
    return [(m, d, w) for m in shipped_models() for d in shipped_devices() for w in WORKLOADS]


@pytest.mark.slow
@pytest.mark.parametrize("model", shipped_models())
def test_prices_and_bytes_are_those_recorded(model: str) -> None:
    asked = [problem for problem in problems() if problem[0] == model]
    assert {" ".join(p): prices(*p) for p in asked} == {" ".join(p): recorded()[" ".join(p)] for p in asked}


def test_every_shipped_model_and_device_is_recorded() -> None:
    assert {" ".join(problem) for problem in problems()} == set(recorded())
    assert sum("chosen" in value for value in recorded().values()) > 80


def main() -> None:
    lines = [f"{json.dumps(' '.join(problem))}: {json.dumps(prices(*problem))}" for problem in problems()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
