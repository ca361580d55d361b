"""Reasons reported once: of a transport, of experts, or of the pair, and none lost or added."""

from hypothesis import given
from hypothesis import strategies as st

from moe_mk.config.problem import Reason
from moe_mk.oracle.verdict import Refusal, Verdict, explain_pairs, group_refusals, refusal_lines

FAR, OFF, WIDE = Reason("fabric", "too far"), Reason("device", "off"), Reason("layout", "too wide", "make it narrow")


def verdict(transport: str, experts: str, *reasons: Reason) -> Verdict:
    return Verdict(transport, experts, reasons, None if reasons else 1.0)


def test_each_reason_is_reported_of_whoever_causes_it() -> None:
    verdicts = [
        verdict("near", "good"), verdict("near", "bad", OFF), verdict("far", "good", FAR),
        verdict("far", "bad", FAR, OFF), verdict("wide", "good", WIDE), verdict("wide", "bad", OFF),
        verdict("alone", "sole", FAR),
    ]  # fmt: skip
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
    assert refusal.line() == "a, b + any: too far"
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


def lacking(library: str) -> Reason:
    return Reason("library", f"{library} is not installed", f"pip install {library}")


def test_the_closest_backends_are_refused_first_and_those_for_other_devices_last_in_one_line() -> None:
    gpu, amd = Reason("device", "runs on cuda, this is cpu"), Reason("device", "runs on rocm, this is cpu")
    reasons_of = {"t1": (FAR,), "t2": (lacking("a"), lacking("b")), "t3": (gpu, lacking("c")), "t4": (lacking("d"),)}
    reasons_of |= {"t5": (amd,), "t6": (gpu,), "t7": ()}
    both = {("t3", "y"): (WIDE,), ("t7", "y"): (WIDE,)}  # t3 is for another device, whatever it is combined with
    verdicts = [verdict(t, e, *reasons_of[t], *both.get((t, e), ())) for t in reasons_of for e in "xy"]
    assert refusal_lines(verdicts) == [
        "t4 + any: d is not installed [pip install d]",
        "t7 + y: too wide [make it narrow]",
        "t2 + any: a is not installed [pip install a]; b is not installed [pip install b]",
        "t1 + any: too far",
        "for other devices: t5 (runs on rocm, this is cpu); t6, t3 (runs on cuda, this is cpu)",
    ]
    in_full = refusal_lines(verdicts, in_full=True)
    assert in_full[-1] == "t3 + any: runs on cuda, this is cpu; c is not installed [pip install c]"


def test_a_pair_for_another_device_hides_no_reason_against_another_pair_of_its_transport() -> None:
    gpu = Reason("device", "runs on cuda, this is cpu")
    assert refusal_lines([verdict("t", "x", gpu), verdict("t", "y", WIDE), verdict("t", "z")]) == [
        "t + y: too wide [make it narrow]",
        "for other devices: t + x (runs on cuda, this is cpu)",
    ]


def test_an_explanation_is_wrapped_to_the_width_with_the_rest_below_the_reasons() -> None:
    names = [f"transport_{number}" for number in range(9)]
    verdicts = [Verdict("no_ep", "x", (), 12345.0, True), *(verdict(name, "x", WIDE, FAR) for name in names)]
    wide, narrow = explain_pairs(verdicts), explain_pairs(verdicts, 60)
    assert wide[0] == narrow[0] == "* no_ep + x    12,345 us  model"
    assert len(wide) == len(narrow) == 2 and len(wide[1]) > 120
    lines = narrow[1].splitlines()
    assert max(map(len, lines)) <= 60 and lines[0].startswith("  refused  transport_0, ")
    assert all(line.startswith(" " * 11) and line[11] != " " for line in lines[1:])
    assert " ".join(narrow[1].split()) == " ".join(wide[1].split())
