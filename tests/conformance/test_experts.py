"""Every registered experts backend equals the reference in every format, token layout and weight layout it reads."""

from __future__ import annotations

import pytest

from moe_mk.experts import EXPERTS
from moe_mk.lab.testing.conformance import check_experts
from moe_mk.quant.plain import Plain
from tests.support.formats import FORMATS, HIDDEN, INNER, MORE_FORMATS, MORE_PAIRS, Format
from tests.support.tiers import quick_where

QUICK = (FORMATS[1], FORMATS[8], MORE_PAIRS[0], MORE_PAIRS[1])
"""One format of every kind: plain, blocks of FP8, integers, FP4 with shared exponents."""


@pytest.mark.row(84, 87)
@pytest.mark.parametrize("name", list(EXPERTS))
@pytest.mark.parametrize("form", quick_where(QUICK.__contains__, [*FORMATS, *MORE_PAIRS, *MORE_FORMATS]), ids=str)
def test_a_backend_equals_the_reference(name: str, form: Format) -> None:
    problem, backend = form.problem(), EXPERTS[name]
    if reasons := backend.reasons_against(problem):
        pytest.skip("; ".join(map(str, reasons)))
    compute = problem.activations if form.activations == "checkpoint" else form.dtype
    assert compute is not None
    ran = check_experts(
        name, problem.weights, dtype=form.dtype, compute=compute, hidden_size=HIDDEN, intermediate_size=INNER
    )
    rounds = 1 if isinstance(compute, Plain) else 2  # FP8 tokens come rounded, or are rounded on arrival
    layouts = len(backend.traits.layouts & {"canonical", "mapped"})
    assert ran == 13 * rounds * layouts * len(backend.traits.consumes)


def test_the_reference_reads_every_layout_in_every_format() -> None:
    assert len(EXPERTS["reference"].traits.consumes) == 3
    forms = [*FORMATS, *MORE_PAIRS, *MORE_FORMATS]
    assert not [form for form in forms if EXPERTS["reference"].reasons_against(form.problem())]
