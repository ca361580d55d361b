"""Which marks CI runs for a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import MARKS_OF_FOLDERS
from tools.touched import ROOT, SOURCES, changed_files, marks_for


@pytest.mark.parametrize(
    ("changed", "marks"),
    [
        ([], ["thorough"]),
        (["README.md", "moe_mk/router/gate.py"], ["thorough"]),
        (["moe_mk/lab/testing/emulated/mori/ops.py"], ["thorough", "emulated"]),
        (["tests/comm/network/test_ring.py"], ["thorough", "network"]),
        (["moe_mk/comm/network/heap.py", "moe_mk/comm/threads.py"], ["thorough", "emulated", "network"]),
        (["tests/conftest.py"], ["thorough", "emulated", "network"]),
        (None, ["thorough", "emulated", "network"]),
    ],
)
def test_a_change_runs_the_tests_of_what_it_touches(changed: list[str] | None, marks: list[str]) -> None:
    assert marks_for(changed) == marks


def test_without_a_main_branch_nothing_is_known(tmp_path: Path) -> None:
    assert changed_files(tmp_path) is None
    subprocess.run(["git", "init", "-q", "-b", "other", tmp_path], check=True)
    assert changed_files(tmp_path) is None


def test_commits_of_a_branch_and_uncommitted_files_count(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        given = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *given, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("first", "second"):
        (tmp_path / name).touch()
        git("add", ".")
        git("commit", "-m", name)
    assert changed_files(tmp_path) is None, "nothing reports which commits of the main branch were tested"
    git("checkout", "-b", "change")
    (tmp_path / "third").touch()
    git("add", ".")
    git("commit", "-m", "third")
    (tmp_path / "fourth").touch()
    (tmp_path / "first").write_text("changed")
    assert changed_files(tmp_path) == ["first", "third", "fourth"]


def test_every_path_exists() -> None:
    paths = [path for own in SOURCES.values() for path in own] + list(MARKS_OF_FOLDERS)
    assert not [path for path in paths if not list(ROOT.glob(f"{path}*"))]
    assert set(SOURCES) | {"thorough"} == set(MARKS_OF_FOLDERS.values())
