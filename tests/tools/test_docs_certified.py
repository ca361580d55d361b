"""The table of certified backends: a row each, stale verdicts noticed, and a refusal that fails the command."""

from pathlib import Path

import pytest

from moe_mk.lab.testing.certificate import Certificate, Failed, Passed
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from tests.testing.broken import transports
from tools import docs_certified
from tools.pages import between

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def test_a_row_by_hand() -> None:
    passed = (Passed("a", 12, "0" * 64), Passed("b", 2, ""))
    certificate = Certificate("x", "experts", "here", {}, passed, (), ("lib itself: tested on its emulation",))
    row = docs_certified.line_of(certificate)
    assert row.startswith("| `x` | certified | 2 | 14 | ") and row.endswith(" | emulated lib |")
    failed = (Failed("a", "order", "...", "..."), Failed("b", "hops", "...", "..."))
    assert "**refused**: hops, order" in docs_certified.line_of(Certificate("x", "experts", "here", {}, (), failed))
    assert "**refused**: nothing was checked" in docs_certified.line_of(Certificate("x", "experts", "", {}, (), ()))


def page(root: Path, *rows: str) -> Path:
    (root / "docs").mkdir(exist_ok=True)
    marks = docs_certified.BEGIN, docs_certified.END
    text = between("before\n{}\n{}\nafter\n".format(*marks), *marks, "\n".join(rows))
    (root / docs_certified.PAGE).write_text(text, encoding="utf-8")
    return root / docs_certified.PAGE


def test_a_table_is_put_between_its_marks_and_read_again(tmp_path: Path) -> None:
    file = page(tmp_path, "| `a` | certified | 1 |", "| `b` | **refused**: hops | 1 |")
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert docs_certified.verdicts(text) == {"a": "certified", "b": "**refused**: hops"}


def test_check_reports_a_stale_table_from_one_with_other_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page(tmp_path, "| `no_ep` | certified | 2 | 26 | 000000000000 |  |")
    assert docs_certified.main(["--check", "--root", str(tmp_path), "no_ep"]) == 0
    page(tmp_path, "| `no_ep` | **refused**: hops | 2 | 26 | 000000000000 |  |")
    assert docs_certified.main(["--check", "--root", str(tmp_path), "no_ep"]) == 1
    assert "stale; run `make certify`" in capsys.readouterr().out


def test_a_wrong_backend_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _ = list(PREPARE_FINALIZE)
    monkeypatch.setitem(PREPARE_FINALIZE._entries, "wrong", transports.ReversesTokens)
    monkeypatch.setitem(PREPARE_FINALIZE._origin, "wrong", "a test")
    page(tmp_path)
    assert docs_certified.main(["--root", str(tmp_path), "wrong"]) == 1
    assert "**refused**: order" in capsys.readouterr().out


def test_the_page_has_every_built_in_backend_and_refuses_none() -> None:
    stated = docs_certified.verdicts((ROOT / docs_certified.PAGE).read_text(encoding="utf-8"))
    assert stated.keys() == set(docs_certified.backends()), "run `make certify`"
    assert set(stated.values()) <= {"certified", "cannot run here"}


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", docs_certified.backends())
def test_every_built_in_backend_is_certified(name: str) -> None:
    ((row, passed),) = docs_certified.lines_of([name], processes=True)
    assert passed, row
