"""Pages that are written from the sources, the registry and committed results are those that would be written now."""

from pathlib import Path

import pytest

import moe_mk
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from tests.testing.broken.transports import ReversesTokens
from tools import docs_api, docs_certified
from tools.pages import QUICK, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", QUICK)
def test_a_page_is_as_it_would_be_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", name]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("dotted", [*docs_api.FIELDS])
def test_every_field_for_authors_of_backends_has_a_meaning(dotted: str) -> None:
    empty = [name for name, _, meaning in docs_api.fields_of(docs_api.found(dotted)) if not meaning]  # type: ignore[arg-type]
    assert not empty, f"{dotted} does not document {empty}"


def test_everything_listed_has_a_first_line_and_every_public_class_is_listed() -> None:
    for dotted, methods in docs_api.NAMES.items():
        made = docs_api.found(dotted)
        assert docs_api.first_line(made) and all(docs_api.first_line(getattr(made, name)) for name in methods.split())
    listed = {dotted.rpartition(".")[2] for dotted in docs_api.NAMES}
    classes = {name for name in moe_mk.__all__ if isinstance(getattr(moe_mk, name), type) and "Error" not in name}
    assert classes - {"LibraryMissing"} <= listed


def test_a_wrong_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _ = list(PREPARE_FINALIZE)
    monkeypatch.setitem(PREPARE_FINALIZE._entries, "wrong", ReversesTokens)
    monkeypatch.setitem(PREPARE_FINALIZE._origin, "wrong", "a test")
    ((row, passed),) = docs_certified.lines_of(["wrong"], processes=False)
    assert "**refused**: order" in row and not passed


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
