"""Optional libraries: found, missing, broken, unknown."""

import importlib
import json
import sys
from types import ModuleType

import pytest

from moe_mk.errors import LibraryMissing
from moe_mk.external.library import LIBRARIES, Library, find, installed, installed_version


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(
        "moe_mk.external.library.LIBRARIES",
        {"no_such_library": Library("no_such_library", "tests", "pip install 'moe-mk[nothing]'", ("no-such",))},
    )
    return "no_such_library"


def test_a_missing_library_states_how_to_get_it(absent: str) -> None:
    with pytest.raises(LibraryMissing) as caught:
        find(absent)
    assert str(caught.value) == (
        "no_such_library (tests) cannot be imported\n  - No module named 'no_such_library'\n"
        "  - pip install 'moe-mk[nothing]'"
    )
    assert isinstance(caught.value, ImportError)
    assert installed() == frozenset() and installed_version(absent) is None


@pytest.mark.parametrize("error", [OSError("libcudart.so.13: cannot open"), RuntimeError("no driver")])
def test_a_library_that_fails_in_its_own_way_is_missing_too(
    absent: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr("moe_mk.external.library.importlib.import_module", fail)
    with pytest.raises(LibraryMissing, match=f"{type(error).__name__}: {error}"):
        find(absent)


def test_an_unknown_name_is_answered() -> None:
    with pytest.raises(LibraryMissing, match=r"no optional library is called 'deep_epp'; did you mean 'deep_ep'\?"):
        find("deep_epp")


def test_a_library_and_its_modules_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_mk.external.library.LIBRARIES", {"json": Library("json", "tests", "it is here", ())})
    assert find("json") is json and find("json.decoder") is importlib.import_module("json.decoder")
    assert installed() == frozenset({"json"}) and installed_version("json") == "unknown"


def test_looking_imports_nothing() -> None:
    before = set(sys.modules)
    installed()
    assert not {name for name in set(sys.modules) - before if name in LIBRARIES}


def test_the_table_is_keyed_by_module_and_complete() -> None:
    for name, library in LIBRARIES.items():
        assert name == library.module and library.purpose and library.install
