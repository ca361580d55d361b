"""Which cases of a parametrised test run in `make test`, which in CI as well, and which in `make stress` alone."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Axes = tuple[Hashable, ...]
"""The value of a case on each axis of a product."""


def quick_where(quick: Callable[..., bool], cases: Iterable[Any], axes: Callable[..., Axes] | None = None) -> list[Any]:
    """The cases as parameters; those for which `quick` is false are marked `slow`.

    A case that is a tuple is several arguments, of `quick` and `axes` too.
    axes: of a product. Cases that a pairwise cover does not need, which has the quick ones, are marked `stress`.
    """
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    at_once = {number for number, values in enumerate(every) if quick(*values)}
    covering = pairwise_cover([axes(*values) for values in every], at_once) if axes else set(range(len(every)))
    marked = []
    for number, values in enumerate(every):
        tier = [pytest.mark.slow] if number in covering else [pytest.mark.stress]
        marked.append(pytest.param(*values, marks=[] if number in at_once else tier))
    return marked


def slow(*cases: Any) -> list[Any]:
    return quick_where(lambda *_: False, cases)


def pairwise_cover(rows: Sequence[Axes], chosen: Iterable[int] = ()) -> set[int]:
    """Numbers of rows that contain each pair of values that any row has on two axes, those of `chosen` among them.

    Greedy: the row with most pairs that are missing, the first of equals. Rows that a product excludes are not in
    `rows`, and neither are pairs that only they have.
    """
    pairs = [set(combinations(enumerate(row), 2)) for row in rows]
    cover = set(chosen)
    missing = set().union(*pairs) - set().union(*(pairs[number] for number in cover))
    while missing:
        number = max(range(len(rows)), key=lambda number: len(pairs[number] & missing))
        cover.add(number)
        missing -= pairs[number]
    return cover
