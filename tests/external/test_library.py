"""Optional libraries: found, missing, broken, unknown."""

import shutil
import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest

from moe_mk.errors import LibraryMissing
from moe_mk.external.library import COMPILER, EMULATIONS, LIBRARIES, Library, find, installed, installed_version, load
from moe_mk.kernels import native


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


@pytest.mark.parametrize(
    "part,there,found",
    [
        ("", {"b", "c"}, "b"), ("", {"c"}, "c"), ("", {"a"}, ""), ("ep", {"b", "c", "c.ep"}, "c"),
        ("ep", {"b", "c"}, ""),
    ],
)  # fmt: skip
def test_the_first_module_with_its_part_is_the_library(
    monkeypatch: pytest.MonkeyPatch, part: str, there: set[str], found: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    library = Library("a", "tests", "pip", modules=("b", "c"), part=part)
    assert library.found_as == found
    monkeypatch.setattr("moe_mk.external.library.LIBRARIES", {"a": library})
    monkeypatch.setattr("importlib.import_module", lambda name: name)
    assert find("a.x") == f"{found or 'a'}.x" and installed() == ({"a"} if found else set())
    assert installed_version("a") == ("unknown" if found else None)


@pytest.mark.parametrize("there,expected", [({"deep_ep": "2"}, "2"), ({"deep_ep": "2", "sgl-deep-ep": "1"}, "1")])
def test_the_version_is_that_of_the_first_distribution_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, str], expected: str
) -> None:
    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("moe_mk.external.library.version", version)
    compiler = native.find_compiler(shutil.which)
    assert (installed_version("deep_ep"), installed_version(COMPILER)) == (expected, compiler and compiler.version)


@pytest.mark.parametrize("name", ["deep_ep", "flashinfer.comm"])
def test_an_emulation_is_loaded_where_it_is_allowed_and_the_library_is_missing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = set[str]()
    root = name.partition(".")[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module if module in found else None)
    monkeypatch.setattr("importlib.import_module", lambda module: module)
    assert load(name, allow_emulated=True) == f"{EMULATIONS}.{name}"
    assert load(name, allow_emulated=True, emulation="mine") == "mine"
    with pytest.raises(LibraryMissing, match=rf"{root} \(.*\) is not installed\n  - pip.*kernel.allow_emulated = true"):
        load(name, allow_emulated=False, emulation="mine")
    found.add(root)
    assert load(name, allow_emulated=True, emulation="mine") == load(name, allow_emulated=False) == name


def test_looking_imports_nothing() -> None:
    before = set(sys.modules)
    installed()
    assert not {name for name in set(sys.modules) - before if name in LIBRARIES}


def test_the_table_is_keyed_by_module_and_complete() -> None:
    for name, library in LIBRARIES.items():
        assert name == library.module and library.purpose and library.install
