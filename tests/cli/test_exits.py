"""Which code an error stands for, and that it is reported once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from moe_mk.errors import CommError, ConfigError, LibraryMissing, MoEMKError, ShapeError, UnsupportedError, WeightError
from moe_mk.lab.cli.app import main
from moe_mk.lab.cli.exits import ALONE_S, RanksFailed, leave_at_once, with_exit_code
from moe_mk.lab.cli.world import world_of
from tests.support.tiers import quick_where

CALL = "typer._click.Context.invoke"


def raising(problem: BaseException) -> int:
    @with_exit_code
    def command() -> int:
        raise problem

    with pytest.raises(typer.Exit) as ended:
        command()
    return int(ended.value.exit_code)


@pytest.mark.parametrize("problem,code", [
    (CommError("late", rank=0, phase="dispatch"), 1), (ConfigError("c"), 2), (ShapeError("s"), 2),
    (WeightError("w"), 2), (UnsupportedError("u", ["because"]), 3), (LibraryMissing("l", ["pip"]), 3),
    (RanksFailed("two words", 3), 3),
])  # fmt: skip
def test_an_error_is_one_message_and_a_code(problem: MoEMKError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(problem) == code
    stated = capsys.readouterr()
    assert stated.err == f"moe-mk: {problem}\n" and stated.out == ""


@pytest.mark.parametrize(
    "place,raised,ends",
    [
        *(
            (place, "raise KeyboardInterrupt(15)", (143, "ended by SIGTERM"))
            for place in ("Path.cwd", "Path.read_text", CALL)
        ),
        ("Path.read_text", "raise KeyboardInterrupt", (130, "interrupted")),
        ("Path.cwd", "raise OSError(2, '')", (2, "the working folder was removed; change to one that exists")),
        ("typer.Typer", "signal.raise_signal(2)", (130, "")),  # while modules are imported
    ],
)
def test_what_ends_a_command_has_its_code_and_one_line(
    place: str, raised: str, ends: tuple[int, str], tmp_path: Path
) -> None:
    # Before, inside and outside of a verb. Dataclasses exec texts; only `python -m` looks for what has passed that.
    (tmp_path / "command.py").write_text(f"""
import os, signal, sys, typer
from pathlib import Path
from moe_mk.__main__ import main
signal.signal(2, signal.default_int_handler)  # a shell's background jobs ignore it
{place} = lambda *given, **named: exec("{raised}")
sys.argv = ["moe-mk", "schema"]
main()
""")
    paths = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    done = subprocess.run([sys.executable, "-m", "command"], capture_output=True, text=True, env=paths, check=False)
    assert (done.returncode, done.stderr) == (ends[0], ends[1] and f"moe-mk: {ends[1]}\n")


def test_streams_that_were_closed_before_the_start_change_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr("os._exit", left.append)
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert raising(ConfigError("c")) == 2 and raising(KeyboardInterrupt()) == 130
    leave_at_once(3)
    assert left == [3]


@pytest.mark.parametrize(
    "words,code",
    quick_where(
        lambda words, _: "-h" in words, [("--help", 0), ("--version", 0), ("schema", 0), ("nosuch", 2), ("run", 2)]
    ),
)
def test_a_stream_that_is_full_is_one_message_and_a_code(
    words: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["moe-mk", *words.split()])
    monkeypatch.setitem(main.__globals__, "end_in_order", lambda: None)
    for full in (("stdout",), ("stderr",), ("stdout", "stderr")):
        with monkeypatch.context() as patch:
            for name in full:
                patch.setattr(sys, name, open("/dev/full", "w", encoding="utf-8"))  # noqa: SIM115
            with pytest.raises(SystemExit) as ended:
                main()
        stated = capsys.readouterr().err
        assert ended.value.code == (code if full == ("stderr",) else 2), full
        assert code or full != ("stdout",) or "output or a temporary file: No space left on device" in stated


@pytest.mark.parametrize("wrong", ["RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("rank,size", [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "0")])
def test_variables_that_are_no_rank_of_a_launcher_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, size: str, wrong: str
) -> None:
    sizes = "LOCAL_WORLD_SIZE" if wrong == "LOCAL_RANK" else "WORLD_SIZE"
    right = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (right | {wrong: rank, sizes: size}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(typer.Exit) as ended:
        with_exit_code(lambda: world_of(None, 1).size)()
    assert ended.value.exit_code == 2
    stated = capsys.readouterr().err
    assert f"{wrong}={rank}, {sizes}={size}" in stated and "the environment has RANK=" in stated


def test_the_first_rank_of_a_launcher_prints_an_error_and_another_one_what_it_has_met_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[tuple[float, str]] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert raising(ConfigError("wrong")) == 2
    assert waited == [(ALONE_S, "")] and capsys.readouterr().err == "moe-mk: rank 1: wrong\n"
    for local in (1, 0):  # of a lost peer, the first rank of each host states it at once
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert raising(CommError("gone", rank=1, phase="dispatch")) == 1 and len(waited) == 2
    monkeypatch.setenv("RANK", "0")
    assert raising(ConfigError("wrong")) == 2
    assert capsys.readouterr().err.endswith("moe-mk: wrong\n") and len(waited) == 2
