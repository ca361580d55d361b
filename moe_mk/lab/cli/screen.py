"""Terminal output: labelled lines, tables and progress bars; silent on every rank except the first."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from moe_mk.text import WIDTH, wrapped

Advance = Callable[[str, int, int], None]
LABEL = 12


def table_of(heads: Iterable[str], left: Container[str] = (), **options: Any) -> Table:
    """A table without borders; columns are right-aligned, except those in `left`."""
    table = Table(**{"box": None, "title_justify": "left", "padding": (0, 2, 0, 0), **options})
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right")
    return table


class Screen:
    """A rich console on standard output, where characters that its encoding lacks are question marks."""

    def __init__(self, *, quiet: bool = False) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = WIDTH

    def fact(self, label: str, text: str | Text, width: int = LABEL) -> None:
        """Print one labelled line, wrapped on a terminal. Undecodable characters, as in file names, are escaped."""
        width = max(width, len(label) + 1)
        if isinstance(text, str):
            text = text.encode("utf-8", "backslashreplace").decode("utf-8")
            columns = self.console.width if self.console.is_terminal else None
            lines = (f"{'':<{width}}{text}").split("\n")
            text = "\n".join(wrapped(line, columns, hanging=width) for line in lines)[width:]
        self.console.print(Text.assemble((f"{label:<{width}}", "bold cyan"), text))

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Print labelled lines with aligned texts."""
        pairs = list(pairs)
        width = max([LABEL, *(len(label) + 2 for label, _ in pairs)])
        for label, text in pairs:
            self.fact(label, text, width)

    @contextmanager
    def progress(self, what: str, *, in_bytes: bool = True) -> Iterator[Advance]:
        """A progress bar, updated with (stage, done, total); shown in a terminal while it runs."""
        amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
        columns = (TextColumn("[bold cyan]{task.description:<12}"), BarColumn(30), amount, TimeRemainingColumn())
        off = not self.console.is_terminal or self.console.quiet
        with Progress(*columns, console=self.console, transient=True, disable=off) as bar:
            task = bar.add_task(what, total=None)
            yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
