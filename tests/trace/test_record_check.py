"""Routing records with one planted fault each are found and named, and right ones pass at the noise of bf16."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from moe_mk.lab.trace.record_check import check_record
from moe_mk.lab.trace.record_compare import agreements, holes_of
from moe_mk.lab.trace.records import RecordedSequence, RoutingRecord
from moe_mk.lab.trace.routing_forward import TraceError
from tests.support.routing_records import FAULTS, SHAPES, Rollout, changed, fits, hole, rollout

WITHOUT_REFERENCE = {
    "layers in reverse": None, "two layers exchanged": None, "prefix of the first turn missing": "rows lost"
}  # fmt: skip
"""What the record alone shows otherwise than a comparison."""
SEEDS = range(1, 9)


@lru_cache(maxsize=4)
def made_of(shape: str, seed: int = 0, noise: float = 0.02) -> Rollout:
    return rollout(SHAPES[shape], seed, noise)


@pytest.mark.row("177")
@pytest.mark.parametrize("shape", ["small", "Kimi-K2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named_alone(shape: str, fault: str) -> None:
    if not fits(fault, SHAPES[shape]):
        assert fault in ("uint8", "int8")  # which hold all ids of few experts
        return
    made, (expected, plant) = made_of(shape), FAULTS[fault]
    assert check_record(plant(made, 0), made.facts, made.live).faults == (expected,)
    alone = WITHOUT_REFERENCE.get(fault, expected)
    assert check_record(plant(made, 0), made.facts).faults == (() if alone is None else (alone,))


@pytest.mark.row("177")
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_fault_of_every_model_is_named_and_nothing_else(shape: str) -> None:
    wrong = []
    for seed in SEEDS:
        made = made_of(shape, seed)
        for fault, (expected, plant) in FAULTS.items():
            if fits(fault, SHAPES[shape]):
                found = check_record(plant(made, seed), made.facts, made.live)
                wrong += [(seed, fault, found.findings)] * (found.faults != (expected,))
    assert not wrong


@pytest.mark.row("177")
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_record_passes_at_the_noise_of_bf16(shape: str, noise: float) -> None:
    made = made_of(shape, 3, noise)
    report = check_record(made.record, made.facts, made.live)
    assert report.findings == () and check_record(made.record, made.facts).findings == ()
    assert set(report.agreement_X) == set(made.facts.layers)
    least = min(report.agreement_X.values())
    assert 0.8 < least < 1.0, "the two sides differ, as they do in bf16"


@pytest.mark.row("177")
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_no_false_alarm_in_many_right_records(shape: str) -> None:
    for seed in range(40):
        made = rollout(SHAPES[shape], seed, (0.0, 0.02, 0.05)[seed % 3])
        for other in (made.live, None):
            assert check_record(made.record, made.facts, other).findings == (), (seed, other is None)


@pytest.mark.row("177")
def test_findings_state_where_and_how_much() -> None:
    made = made_of("Qwen3-30B-A3B")
    lost = changed(made.record, lambda ids: torch.cat((ids[:20], ids[27:])), 0)
    (found,) = check_record(lost, made.facts, made.live).findings
    assert (found.where, found.evidence) == ("sequence 0", "7 rows are missing before row 20")
    twice = changed(made.record, lambda ids: torch.cat((ids[:30], ids)), 1)
    (found,) = check_record(twice, made.facts, made.live).findings
    assert found.evidence == "rows from 30 on begin again at token 0, 30 tokens before"
    swapped = changed(made.record, lambda ids: ids[:, [0, 1, 3, 2, 4, 5]])
    report = check_record(swapped, made.facts, made.live)
    assert report.findings[0].evidence.startswith("2 holds 3, 3 holds 2; 9")
    assert min(report.agreement_X.values()) > 0.9, "the agreement once the fault is undone"


@pytest.mark.row("177")
def test_a_record_of_another_model_is_unexplained() -> None:
    made, other = made_of("Qwen3-30B-A3B"), made_of("Qwen3-30B-A3B", 1)
    assert "which has other tokens" in check_record(other.record, made.facts, made.live).basis
    same_tokens = tuple(
        RecordedSequence(mine.name, theirs.ids_TXK, mine.token_ids_T)
        for mine, theirs in zip(made.record.sequences, other.record.sequences, strict=True)
    )
    report = check_record(RoutingRecord("another", same_tokens), made.facts, made.live)
    assert report.faults == ("unexplained",)


@pytest.mark.row("177")
def test_layers_are_ordered_by_their_loads_where_tokens_differ() -> None:
    made, other = made_of("small", 5), made_of("small", 5, 0.05)
    unlike = RoutingRecord("others", other.live.sequences[:1])
    assert check_record(made.record, made.facts, unlike).findings == ()
    reverse = changed(made.record, lambda ids: ids.flip(1))
    (found,) = check_record(reverse, made.facts, unlike).findings
    first, last = made.facts.layers[0], made.facts.layers[-1]
    assert found.fault == "layer order" and found.evidence.startswith(f"{first} has the loads of {last}, ")


@pytest.mark.row("177")
def test_a_row_for_the_last_token_and_layers_without_experts_are_no_fault() -> None:
    made = made_of("DeepSeek-V3")
    padded = changed(made.record, lambda ids: torch.cat((ids, torch.zeros_like(ids[:1]))))
    assert check_record(padded, made.facts, made.live).findings == ()
    assert check_record(padded, made.facts).findings == ()
    dense = changed(made.record, lambda ids: torch.cat((torch.zeros_like(ids[:, :3]), ids), 1))
    assert check_record(dense, made.facts, made.live).findings == ()
    assert check_record(dense, made.facts).findings == ()


@pytest.mark.row("177")
@pytest.mark.parametrize("theirs", [None, 0, 5, 17])
@pytest.mark.parametrize("mine", [0, 17])
def test_rows_that_begin_behind_a_known_prefix_are_compared_there(mine: int, theirs: int | None) -> None:
    made = made_of("small")
    record, live = begun(made.record, mine), None if theirs is None else begun(made.live, theirs)
    assert check_record(record, made.facts, live).findings == ()
    # The prompt of sequence 0 has 80 tokens.
    for begin, end, fault in ((65, 80, "cache hole"), (67, 82, "rows lost"), (82, 97, "rows lost")):
        holes = changed(record, lambda ids: hole(ids, begin - mine, end - mine), 0)  # noqa: B023
        assert check_record(holes, made.facts, live).faults == (fault,)
    if live is not None:
        twice = changed(record, lambda ids: torch.cat((ids[: 50 - mine], ids[20 - mine :])), 1)
        (found,) = check_record(twice, made.facts, live).findings
        unlike = max((theirs or 0) - mine, 0)  # rows that the reference lacks
        assert found.where == "sequence 1" + f" from row {unlike} on" * bool(unlike)
        assert found.evidence == f"rows from {50 - mine - unlike} on begin again at token 20, 30 tokens before"
        (found,) = check_record(changed(record, lambda ids: ids[9:], 1), made.facts, live).findings
        assert found.evidence == f"the first row is that of token {max(theirs or 0, mine) + 9}"


def begun(record: RoutingRecord, start: int) -> RoutingRecord:
    later = changed(record, lambda ids: ids[start:])
    return replace(later, sequences=tuple(replace(each, start=start) for each in later.sequences))


@pytest.mark.row("177")
def test_agreements_and_holes_by_hand() -> None:
    one, two = torch.tensor([[[3, 1]], [[-1, 2]], [[5, 5]]]), torch.tensor([[[1, 3]], [[2, -1]], [[5, 6]]])
    assert agreements(one, two).flatten().tolist() == [1.0, 0.5, 0.5]
    rows = torch.tensor([[[1, 2]], [[0, 0]], [[-1, -1]], [[4, 3]]])
    assert holes_of(rows).tolist() == [False, True, True, False]
    stale = torch.randint(0, 64, (9, 4, 8), generator=torch.Generator().manual_seed(0))
    stale[3:8] = stale[2]
    assert holes_of(stale).tolist() == [False] * 3 + [True] * 5 + [False]


@pytest.mark.row("177")
def test_nothing_to_compare_with_is_refused() -> None:
    made = made_of("small")
    with pytest.raises(TraceError, match="pass the checkpoint, or another record"):
        check_record(made.record)
    assert check_record(made.record, None, made.live).findings == (), "sizes are those of the reference"
    mixed = RoutingRecord(
        "mixed", (RecordedSequence("a", torch.zeros(3, 2, 2)), RecordedSequence("b", torch.zeros(3, 1, 2)))
    )
    with pytest.raises(TraceError, match="one shape of layers and K"):
        check_record(made.record, None, mixed)
