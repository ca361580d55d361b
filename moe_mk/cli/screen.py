"""Terminal output: labelled lines, tables and progress bars; silent on every rank except the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

Advance = Callable[[str, int, int], None]
LABEL = 12
FILE_WIDTH = 140
"""Columns of output to a file or a pipe."""


class Screen:
    """A rich console on standard output."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = FILE_WIDTH

    def fact(self, label: str, text: str | Text, width: int = LABEL) -> None:
        """Print one labelled line. Undecodable characters, as in file names, are escaped."""
        if isinstance(text, str):
            text = text.encode("utf-8", "backslashreplace").decode("utf-8")
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


def amount(num_bytes: float) -> str:
    """Bytes in readable units: 11.3 GB, 704 MB, 12 kB."""
    for power, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= power:
            value = num_bytes / power
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes:.0f} B"
