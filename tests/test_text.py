"""Amounts for people, and lines as wide as a terminal."""

import fcntl
import os
import pty
import struct
import sys
import termios
from pathlib import Path

import pytest

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.text import amount, terminal_width, wrapped


@pytest.mark.parametrize(
    "number,text",
    [(0, "0 B"), (999, "999 B"), (1e3, "1 kB"), (3_280_000, "3.28 MB"), (704.4e6, "704 MB"), (11.32e9, "11.3 GB")],
)
def test_amounts_for_a_person(number: float, text: str) -> None:
    assert amount(number) == text


def test_values_of_any_length_leave_an_error_short_with_its_beginning_and_its_end() -> None:
    for value, most in (("x" * 10**6, 600), ("x " * 10**6, 16_000), (f"{'y' * 450} " * 10**5, 16_000)):
        for kind in (ConfigError, UnsupportedError):
            text = str(kind(f"config.json: no {value} is known; name another"))
            assert text.startswith("config.json: no ") and text.endswith(" name another") and len(text) < most


def test_only_a_terminal_has_a_width(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert terminal_width(file) is None
    assert terminal_width(file) is None, "it is closed"
    other, end = pty.openpty()
    with os.fdopen(end, "w") as terminal:
        assert terminal_width(terminal) is None, "it states no size"
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 66, 0, 0))
        assert terminal_width(terminal) == 66
    os.close(other)


def test_a_refusal_is_wrapped_on_a_terminal_and_has_one_line_a_reason_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = "a + any: " + "; ".join(["one reason"] * 8)
    error = UnsupportedError("it cannot run", [long, "second"])
    assert str(error).splitlines() == ["it cannot run", f"  - {long}", "  - second"]
    monkeypatch.setattr("moe_mk.errors.terminal_width", lambda stream: 50 if stream is sys.stderr else None)
    lines = str(error).splitlines()
    assert len(lines) > 4 and max(map(len, lines)) <= 50 and lines[-1] == "  - second"
    assert lines[2].startswith("    ") and error.reasons == (long, "second")


def test_long_words_are_kept_whole() -> None:
    assert wrapped("see /a/long/path/that/is/one/word now", 12, 2) == "see\n  /a/long/path/that/is/one/word\n  now"
