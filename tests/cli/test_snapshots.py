"""What scripts read: the JSON of every verb keeps its keys. More may come; none may go or change its type.

python tests/cli/test_snapshots.py      writes tests/cli/snapshots.json anew, after a change that is meant
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.cli import app

FILE = Path(__file__).parent / "snapshots.json"
TINY = CheckpointShape(num_experts=16, hidden_size=128, intermediate_size=128)
SIZES = ("--hidden", "128", "--intermediate", "128")


def verbs(folder: Path) -> dict[str, list[str]]:
    """Every verb that prints JSON, with arguments that end at once."""
    return {
        "inspect-checkpoint": ["inspect-checkpoint", str(folder), "--json"],
        "doctor": ["doctor", "--json"],
        "explain": ["explain", "deepseek_v3", "--device", "h200", "--ranks", "32", "--json"],
        "schema": ["schema"],
        "certify": ["certify", "no_ep", "--out", str(folder / "certificate.json"), "--json"],
        "bisect": ["bisect", "reference", "torch_cpu", "--exact", *SIZES, "--json"],
        "tune": ["tune", "cpu_native", *SIZES, "--tokens", "1", "--tuned-dir", str(folder / "tuned"), "--json"],
    }


def shape_of(value: Any) -> Any:
    """Keys and types: of a list the shape of its items together, numbers alike."""
    if isinstance(value, dict):
        return {key: shape_of(held) for key, held in sorted(value.items())}
    if isinstance(value, list):
        merged: Any = None
        for held in value:
            merged = together(merged, shape_of(held))
        return [] if merged is None else [merged]
    if isinstance(value, bool) or value is None:
        return "bool" if isinstance(value, bool) else "null"
    return "number" if isinstance(value, int | float) else "text"


def together(one: Any, other: Any) -> Any:
    """What two items of a list have in common: keys that both have."""
    if one is None or one == other:
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: together(one[key], other[key]) for key in one.keys() & other.keys()}
    if isinstance(one, list) and isinstance(other, list):
        return [together(one[0], other[0])] if one and other else one or other
    return other if one == "null" else one


def missing(before: Any, now: Any, path: str = "") -> list[str]:
    """What a script would miss: keys that are gone, types that changed. "null" may become anything and back."""
    if "null" in (before, now) or before in ([], {}):
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        gone = [f"{path}.{key} is gone" for key in sorted(before.keys() - now.keys())]
        return gone + [
            line for key in before.keys() & now.keys() for line in missing(before[key], now[key], f"{path}.{key}")
        ]
    if isinstance(before, list) and isinstance(now, list):
        return missing(before[0], now[0], f"{path}[]") if before and now else []
    return [] if before == now else [f"{path} was {before}, is {now}"]


def answer(arguments: list[str]) -> Any:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


# Names of libraries, models and the like are data, not contract: one of each stands for all.
DATA: dict[str, Callable[[Any], Any]] = {
    "schema": lambda stated: (
        {key: stated[key] for key in ("title", "type", "required")} | {"properties": sorted(stated["properties"])}
    ),
    "doctor": lambda stated: stated | {"libraries": list(stated["libraries"].values()), "devices": {}},
    "certify": lambda stated: stated | {"laws": {}, "backend": {**stated["backend"], "traits": {}}},
    "tune": lambda stated: stated | {"points": [{**point, "parameters": {}} for point in stated["points"]]},
}


def snapshot(verb: str, folder: Path) -> Any:
    stated = answer(verbs(folder)[verb])
    return shape_of(DATA.get(verb, lambda whole: whole)(stated))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ds3")
    write_checkpoint(path, TINY)
    return path


@pytest.mark.parametrize("verb", sorted(verbs(Path())))
def test_the_json_of_a_verb_keeps_its_keys(verb: str, folder: Path) -> None:
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    assert missing(kept[verb], snapshot(verb, folder)) == []


def test_a_key_that_goes_is_noticed() -> None:
    before = shape_of({"a": 1, "b": [{"c": "x", "d": None}]})
    assert missing(before, shape_of({"a": 2.5, "b": [{"c": "y", "d": 1, "e": 0}]})) == []
    assert missing(before, shape_of({"b": [{"d": 1}]})) == [".a is gone", ".b[].c is gone"]
    assert missing(before, shape_of({"a": "one", "b": []})) == [".a was number, is text"]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        write_checkpoint(place, TINY)
        made = {verb: snapshot(verb, Path(place)) for verb in sorted(verbs(Path()))}
    FILE.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
