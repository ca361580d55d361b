"""Every axis letter that a name carries is in the one legend."""

from functools import cache

import pytest

from moe_mk.shapes import LEGEND
from tests.architecture.checks import Source, package_sources, suffixes


# Inside kernels/ the letters of a paper may stand.
@cache
def named() -> list[tuple[str, int, str, str]]:
    return [
        (source.path, *suffix)
        for source in package_sources()
        if not source.path.startswith("moe_mk/kernels/")
        for suffix in suffixes(source)
    ]


def test_axis_letters_are_in_the_legend() -> None:
    strangers = {
        f"{path}:{line}: {name} has axis {letter!r}"
        for path, line, name, letters in named()
        for letter in letters
        if letter not in LEGEND
    }
    assert not strangers, "\n" + "\n".join(sorted(strangers))


def test_the_names_are_really_read() -> None:
    assert {"x_TH", "ids_TK", "weights_TK"} <= {name for _, _, name, _ in named()}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(x_TQ): ...", {("x_TQ", "TQ")}),
        ("self.counts_L = g(ids_TK=1)", {("counts_L", "L"), ("ids_TK", "TK")}),
        ("_scales_2I4 = 1", {("_scales_2I4", "I")}),
        ("class A:\n    physical_of_EX: int", {("physical_of_EX", "EX")}),
        ("def of_P(): ...", {("of_P", "P")}),
        ("NUM_EXPERTS = x_th = _MAX_E = _E = FP8 = someThing = 1", set()),
    ],
)
def test_a_suffix_is_found_wherever_a_name_stands(code: str, expected: set[tuple[str, str]]) -> None:
    assert {(name, letters) for _, name, letters in suffixes(Source("moe_mk/a.py", code))} == expected
