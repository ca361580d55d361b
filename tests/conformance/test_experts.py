"""Every registered experts backend equals the reference in every format, token layout and weight layout it reads.

The routings of the kit are what their names say."""

from collections.abc import Hashable

import pytest
import torch

from moe_mk.experts import EXPERTS
from moe_mk.lab.testing.conformance import check_experts, hostile_routings
from moe_mk.quant.plain import Plain
from tests.support.formats import FORMATS, HIDDEN, INNER, MORE_FORMATS, MORE_PAIRS, Format
from tests.support.tiers import quick_where

QUICK = (FORMATS[1], FORMATS[8], MORE_PAIRS[0], MORE_PAIRS[1])
"""One format of every kind: plain, blocks of FP8, integers, FP4 with shared exponents."""

CASES = [
    (name, form)
    for form in (*FORMATS, *MORE_PAIRS, *MORE_FORMATS)
    for name in EXPERTS
    if not EXPERTS[name].reasons_against(form.problem())
]


def axes(name: str, form: Format) -> tuple[Hashable, ...]:
    return name, form.weights, form.dtype, form.activations


@pytest.mark.row(84, 87)
@pytest.mark.parametrize("name,form", quick_where(lambda name, form: form in QUICK, CASES, axes), ids=str)
def test_a_backend_equals_the_reference(name: str, form: Format) -> None:
    problem, backend = form.problem(), EXPERTS[name]
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


def test_the_hostile_cases_are_what_they_say() -> None:
    cases = {case.name: case for case in hostile_routings(4, num_experts=8, top_k=3)}
    assert cases["no tokens anywhere"].num_tokens == [0, 0, 0, 0]
    assert cases["no tokens on the first rank"].num_tokens[0] == 0 < cases["no tokens on the first rank"].num_tokens[1]
    assert cases["uneven"].num_tokens == [0, 1, 7, 3]
    assert {int(i) for r in cases["all to one rank"].logical_ids for i in r.flatten()} == {6, 7, -1}
    assert {int(i) for r in cases["all to one expert"].logical_ids for i in r.flatten()} == {7, -1}
    assert {int(i) for r in cases["all -1"].logical_ids for i in r.flatten()} == {-1}
    assert cases["replicas"].expert_map.has_replicas
    replicas = cases["replicas"].expert_map.physical_of_logical[0]
    used = {int(i) for r in cases["replicas"].routings for i in r.ids_TK.flatten()}
    assert len(replicas) == 4 and len(used & set(replicas)) > 1, "more than one replica is used"
    assert cases["round-robin"].expert_map.experts_of_rank[1] == (1, 5)
    assert [len(experts) for experts in cases["uneven experts"].expert_map.experts_of_rank] == [1, 1, 1, 5]
    assert not cases["permutation"].expert_map.is_identity
    for case in cases.values():
        for routing, ids_TK in zip(case.routings, case.logical_ids, strict=True):
            assert torch.equal(routing.ids_TK < 0, ids_TK < 0)
            assert bool((routing.weights_TK > 0).all()), "an id of -1 counts nothing, whatever its weight"
            for row in ids_TK.tolist():
                chosen = [e for e in row if e >= 0]
                assert len(set(chosen)) == len(chosen), "a token chooses an expert once"
