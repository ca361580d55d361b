"""Reasons reported once: of a transport, of experts, or of the pair, and none lost or added."""

from hypothesis import given
from hypothesis import strategies as st

from moe_mk.config.problem import Reason
from moe_mk.oracle.verdict import Refusal, Verdict, group_refusals

FAR, OFF, WIDE = Reason("fabric", "too far"), Reason("device", "off"), Reason("layout", "too wide", "make it narrow")


def verdict(transport: str, experts: str, *reasons: Reason) -> Verdict:
    return Verdict(transport, experts, reasons, None if reasons else 1.0)


def test_each_reason_is_reported_of_whoever_causes_it() -> None:
    verdicts = [
        verdict("near", "good"),
        verdict("near", "bad", OFF),
        verdict("far", "good", FAR),
        verdict("far", "bad", FAR, OFF),
        verdict("wide", "good", WIDE),
        verdict("wide", "bad", OFF),
        verdict("alone", "sole", FAR),
    ]
    assert group_refusals(verdicts) == [
        Refusal(("far",), (), (FAR,)),
        Refusal((), ("bad",), (OFF,)),
        Refusal(("wide",), ("good",), (WIDE,)),
        Refusal(("alone",), ("sole",), (FAR,)),
    ]


def test_those_with_the_same_reasons_share_a_line() -> None:
    verdicts = [verdict(t, e, FAR) for t in ("a", "b") for e in ("x", "y")]
    (refusal,) = group_refusals(verdicts)
    assert refusal == Refusal(("a", "b"), (), (FAR,))
    assert refusal.line().split() == ["a,", "b", "+", "any", "refused", "too", "far"]
    pairs = [verdict(t, e, *([WIDE] if t != "c" and e == "x" else [])) for t in ("a", "b", "c") for e in ("x", "y")]
    assert group_refusals(pairs) == [Refusal(("a", "b"), ("x",), (WIDE,))]
    assert group_refusals([verdict("a", "x")]) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.sets(st.sampled_from((FAR, OFF, WIDE)))),
                unique_by=lambda row: row[:2]))  # fmt: skip
def test_nothing_is_lost_and_nothing_added(rows: list[tuple[str, str, set[Reason]]]) -> None:
    verdicts = [verdict(transport, experts, *sorted(reasons, key=str)) for transport, experts, reasons in rows]
    refusals = group_refusals(verdicts)
    for each in verdicts:
        reported = [reason for refusal in refusals if refusal.covers(each) for reason in refusal.reasons]
        assert set(reported) == set(each.reasons)
    assert all(any(refusal.covers(each) for each in verdicts) for refusal in refusals)
