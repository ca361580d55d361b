"""A tiny checkpoint made by the command itself, and the command run in this process, for all tests of this room."""

import re
from collections.abc import Callable
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
import typer.testing
from typer.testing import CliRunner, Result

from moe_mk.lab.cli import app

TINY = ("--experts", "32", "--hidden", "256", "--intermediate", "128")
Invoke = Callable[..., Result]
vars(typer.testing)["_get_command"] = cache(typer.main.get_command)  # made at every call, it takes longer than verbs


@pytest.fixture(autouse=True)
def process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets where gloo listens."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def moe_mk(*words: object) -> Result:
    """Run `moe-mk` in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def printed(*words: object) -> str:
    """What `moe-mk` prints, where it ends with 0."""
    done = moe_mk(*words)
    assert done.exit_code == 0, done.output
    return done.stdout


def usage_error(*words: object) -> str:
    """What `moe-mk` states where it ends with 2."""
    done = moe_mk(*words)
    assert done.exit_code == 2, done.output
    return done.stderr


def rows_of(text: str, head: str) -> list[dict[str, str]]:
    """The rows of a printed table by its heads, of which `head` is the first; cells at the end may be empty."""
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if line.strip().startswith(head))
    heads, *rows = (re.split(r" {2,}", line.strip()) for line in lines[first:])
    found = takewhile(lambda row: len(heads) - len(row) in (0, 1), rows)
    return [dict(zip(heads, (*row, ""), strict=False)) for row in found]


@pytest.fixture
def invoke() -> Invoke:
    return moe_mk


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 experts of 128 x 256, layer 3, FP8. Never write into it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    assert "layer 3, 32 experts of DeepSeek-V3's 256, in 8 groups of 4" in printed("make-checkpoint", folder, *TINY)
    return folder
