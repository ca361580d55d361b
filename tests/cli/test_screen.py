"""Labels and widths."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from moe_mk.lab.cli.screen import Screen
from moe_mk.text import WIDTH


def test_a_long_label_does_not_run_into_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("verdict", "tested up to", "violated law", "a label that is long"):
        Screen().fact(label, "text")
        assert capsys.readouterr().out.split(label)[1].startswith(" "), label


def test_texts_start_below_each_other_however_long_a_label_is(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().facts([("short", "a"), ("a_very_long_label", "b")])
    assert capsys.readouterr().out.splitlines() == ["short              a", "a_very_long_label  b"]


def test_a_file_is_wide_and_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    assert screen.console.width == WIDTH == 140
    with screen.progress("load") as advance:
        advance("check", 1, 2)
    assert capsys.readouterr().out == ""


def test_a_quiet_screen_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(quiet=True).fact("label", "text")
    assert capsys.readouterr().out == ""


def test_names_of_files_that_are_no_text_are_written_as_their_codes(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().fact("written", "caf\udce9")
    assert capsys.readouterr().out.split() == ["written", "caf\\udce9"]


def test_a_stream_without_a_character_has_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    Screen().fact("load", "\u2588\u2588 2 assignments")
    assert written.getvalue().split() == [b"load", b"??", b"2", b"assignments"]


def test_a_text_on_a_terminal_continues_below_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.console = Console(force_terminal=True, no_color=True, width=40, soft_wrap=True, highlight=False)
    screen.fact("label", "one two three four five six seven eight nine")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert lines == ["label       one two three four five six", "            seven eight nine"]
