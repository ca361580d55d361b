"""Labels, widths and amounts."""

from __future__ import annotations

import pytest

from moe_mk.cli.screen import FILE_WIDTH, Screen, amount


def test_texts_start_below_each_other_however_long_a_label_is(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().facts([("short", "a"), ("a_very_long_label", "b")])
    assert capsys.readouterr().out.splitlines() == ["short              a", "a_very_long_label  b"]


def test_a_file_is_wide_and_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    assert screen.console.width == FILE_WIDTH == 140
    with screen.progress("load") as advance:
        advance("check", 1, 2)
    assert capsys.readouterr().out == ""


def test_a_quiet_screen_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(quiet=True).fact("label", "text")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "number,text",
    [(0, "0 B"), (999, "999 B"), (1e3, "1 kB"), (3_280_000, "3.28 MB"), (704.4e6, "704 MB"), (11.32e9, "11.3 GB")],
)
def test_amounts_for_a_person(number: float, text: str) -> None:
    assert amount(number) == text


def test_names_of_files_that_are_no_text_are_written_as_their_codes(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().fact("written", "caf\udce9")
    assert capsys.readouterr().out.split() == ["written", "caf\\udce9"]
