"""The capability table states what the marks in the tests say, and nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.features import RESULTS, MarkError, find_proofs, main, read_sections

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {"1", "2", "3", "23a"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository with four rows and, at first, no test."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "rows.yaml").write_text(
        'sections:\n  - title: First\n    rows:\n      "1": One | thing\n      "2": Two things\n'
        '  - title: Second\n    rows:\n      "3": Three things\n      "23a": A late one\n'
    )
    return tmp_path


def write_test(repository: Path, source: str, name: str = "test_it.py") -> None:
    (repository / "tests" / name).write_text("import pytest\n" + source)


def write_junit(repository: Path, *arguments: str) -> Path:
    """Run pytest in the repository, as `make test` does."""
    junit = repository / "build" / "junit" / "quick.xml"
    words = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--import-mode=importlib", f"--junitxml={junit}"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(
        [sys.executable, "-m", "pytest", *words, *arguments, "tests"],
        cwd=repository, env=environment, capture_output=True, check=False,
    )  # fmt: skip
    return junit


def row_of(repository: Path, row: str) -> str:
    page = (repository / "docs" / "capabilities.md").read_text()
    return next(line for line in page.splitlines() if line.startswith(f"| {row} |"))


def names_of(repository: Path, row: str) -> list[str]:
    return [proof.name for proof in find_proofs(repository, KNOWN).get(row, [])]


def test_a_marked_test_proves_its_rows(repository: Path) -> None:
    write_test(repository, "@pytest.mark.row(1, '23a')\n@pytest.mark.row(3)\ndef test_a(): ...\ndef test_b(): ...\n")
    assert {row: names_of(repository, row) for row in sorted(KNOWN)} == {
        "1": ["test_a"],
        "2": [],
        "23a": ["test_a"],
        "3": ["test_a"],
    }


def test_marks_of_module_and_class_hold_for_the_tests_inside(repository: Path) -> None:
    write_test(
        repository,
        "pytestmark = [pytest.mark.row(1), pytest.mark.stress]\n"
        "@pytest.mark.row(2)\nclass TestRoom:\n    pytestmark = pytest.mark.row(3)\n    async def test_in(self): ...\n"
        "def test_out(): ...\n",
    )
    assert names_of(repository, "1") == ["TestRoom::test_in", "test_out"]
    assert names_of(repository, "2") == ["TestRoom::test_in"]
    assert names_of(repository, "3") == ["TestRoom::test_in"]


def test_marks_of_single_cases_count_unless_the_case_is_skipped(repository: Path) -> None:
    write_test(
        repository,
        "from pytest import mark\n@mark.parametrize('n', [\n"
        "    pytest.param(1, marks=mark.row(1)),\n    pytest.param(2, marks=[mark.skip, mark.row(2)]),\n"
        "    pytest.param(3, marks=[mark.gpu, mark.row('23a', 1)]), 4])\n"
        "@mark.row(3)\ndef test_n(n): ...\n",
    )
    found = find_proofs(repository, KNOWN)
    assert {row: [proof.gpu for proof in proofs] for row, proofs in found.items()} == {
        "1": [False],
        "23a": [True],
        "3": [False],
    }


@pytest.mark.parametrize("mark", ["pytest.mark.skip", "pytest.mark.skip(reason='later')", "pytest.mark.xfail"])
def test_a_test_that_never_passes_proves_nothing(repository: Path, mark: str) -> None:
    write_test(repository, f"@{mark}\n@pytest.mark.row(1)\ndef test_a(): ...\n")
    assert names_of(repository, "1") == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("@pytest.mark.row(7)\ndef test_a(): ...\n", r"tests/test_it\.py:2: unknown row 7"),
        ("\n@pytest.mark.row('1', '23c')\ndef test_a(): ...\n", r"tests/test_it\.py:3: unknown row 23c"),
        ("N = 1\n@pytest.mark.row(N)\ndef test_a(): ...\n", r"test_it\.py:3: row ids must be written out"),
        ("@pytest.mark.row(True)\ndef test_a(): ...\n", r"test_it\.py:2: row ids must be written out"),
        ("@pytest.mark.row()\ndef test_a(): ...\n", r"test_it\.py:2: a row mark without a row id"),
        ("@pytest.mark.row\ndef test_a(): ...\n", r"test_it\.py:2: a row mark without a row id"),
        ("@pytest.mark.row(1)\ndef helper(): ...\n", r"test_it\.py:2: this mark belongs to no test"),
        ("first = pytest.mark.row(1)\n", r"test_it\.py:2: this mark belongs to no test"),
    ],
)
def test_a_wrong_mark_is_an_error_with_file_and_line(repository: Path, source: str, complaint: str) -> None:
    write_test(repository, source)
    with pytest.raises(MarkError, match=complaint):
        find_proofs(repository, KNOWN)


def test_check_fails_with_the_difference_until_the_page_is_written(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--root", str(repository)]
    assert main([*here, "--check"]) == 1
    assert main(here) == 0
    assert main([*here, "--check"]) == 0
    write_test(repository, "@pytest.mark.row(2)\ndef test_a(): ...\n")
    capsys.readouterr()
    assert main([*here, "--check"]) == 1
    complaint = capsys.readouterr().err
    assert re.search(r"^-\| 2 \| Two things \| no test \| not yet \|$", complaint, re.MULTILINE)
    assert "make features" in complaint


SEVERAL = """
@pytest.mark.row(1)
@pytest.mark.parametrize("n", [1, 2])
def test_passes(n): ...

