"""The measurements of the house: importers, circles, orphans and frames, on small packages written here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trees import write_tree
from tools.house import House, main, problems, static_measurements

FILES = {
    "moe_mk/__init__.py": "_ROOMS = frozenset('oracle unknown'.split())\n",
    "moe_mk/__main__.py": "from moe_mk.lab.cli import app\n",
    "moe_mk/lab/cli/__init__.py": "def app():\n    import moe_mk.errors\n",
    "moe_mk/errors.py": "",
    "moe_mk/oracle/__init__.py": "from moe_mk.oracle.decide import decide\nfrom moe_mk.errors import X\n",
    "moe_mk/oracle/decide.py": "from moe_mk.oracle import cost\nPLACE = 'moe_mk.oracle.far'\n",
    "moe_mk/oracle/cost.py": "if TYPE_CHECKING:\n    from moe_mk.oracle.decide import D\n",
    "moe_mk/oracle/forgotten.py": "from moe_mk.oracle.cost import C\n",
    "moe_mk/oracle/far/__init__.py": "",
    "moe_mk/oracle/far/by_name.py": "",
    "moe_mk/oracle/plugin.py": "@ORACLES.register('mine')\nclass Mine: ...\n",
    "pyproject.toml": "[project]\nscripts = {moe-mk = 'moe_mk.__main__:main'}\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_tree(tmp_path, FILES)


def test_an_importer_is_a_module_that_is_no_init(repository: Path) -> None:
    house = House(repository)
    assert house.importers()["moe_mk.errors"] == set(), "the command's room and the oracle's re-export"
    assert house.importers()["moe_mk.oracle.cost"] == {"moe_mk.oracle.decide", "moe_mk.oracle.forgotten"}
    assert house.with_one_importer() == {"moe_mk.oracle.decide": "moe_mk.oracle.cost"}


def test_a_circle_is_one_of_imports_that_are_not_for_types(repository: Path) -> None:
    assert House(repository).circles() == []
    write_tree(repository, {"moe_mk/oracle/cost.py": "from moe_mk.oracle.decide import D\n"})
    assert House(repository).circles() == [["moe_mk.oracle.cost", "moe_mk.oracle.decide"]]


def test_check_fails_on_an_orphan_and_on_a_file_that_is_too_long(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check", "--root", str(repository)]) == 1
    assert "moe_mk.oracle.forgotten" in capsys.readouterr().out
    (repository / "moe_mk/oracle/forgotten.py").unlink()
    write_tree(repository, {"tests/test_a.py": "#\n" * 501})
    assert main(["--check", "--root", str(repository)]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        "long files: 1, at most 0: make something smaller", "  tests/test_a.py: 501 lines",
    ]  # fmt: skip
    write_tree(repository, {"tests/test_a.py": "#\n" * 500})
    assert main(["--check", "--root", str(repository)]) == 0


def test_docstrings_that_state_no_subject_are_counted(repository: Path) -> None:
    vague = ['"""What travels between two ranks."""', '"""Those of the kernels here."""', '"""Of one rank."""']
    good = ['"""Tokens that travel between two ranks."""', '"""Whatever the caller passes, as a list."""']
    functions = [f"def f{number}():\n    {text}\n" for number, text in enumerate([*vague, *good])]
    write_tree(repository, {"moe_mk/errors.py": "".join(functions)})
    measured = static_measurements(House(repository))
    assert measured["docstrings without a subject"] == len(vague)
    assert "  moe_mk/errors.py: 'Of one rank.' states no subject" in problems(measured)
