"""Mutants: a change that a row's tests notice, one that they do not, and lists that cannot be run."""

import ast
from pathlib import Path

import pytest

from tests.support.tiers import quick_where
from tests.support.trees import write_tree
from tools import mutants
from tools.mutants import LIST, ROOT, Mutant, chosen, main, problems_of, read_mutants
from tools.mutants_python import changes_of

FILES = {
    "moe_mk/__init__.py": "",
    "moe_mk/sums.py": "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n",
    "tests/rows.yaml": 'sections:\n- title: Sums\n  rows:\n    "1": Sums add up\n    "2": Twice is twice\n',
    "tests/conftest.py": "",
    "pyproject.toml": ('[tool.pytest.ini_options]\nmarkers = ["row", "slow", "stress", "gpu"]\n'),
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
    return write_tree(tmp_path, FILES | {"tools/lines.py": (ROOT / "tools/lines.py").read_text(encoding="utf-8")})


@pytest.mark.parametrize("state", quick_where("killed".__eq__, ENTRIES))
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


SOURCE = """
def kept(values: list[int] | None, limit: int = 3, *, strict: bool = True) -> int:
    if values is None or len(values) > limit:
        raise ValueError(f"{limit + 1} values")
    total = -1 if strict else sum(values[1:])
    assert total < 9
    values.sort()
    return pow(max(total, 0), 2)
"""


def test_changes_are_those_of_running_code() -> None:
    # Not the annotations, the message, the assertion; each number, operator, branch and call once or twice.
    found = {f"{ast.get_source_segment(SOURCE, node)} -> {new}" for node, new in changes_of(ast.parse(SOURCE))}
    assert found == {
        "3 -> 4", "True -> False", "values is None -> (values is not None)",
        "len(values) > limit -> (len(values) >= limit)",
        "values is None or len(values) > limit -> False", "values is None or len(values) > limit -> True",
        "values is None or len(values) > limit -> (values is None and len(values) > limit)", "strict -> False",
        "strict -> True", "-1 -> (1)", "1 -> 2", "values.sort() -> pass", "max(total, 0) -> (min(total, 0))", "0 -> 1",
        "pow(max(total, 0), 2) -> (pow(2, max(total, 0)))", "2 -> 3",
        "ValueError -> ArithmeticError", 'raise ValueError(f"{limit + 1} values") -> pass',
    }  # fmt: skip


@pytest.mark.slow
def test_changes_by_machine_are_judged_by_the_tests_that_execute_them(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One line each of add(), whose test fails, of twice(), whose test asks too little, and of one that nothing calls.
    monkeypatch.setattr(mutants, "ROOT", repository)
    package = FILES["moe_mk/sums.py"] + "\n\ndef idle(a):\n    return a - 4\n"
    weak = FILES["tests/test_sums.py"].replace("twice(0) == 0", "twice(2) >= 1")
    write_tree(repository, {"moe_mk/sums/__init__.py": package, "tests/test_sums.py": weak})
    (repository / "moe_mk/sums.py").unlink()
    assert main(["--root", str(repository), "--random", "9", "--rooms", "sums"]) == 1
    states = sorted(line.split()[0] for line in capsys.readouterr().out.splitlines() if "->" in line)
    assert states == ["killed", "survived", "uncovered"]


def test_lines_of_started_processes_are_recorded_and_found_again_after_a_change_above_them(repository: Path) -> None:
    started = (
        "import subprocess, sys\nfrom multiprocessing import get_context\nfrom moe_mk.sums import add, twice\n\n"
        "def test_fork():\n    process = get_context('fork').Process(target=add, args=(1, 2))\n"
        "    process.start(); process.join()\n\n"
        "def test_triton():\n    code = 'from moe_mk.sums import twice; twice(2)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    write_tree(repository, {"tests/test_started.py": started})
    mutants.record(repository, ["tests"])
    source = repository / "moe_mk/sums.py"
    source.write_text("LATER = 3\n\n" + source.read_text())
    changes = mutants.changed_at_random(repository, ["."], 9, 0)
    found = dict(zip([one.old for one in changes], mutants.Record(repository).tests_of(changes), strict=True))
    at_import = found.pop("3")
    assert found == {
        "a + b": ["tests/test_sums.py::test_sums", "tests/test_started.py::test_fork"],
        "2 * a": ["tests/test_sums.py::test_twice", "tests/test_started.py::test_triton"],
    }
    assert [set(at_import[:2]), set(at_import[2:])] == [set(each) for each in zip(*found.values(), strict=True)]
    kernel = Mutant("kernels/triton", "", "moe_mk/kernels/triton/topk.py", "", "")  # no line of one is marked
    assert mutants.Record(repository)._chosen(kernel, {"tests/test_sums.py::test_sums"}) == found["2 * a"][1:]


@pytest.mark.slow
def test_an_equivalent_change_is_left_out_of_the_sample(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = mutants.changed_at_random(repository, ["."], 9, 0)
    one = before[0]
    line = one.name.split(": ", 1)[1].split("  ->  ")[0]
    entry = f"- {{file: {one.file}, line: {line!r}, new: {one.new!r}, why: nothing}}\n"
    (repository / mutants.EQUIVALENT).write_text(entry)
    after = mutants.changed_at_random(repository, ["."], 9, 0)
    assert one in before and one not in after
    with capsys.disabled():
        assert mutants.run(one, repository, ["tests/test_gone.py"]).state == "lost", "no test has judged it"


def test_every_mutant_of_the_list_applies_to_a_row_with_tests() -> None:
    listed = read_mutants(ROOT / LIST)
    assert list(problems_of(listed, ROOT, mutants.tests_of_rows(ROOT))) == []
    assert len(listed) >= 80
    assert len({(mutant.row, mutant.name) for mutant in listed}) == len(listed)


def test_every_equivalent_change_names_its_place_and_a_reason() -> None:
    for entry in mutants.equivalent(ROOT):
        assert entry.keys() == {"file", "line", "new", "why"} and (ROOT / entry["file"]).is_file(), entry
