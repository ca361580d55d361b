"""Files that a verb writes at its end: checked before it works, pictures under exactly the name that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_mk.errors import ConfigError
from moe_mk.external.library import find


def expect_outputs(files: Mapping[str, Path | None]) -> None:
    """Raise ConfigError, by option, for files that could not be written at the end."""
    for option, file in files.items():
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            what = "is a folder" if file.is_dir() else "lies in a folder that does not exist"
            raise ConfigError(f"{option} {file} {what}; name a file in a folder that is there")


def format_of(file: Path) -> str:
    """What a picture is written as, by the end of its name; png where it has none.

    Raises LibraryMissing without matplotlib, ConfigError for an end that it does not know.
    """
    find("matplotlib.figure")
    known = find("matplotlib.backends.backend_agg").FigureCanvasAgg.get_supported_filetypes()
    kind = file.suffix[1:].lower() or "png"
    if kind not in known:
        raise ConfigError(f"--plot {file} ends in none of {', '.join(sorted(known))}; name it {file.stem}.png")
    return kind


def save_picture(figure: Any, file: Path) -> None:
    """Write a figure to exactly this file."""
    figure.savefig(file, dpi=120, format=format_of(file))
