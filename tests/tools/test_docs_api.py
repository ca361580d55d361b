"""The reference of docs/api.md and the tables of fields for authors of backends are those of the sources."""

import pytest

import moe_mk
from tools import docs_api


def test_the_pages_show_the_signatures_and_fields_of_the_sources() -> None:
    assert docs_api.main(["--check"]) == 0, "run python tools/docs_api.py"


@pytest.mark.parametrize("dotted", [*docs_api.FIELDS])
def test_every_field_has_a_meaning(dotted: str) -> None:
    empty = [name for name, _, meaning in docs_api.fields_of(docs_api.found(dotted)) if not meaning]  # type: ignore[arg-type]
    assert not empty, f"{dotted} does not document {empty}"


def test_everything_listed_has_a_first_line_and_every_public_class_is_listed() -> None:
    for dotted, methods in docs_api.NAMES.items():
        made = docs_api.found(dotted)
        assert docs_api.first_line(made) and all(docs_api.first_line(getattr(made, name)) for name in methods.split())
    listed = {dotted.rpartition(".")[2] for dotted in docs_api.NAMES}
    classes = {name for name in moe_mk.__all__ if isinstance(getattr(moe_mk, name), type) and "Error" not in name}
    assert classes - {"LibraryMissing"} <= listed
