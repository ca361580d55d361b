"""The door opens at once: help, version, completion and mistakes import no torch."""

import inspect
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

from moe_mk.experts.base import EXPERTS
from moe_mk.lab.checkpoints.checkpoint_shape import FORMATS
from moe_mk.lab.checkpoints.convert import TARGETS
from moe_mk.lab.cli import app, words
from moe_mk.lab.plan.exchange import WIRES
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from tests.cli.conftest import Invoke

VERBS = {
    *"run explain place doctor schema make-checkpoint convert derive inspect-checkpoint inspect".split(),
    *"certify chaos bench tune compile bisect judge demo waits fit".split(),
    *(f"plan {verb}" for verb in "exchange tables held-out relay volumes paths timeline".split()),
    *("trace check", "trace replay"),
}
SLOW = ("torch", "numpy", "scipy", "yaml", "safetensors")
AT_ONCE = """
import sys
from typer.testing import CliRunner
from moe_mk.lab.cli import app

quiet = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
for words in sys.stdin.read().splitlines():
    *command, expected = words.split()
    env = {}
    if command[:1] == ["complete"]:
        words, command = "moe-mk " + " ".join(command[1:]), []
        env = quiet | {"_MOE_MK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = CliRunner().invoke(app, command, prog_name="moe-mk", env=env)
    assert str(done.exit_code) == expected and done.output, (command, done.output)
    print(*[name for name in sys.argv[1].split(",") if name in sys.modules], end="")
"""


def verbs(command: Any, path: str = "") -> Iterator[tuple[str, Callable[..., object]]]:
    if not hasattr(command, "commands"):
        yield path.strip(), inspect.unwrap(command.callback)
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, f"{path} {name}")


def test_every_verb_is_there() -> None:
    assert {name for name, _ in verbs(typer.main.get_command(app))} == VERBS


def test_what_needs_no_layer_imports_no_torch() -> None:
    helps = [f"{verb} --help 0" for verb in ("", "plan", *sorted(VERBS))]
    mistakes = ["run 2", "run x --nothing 2", "explain --ranks many 2", "rnu 2", "plan nothing 2", "demo 2"]
    completions = ["complete ma 0", "complete explain --nod 0", "complete plan ex 0"]
    lines = [*helps, "--version 0", *mistakes, *completions]
    command = [sys.executable, "-c", AT_ONCE, ",".join(SLOW)]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_the_example_of_a_help_text_runs(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counts.json").write_text(json.dumps([[3, 1, 4, 1, 5, 9, 2, 6] * 4]))
    for verb in ("place", "bisect", "plan", *sorted(verb for verb in VERBS if verb.startswith("plan "))):
        stated = " ".join(invoke(*verb.split(), "--help").stdout.split())
        example = shlex.split(stated.split("Example: moe-mk ")[1])
        assert example[: len(verb.split())] == verb.split()
        done = invoke(*example)
        assert done.exit_code == 0, f"{example}: {done.output}"
    assert "(--loads FILE | --trace FILE) (--gpus N | --preset NAME)" in " ".join(
        invoke("place", "--help").stdout.split()
    )


def test_help_lists_the_words_that_the_library_takes() -> None:
    assert words.FORMATS.split(", ") == list(FORMATS)
    assert words.TARGETS.split(", ") == list(TARGETS)
    built_in = [
        {name for name in each if each.origin(name).startswith("moe_mk.")} for each in (EXPERTS, PREPARE_FINALIZE)
    ]
    assert [set(listed.split(", ")) for listed in (words.EXPERTS, words.TRANSPORTS)] == built_in
    assert words.WIRES.split(", ") == list(WIRES)


def test_the_version_is_the_installed_one(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("--version").stdout == f"moe-mk {metadata.version('moe-mk')}\n"

    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("moe_mk.lab.cli.version.version", nothing)
    assert invoke("--version").stdout == "moe-mk not installed\n"
