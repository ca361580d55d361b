"""The site: every page has its place, links lead to pages or become names, and the reference has every room."""

import os
import re
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


def test_links_that_leave_the_docs_become_names_and_the_others_stay() -> None:
    text = "[house](../README.md), [all](shapes.md#legend), [gone](no.md), [web](https://a.b), [here](#x)\n"
    fenced = "```text\n[a](../b)\n```\n"
    assert docs_site.links_on_site(text + fenced, "story.md", {"shapes.md"}) == (
        "`house`, [all](shapes.md#legend), [gone](no.md), [web](https://a.b), [here](#x)\n" + fenced
    )
    assert docs_site.links_on_site("[up](../story.md)", "reference/oracle.md", {"story.md"}) == "[up](../story.md)"
    assert docs_site.links_on_site("[`out`](../../LICENSE)", "reference/oracle.md", set()) == "`out`"


def test_the_front_page_links_into_the_site_and_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[a](docs/a.md#b) [l](LICENSE) [w](https://x.y) ![p](docs/p.png)")
    assert docs_site.front_page(tmp_path) == "[a](a.md#b) [l](../LICENSE) [w](https://x.y) ![p](p.png)"


def test_kinds_of_blocks_that_tests_need_are_plain_on_the_site() -> None:
    text = "```text output\n1\n```\n```python\n```\n```text floors\n```\n"
    assert docs_site.one_word_fences(text) == "```text\n1\n```\n```python\n```\n```text\n```\n"


def test_the_reference_has_every_room_with_its_public_modules_and_no_private_one(tmp_path: Path) -> None:
    package = tmp_path / "moe_mk"
    for name, text in {
        "__init__.py": '"""The package."""',
        "flat.py": '"""A room of one file."""\ndef say(): ...',
        "room/__init__.py": '"""A room. It has\nmore."""',
        "room/open.py": "class Thing: ...",
        "room/_shut.py": "class Thing: ...",
        "room/empty.py": "def _private(): ...",
        "kernels/__init__.py": "",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert docs_site.rooms_of(tmp_path) == {"flat": ["moe_mk.flat"], "room": ["moe_mk.room.open"]}
    pages = docs_site.reference(tmp_path)
    assert "- [`moe_mk.room`](room.md): A room. It has more." in pages["reference/index.md"]
    assert re.findall(r"^::: (.+)$", pages["reference/room.md"], re.MULTILINE) == ["moe_mk.room.open"]


@pytest.mark.external
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="mkdocs is not installed here; `make docs` builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
