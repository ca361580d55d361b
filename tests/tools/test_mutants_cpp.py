"""Changes of C++ sources by machine."""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools import mutants
from tools.mutants_cpp import ROOT, TESTS, changes_of, judged, runs_here, summary

SOURCE = """// a < b
#include "x.h"
static_assert(4 == 4);
for (int i = 0; i < n; ++i) {
    if (!ok) return;
    sum += row[i] * 2;
}
"""


def test_every_change_is_one_of_code_and_is_made_where_it_is() -> None:
    made = {each.applied_to(SOURCE) for each in changes_of(Path("k.cpp"), SOURCE)}
    lines = SOURCE.splitlines()
    changed = set()
    for text in made:
        assert text.splitlines()[:3] == lines[:3]
        changed |= {new for old, new in zip(lines, text.splitlines(), strict=True) if new != old}
    assert changed == {
        "for (int i = (1 + 0); i < n; ++i) {", "for (int i = 0; i <= n; ++i) {", "    if (0 && !ok) return;",
        "    if (1 || !ok) return;", "    if (!ok) ;", "    sum = row[i] * 2;", "    sum += row[i + 1] * 2;",
        "    sum += row[i] + 2;", "    sum += row[i] * (1 + 2);",
    }  # fmt: skip


def test_sources_of_other_processors_are_left_alone() -> None:
    names = ("isa_avx2.cpp", "pack.cpp", "isa_avx512few.cpp", "amx_parts.h", "exchange_avx512.cpp")
    assert [runs_here(name, ["avx2"]) for name in names] == [True, True, False, False, False]
    assert all(runs_here(name, ["avx512f", "avx512_bf16", "amx_tile"]) for name in names)
    assert all((ROOT / test).exists() for test in TESTS), "pytest runs nothing if one of its files is unknown"


@pytest.mark.parametrize(
    "code,state", [(0, "survived"), (1, "killed"), (-signal.SIGSEGV, "crashed"), (None, "late"), (4, "broken")]
)
def test_what_the_tests_end_in_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, state: str
) -> None:
    monkeypatch.setattr(mutants, "_pytest", lambda copy, tests, limit_s: (code, ""))
    kernels: Any = type("Built", (), {"build": lambda self, changed: None})()
    (tmp_path / "k.cpp").write_text(SOURCE)
    change = next(changes_of(Path("k.cpp"), SOURCE))
    assert (outcome := judged(kernels, change, tmp_path, [])) is not None and outcome.state == state
    assert (tmp_path / "k.cpp").read_text() == SOURCE


def test_only_tests_and_crashes_kill() -> None:
    stated = summary(Counter(killed=3, crashed=1, late=2, broken=1))
    assert stated == ("4 of 7 changes of the kernels killed, 1 broken, 2 late", 1)
    assert summary(Counter(killed=3, late=1))[1] == 0 and summary(Counter(survived=1))[1] == 1
