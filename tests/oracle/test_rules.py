"""What only a pair can have against it: layout, stage, graphs, wire."""

from dataclasses import replace

import pytest

from moe_mk.experts import ExpertsTraits
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.oracle.decide import layout_read, pair_reasons
from moe_mk.prepare_finalize import TransportTraits
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.tokens import BatchedTokens, GroupedTokens, OutputStage, RowTokens
from tests.support.problems import problem

RAW, WEIGHTED, REDUCED = OutputStage.RAW, OutputStage.WEIGHTED, OutputStage.REDUCED


def transport(produces: type, wants: OutputStage = REDUCED) -> TransportTraits:
    return replace(AllToAll.traits, produces=produces, wants=wants)


def experts(**emits: OutputStage) -> ExpertsTraits:
    kinds = {"rows": RowTokens, "grouped": GroupedTokens, "batched": BatchedTokens}
    return replace(ReferenceExperts.traits, emits={kinds[name]: stage for name, stage in emits.items()})


def reported(
    t: TransportTraits, e: ExpertsTraits, installed: frozenset[str] = frozenset(), **settings: object
) -> dict[str, str]:
    asked = problem("deepseek_v3", "h100", installed=installed, ep=4, **settings)
    return {reason.code: str(reason) for reason in pair_reasons(t, e, asked)}


@pytest.mark.row(87)
@pytest.mark.parametrize(
    "produces,reads,layout",
    [
        (RowTokens, {"rows": REDUCED}, RowTokens),
        (RowTokens, {"grouped": RAW}, GroupedTokens),  # rows can be permuted into anything
        (RowTokens, {"batched": RAW}, BatchedTokens),
        (RowTokens, {"batched": RAW, "rows": REDUCED}, RowTokens),  # what is delivered is read as it is
        (BatchedTokens, {"batched": RAW, "rows": REDUCED}, BatchedTokens),
        (BatchedTokens, {"rows": REDUCED, "grouped": RAW}, None),  # a batch cannot go back
        (GroupedTokens, {"batched": RAW}, None),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused_when_the_pair_is_judged(
    produces: type, reads: dict[str, OutputStage], layout: type | None
) -> None:
    t, e = transport(produces), experts(**reads)
    assert layout_read(t, e) is layout
    assert ("layout" in reported(t, e)) == (layout is None)


@pytest.mark.row(87)
def test_the_refusal_names_both_layouts() -> None:
    reasons = reported(transport(BatchedTokens), experts(rows=REDUCED, grouped=RAW))
    assert reasons == {"layout": "the transport delivers batched tokens, the experts read rows, grouped"}


@pytest.mark.parametrize("have,want,refused", [(REDUCED, RAW, True), (WEIGHTED, RAW, True), (RAW, REDUCED, False)])
def test_a_stage_can_be_advanced_and_never_undone(have: OutputStage, want: OutputStage, refused: bool) -> None:
    reasons = reported(transport(RowTokens, want), experts(rows=have))
    assert ("reduce" in reasons) == refused
    if refused:
        name = have.name.lower()
        assert reasons["reduce"] == f"the experts return {name} output, the transport reduces raw output itself"


@pytest.mark.parametrize("reads", [{"grouped": RAW}, {"batched": RAW}])
def test_permuting_reads_counts_on_the_host_so_no_graph_holds_it(reads: dict[str, OutputStage]) -> None:
    assert "graphs" in reported(transport(RowTokens), experts(**reads), graphs=True)
    assert "graphs" not in reported(transport(RowTokens), experts(**reads))
    assert "graphs" not in reported(transport(RowTokens), experts(rows=REDUCED), graphs=True)


def test_groups_are_made_on_a_gpu_with_triton_so_a_graph_holds_them_and_blocks_are_not() -> None:
    triton = frozenset({"triton"})
    assert "graphs" not in reported(transport(RowTokens), experts(grouped=RAW), triton, graphs=True)
    assert "graphs" in reported(transport(RowTokens), experts(batched=RAW), triton, graphs=True)


def test_reasons_of_layout_and_wire_are_reported_together() -> None:
    plain_wire = replace(transport(BatchedTokens), wire=frozenset({"plain"}))
    assert set(reported(plain_wire, experts(rows=REDUCED), wire="fp8")) == {"layout", "wire"}
