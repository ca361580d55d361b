"""Small repositories that tests of tools write and read."""

from collections.abc import Mapping
from pathlib import Path

import pytest


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write files by their path below a folder; returns the folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class Runs:
    """What a pickle can do to its reader."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("a pickle was opened",)
