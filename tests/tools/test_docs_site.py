"""The site: every page has its place, links lead to pages or become names, and the reference has every room."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tools import docs_site

ROOT = Path(__file__).resolve().parents[2]


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml; names of python objects stay texts."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def settings() -> dict[str, Any]:
    return dict(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Settings))


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(entry)]


@pytest.mark.slow
def test_every_page_has_one_place_and_every_place_a_page() -> None:
    config = docs_site.on_config(SimpleNamespace(nav=settings()["nav"]))
    placed = pages_of(config.nav)
    made = {"index.md", "changelog.md", *docs_site.reference(ROOT)}
    assert sorted(placed) == sorted({path.name for path in (ROOT / "docs").glob("*.md")} | made)


@pytest.mark.external
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="mkdocs is not installed here; `make docs` builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
