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


def paths(value: Any, at: str = "") -> dict[str, str]:
    """The kind of each value by its path; of the items of a list what all of them have. Numbers are alike."""
    if isinstance(value, dict) and value:
        return {at: "keys"} | {
            path: kind for key, held in value.items() for path, kind in paths(held, f"{at}.{key}").items()
        }
    if isinstance(value, list) and value:
        each = [paths(held, f"{at}[]") for held in value]
        common = set.intersection(*map(set, each))
        kinds = {path: [one[path] for one in each] for path in common}
        return {at: "list"} | {path: next((k for k in found if k != "null"), "null") for path, found in kinds.items()}
    if isinstance(value, bool) or value in (None, [], {}):
        return {at: "bool" if isinstance(value, bool) else "null"}
    return {at: "number" if isinstance(value, int | float) else "text"}


def missing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What a script would miss: keys that are gone, kinds that changed. "null" may become anything and back."""
    open_ends = {path for path, kind in now.items() if kind == "null"}
    return [
        f"{path} was {kind}, is {now.get(path, 'gone')}"
        for path, kind in sorted(before.items())
        if not any(path[:n] in open_ends for n in range(len(path) + 1))
        and kind != now.get(path)
        and (kind != "null" or path not in now)
    ]


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
    return paths(DATA.get(verb, lambda whole: whole)(stated))


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
    before = paths({"a": 1, "b": [{"c": "x", "d": None}]})
    assert missing(before, paths({"a": 2.5, "b": [{"c": "y", "d": 1, "e": 0}]})) == []
    assert missing(before, paths({"b": [{"d": 1}]})) == [".a was number, is gone", ".b[].c was text, is gone"]
    assert missing(before, paths({"a": "one", "b": []})) == [".a was number, is text"]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        write_checkpoint(place, TINY)
        made = {verb: snapshot(verb, Path(place)) for verb in sorted(verbs(Path()))}
    FILE.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
