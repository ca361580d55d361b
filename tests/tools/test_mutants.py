"""Mutants: a change that a row's tests notice, one that they do not, and lists that cannot be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trees import write_tree
from tools import mutants
from tools.mutants import LIST, ROOT, Mutant, chosen, main, problems_of, read_mutants

FILES = {
    "moe_mk/__init__.py": "",
    "moe_mk/sums.py": "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n",
    "tests/rows.yaml": 'sections:\n- title: Sums\n  rows:\n    "1": Sums add up\n    "2": Twice is twice\n',
    "tests/conftest.py": "",
    "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["row", "slow", "gpu"]\n',
    "tests/test_sums.py": (
        "import pytest\nfrom moe_mk.sums import add, twice\n\n"
        "@pytest.mark.row(1)\ndef test_sums():\n    assert add(2, 3) == 5\n\n"
        "@pytest.mark.row(2)\ndef test_twice():\n    assert twice(0) == 0\n"
    ),
}
ENTRIES = {
    "killed": '- {row: "1", name: minus, file: moe_mk/sums.py, old: a + b, new: a - b}\n',
    "survived": '- {row: "2", name: three times, file: moe_mk/sums.py, old: 2 * a, new: 3 * a}\n',
    "broken": '- {row: "1", name: no such name, file: moe_mk/sums.py, old: def add(, new: def plus(}\n',
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_tree(tmp_path, FILES)


@pytest.mark.parametrize("state", ENTRIES)
def test_the_tests_of_its_row_judge_a_mutant(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(mutants, "ROOT", repository)
    (repository / LIST).write_text(ENTRIES[state])
    before = (repository / "moe_mk/sums.py").read_text()
    assert main(["--root", str(repository)]) == (0 if state == "killed" else 1)
    printed = capsys.readouterr().out
    assert printed.startswith(state), printed
    assert f"{int(state == 'killed')} of 1 mutants killed" in printed
    assert (repository / "moe_mk/sums.py").read_text() == before


def test_a_list_that_cannot_be_run_is_refused_line_by_line(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = '- {row: "2", name: two places, file: moe_mk/sums.py, old: return, new: yield}\n'
    away = '- {row: "1", name: no such text, file: moe_mk/sums.py, old: a * b, new: a - b}\n'
    nowhere = '- {row: "9", name: no such row, file: moe_mk/sums.py, old: a + b, new: a - b}\n'
    (repository / LIST).write_text(twice + away + nowhere)
    assert main(["--root", str(repository)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert (
        "'return' is 2 times" in lines[0] and "'a * b' is 0 times" in lines[1] and "no test names the row" in lines[2]
    )


def test_a_sample_is_the_same_on_every_machine_and_its_other_mutants_do_not_change_it() -> None:
    all_of_them = [Mutant(str(n), f"mutant {n}", "a.py", "a", "b") for n in range(30)]
    sample = chosen(all_of_them, [], 10)
    assert len(sample) == 10 and sample == chosen(all_of_them, [], 10)
    fewer = [mutant for mutant in all_of_them if mutant is not sample[0]]
    assert set(sample[1:]) <= set(chosen(fewer, [], 10))
    assert chosen(all_of_them, ["3", "4"], None) == all_of_them[3:5]


def test_every_mutant_of_the_list_applies_to_a_row_with_tests() -> None:
    listed = read_mutants(ROOT / LIST)
    assert list(problems_of(listed, ROOT, mutants.tests_of_rows(ROOT))) == []
    assert len(listed) >= 80
    assert len({(mutant.row, mutant.name) for mutant in listed}) == len(listed)
