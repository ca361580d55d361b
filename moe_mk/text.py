"""Text for people: sizes in bytes, and lines wrapped to the width of the terminal. Imports nothing of this package."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import TextIO

WIDTH = 140
"""Columns of output to a file or a pipe."""
NARROWEST = 40


def amount(num_bytes: float) -> str:
    """Bytes in decimal units, three digits: 11.3 GB, 704 MB, 12 kB, 999 B."""
    for power, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= power:
            value = num_bytes / power
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream (standard output) writes to; None if it is not a terminal."""
    try:
        columns = os.get_terminal_size((stream or sys.stdout).fileno()).columns
    except (OSError, ValueError, AttributeError):  # a file, a closed or a replaced stream, no stream
        return None
    return max(columns, NARROWEST) if columns else None


def wrapped(text: str, width: int | None, hanging: int) -> str:
    """One line, broken between words at `width` columns. hanging: indent of the following lines. None: as it is."""
    if width is None or len(text) <= width:
        return text
    return textwrap.fill(
        text, width, subsequent_indent=" " * min(hanging, width // 2), break_long_words=False, break_on_hyphens=False
    )


def shortened(text: str) -> str:
    """A text without the middle of words above 500 characters, nor its own above 16,000."""
    text = re.sub(r"(?<!\S)(\S{200})\S{300,}(?<=(\S{200}))", r"\1...\2", text)
    return re.sub(r"(?s)^(.{12000}).{4000,}(.{1000})$", r"\1...\2", text)
