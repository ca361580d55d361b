"""The capability table states what the marks in the tests say, and nothing else."""

import re
from pathlib import Path

import pytest

from tools.features import MarkError, find_proofs, main, read_sections

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
        "pytestmark = [pytest.mark.row(1), pytest.mark.slow]\n"
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


def test_all_wrong_marks_are_named_at_once(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_test(repository, "@pytest.mark.row(7)\ndef test_a(): ...\n", "test_a.py")
    write_test(repository, "@pytest.mark.row(8)\ndef test_b(): ...\n", "test_b.py")
    assert main(["--root", str(repository)]) == 1
    assert re.search(r"test_a\.py:2: .*7(.|\n)*test_b\.py:2: .*8", capsys.readouterr().err)
    assert not (repository / "docs").exists()


def test_the_page_names_rows_proofs_and_gaps(repository: Path) -> None:
    write_test(repository, "".join(f"@pytest.mark.row(1)\ndef test_{n}(): ...\n" for n in "edcba"))
    write_test(repository, "@pytest.mark.gpu\n@pytest.mark.row(3)\ndef test_fast(): ...\n", "test_gpu.py")
    assert main(["--root", str(repository)]) == 0
    page = (repository / "docs" / "capabilities.md").read_text()
    assert "**2 of 4 rows are proven, by 6 tests.**" in page
    link = "[tests/test_it.py::test_{}](../tests/test_it.py)"
    assert f"| 1 | One \\| thing | {'<br>'.join(link.format(n) for n in 'abc')}<br>and 2 more |" in page
    assert "| 2 | Two things | not yet |" in page
    assert "| 3 | Three things | [tests/test_gpu.py::test_fast](../tests/test_gpu.py) (GPU) |" in page
    assert page.index("## First") < page.index("| 2 |") < page.index("## Second") < page.index("| 23a |")


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
    assert re.search(r"^-\| 2 \| Two things \| not yet \|$", complaint, re.MULTILINE)
    assert "make features" in complaint


def test_every_row_is_named_once_in_words() -> None:
    rows = [row for section in read_sections(ROOT / "tests" / "rows.yaml") for row in section.rows.items()]
    assert {row for row, _ in rows} == {str(number) for number in range(1, 165)} | {"23a", "23b"}
    assert len(rows) == 166
    assert all(isinstance(what, str) and len(what) > 10 for _, what in rows)
    assert len({what for _, what in rows}) == 166
