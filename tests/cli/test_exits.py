"""Which code an error stands for, and that it is reported once."""

import pytest
import typer

from moe_mk.errors import CommError, ConfigError, LibraryMissing, MoEMKError, ShapeError, UnsupportedError, WeightError
from moe_mk.lab.cli.exits import RanksFailed, with_exit_code


def raising(problem: BaseException) -> int:
    @with_exit_code
    def command() -> int:
        raise problem

    with pytest.raises(typer.Exit) as ended:
        command()
    return int(ended.value.exit_code)


@pytest.mark.parametrize(
    "problem,code",
    [
        (CommError("late", rank=0, phase="dispatch"), 1),
        (ConfigError("c"), 2),
        (ShapeError("s"), 2),
        (WeightError("w"), 2),
        (UnsupportedError("u", ["because"]), 3),
        (LibraryMissing("l", ["pip"]), 3),
        (RanksFailed("two words", 3), 3),
    ],
)
def test_an_error_is_one_message_and_a_code(problem: MoEMKError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(problem) == code
    stated = capsys.readouterr()
    assert stated.err == f"moe-mk: {problem}\n" and stated.out == ""


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "moe-mk: interrupted\n"


def test_only_the_first_rank_of_a_launcher_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert raising(ConfigError("wrong")) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert raising(ConfigError("wrong")) == 2
    assert capsys.readouterr().err == "moe-mk: wrong\n"


def test_results_are_codes() -> None:
    for result, code in ((None, 0), (0, 0), (1, 1)):
        with pytest.raises(typer.Exit) as ended:
            with_exit_code(lambda result=result: result)()
        assert ended.value.exit_code == code
