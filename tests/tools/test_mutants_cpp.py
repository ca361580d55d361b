"""Changes of C++ sources by machine."""

from pathlib import Path

from tools.mutants_cpp import ROOT, TESTS, changes_of, runs_here

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