class TestRoom:
    @pytest.mark.row(2)
    def test_needs(self): pytest.skip("needs a\\n  lathe")

@pytest.mark.row(3)
@pytest.mark.parametrize("n", [1, 2])
def test_fails(n): assert n == 1

@pytest.mark.row("23a")
@pytest.mark.stress
def test_takes_long(): ...
"""


def test_a_row_is_proven_by_a_run_and_not_by_a_mark(repository: Path) -> None:
    here = ["--root", str(repository), "--machine", "lathe"]
    write_test(repository, SEVERAL)
    write_junit(repository, "-m", "not stress")
    assert main(here) == 0
    assert "| passed |" in row_of(repository, "1")
    assert "| skipped: needs a lathe |" in row_of(repository, "2")
    assert "| failed on lathe |" in row_of(repository, "3")
    assert "| never run |" in row_of(repository, "23a")
    assert "**1 of 4 rows" in (repository / "docs" / "capabilities.md").read_text()
    write_junit(repository, "-m", "stress")
    assert main(here) == 0  # what is recorded of the others is kept
    assert "| passed |" in row_of(repository, "1") and "| passed |" in row_of(repository, "23a")


def test_a_row_may_be_passed_in_part_and_weaker_than_it_states(repository: Path) -> None:
    source = "@pytest.mark.row(1)\ndef test_a(): ...\n@pytest.mark.row(1)\ndef test_b(): pytest.skip('needs x')\n"
    write_test(repository, source)
    rows = repository / "tests" / "rows.yaml"
    rows.write_text(rows.read_text() + 'weaker:\n  "1": on one rank only\n')
    write_junit(repository)
    assert main(["--root", str(repository)]) == 0
    assert "| passed, but 1 skipped: needs x; weaker: on one rank only |" in row_of(repository, "1")
    assert "**0 of 4 rows are proven by tests that passed, 1 more" in (repository / "docs/capabilities.md").read_text()
    rows.write_text(rows.read_text() + '  "77": nothing\n')
    assert main(["--root", str(repository)]) == 1


def test_a_run_is_held_against_the_page(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--root", str(repository), "--machine", "mill"]
    passing = "@pytest.mark.row(1)\ndef test_a(): ...\n@pytest.mark.row(2)\ndef test_b(): ...\n"
    write_test(repository, passing)
    junit = write_junit(repository)
    held = [*here, "--check", "--results", str(junit)]
    assert main(here) == 0 and main(held) == 0
    write_test(repository, passing.replace("...", "pytest.skip('needs oil')", 1).replace("b(): ...", "b(): assert 0"))
    write_junit(repository)
    capsys.readouterr()
    assert main(held) == 1
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert "test_a: the page states passed, and this run on mill skipped it: needs oil" in first
    assert "test_b: the page states passed, and 1 of its cases failed" in second
    write_junit(repository, "-k", "test_b")
    assert main(held) == 1
    assert "test_a: the page states passed, and this run does not have it" in capsys.readouterr().err


def test_a_machine_of_another_kind_may_skip_what_passed_here(repository: Path) -> None:
    write_test(repository, "@pytest.mark.row(1)\ndef test_a(): ...\n")
    junit = write_junit(repository)
    assert main(["--root", str(repository), "--machine", "with oil"]) == 0
    write_test(repository, "@pytest.mark.row(1)\ndef test_a(): pytest.skip('needs oil')\n")
    write_junit(repository)
    dry = ["--root", str(repository), "--machine", "dry", "--results", str(junit)]
    assert main([*dry, "--check"]) == 0
    assert main(dry) == 0 and "| passed |" in row_of(repository, "1")
    assert (repository / RESULTS).read_text().splitlines()[1:] == [
        "tests/test_it.py::test_a: {dry: {skipped: {needs oil: 1}}, with oil: {passed: 1}}"
    ]


@pytest.mark.parametrize(("reason", "rc"), [("make oil has it", 0), ("it is too dry", 1), ("make water has it", 1)])
def test_what_another_target_runs_may_be_skipped(repository: Path, reason: str, rc: int) -> None:
    write_test(repository, "@pytest.mark.row(1)\ndef test_a(): ...\n")
    write_junit(repository)
    assert main(["--root", str(repository)]) == 0
    write_test(repository, f"@pytest.mark.row(1)\ndef test_a(): pytest.skip('oil is not installed: {reason}')\n")
    held = ["--root", str(repository), "--check", "--results", str(write_junit(repository))]
    assert main(held) == rc


def test_every_row_is_named_once_in_words() -> None:
    rows = [row for part in read_sections(ROOT / "tests" / "rows.yaml").values() for row in part.items()]
    numbers = {str(number) for number in (*range(1, 165), *range(167, 178), 188)}
    assert {row for row, _ in rows} == numbers | {"23a", "23b"} | {f"N{number}" for number in range(1, 25)}
    assert len(rows) == 202
    assert all(isinstance(what, str) and len(what) > 10 for _, what in rows)
    assert len({what for _, what in rows}) == 202
