"""Output files of verbs: checked before the work starts; pictures are written to exactly the given name."""

from __future__ import annotations

import tempfile
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_mk.errors import ConfigError
from moe_mk.external.library import find
from moe_mk.files import replacing, resolved


def expect_outputs(files: Mapping[str, Path | None]) -> None:
    """Raise ConfigError, by option, for files that could not be written at the end, or LibraryMissing for pictures.

    Nothing is left behind.
    """
    for option, file in files.items():
        if file is None or (file.exists() and not file.is_dir() and not file.is_file()):  # a pipe, a terminal
            continue
        if file.is_dir() or not file.absolute().parent.is_dir():
            what = "is a folder" if file.is_dir() else "is in a folder that does not exist"
            raise ConfigError(f"{option} {file} {what}; name a file in an existing folder")
        try:  # as the file will be written: to another one in its folder, which then replaces it
            with tempfile.TemporaryFile(dir=resolved(file).parent):
                pass
        except OSError as problem:
            raise ConfigError(
                f"{option} {file} cannot be written: {problem.strerror}; name a file in a folder of yours"
            ) from problem
    if picture := files.get("--plot"):
        format_of(picture)


def output_file(text: str) -> Path:
    """A type for argparse: a file that can be written. Raises ArgumentTypeError."""
    try:
        expect_outputs({"the file": Path(text)})
    except ConfigError as problem:
        raise ArgumentTypeError(str(problem)) from problem
    return Path(text)


def format_of(file: Path) -> str:
    """The format of a picture by its suffix; png without one.

    Raises LibraryMissing without matplotlib, ConfigError for an unknown suffix.
    """
    find("matplotlib.figure")
    known = find("matplotlib.backends.backend_agg").FigureCanvasAgg.get_supported_filetypes()
    kind = file.suffix[1:].lower() or "png"
    if kind not in known:
        raise ConfigError(f"--plot {file} has none of the suffixes {', '.join(sorted(known))}; name it {file.stem}.png")
    return kind


def new_figure(size: tuple[float, float]) -> Any:
    """An empty figure of a size in inches. Raises LibraryMissing without matplotlib."""
    find("matplotlib")
    figure = find("matplotlib.figure").Figure(figsize=size, layout="constrained")
    find("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def save_picture(figure: Any, file: Path) -> None:
    """Write a figure to exactly this file."""
    kind = format_of(file)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=120, format=kind)
