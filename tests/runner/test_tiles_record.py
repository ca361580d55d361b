"""Events, the intervals they make, which overlapped, and how much of the time was hidden."""

import pytest

from moe_mk.runner import TileRecord
from moe_mk.runner.tiles import Event, Step


def recorded(text: str) -> TileRecord:
    """A record from words such as D0i( for a beginning and D0i) for an end, a second apart."""
    record = TileRecord()
    for second, word in enumerate(text.split()):
        half = word[2:-1]
        step = Step(word[0], half, int(word[1]))  # type: ignore[arg-type]
        record.events.append(Event(step, "begins" if word[-1] == "(" else "ends", float(second)))
    return record


def test_a_journey_lasts_from_its_issue_until_it_is_received() -> None:
    # D0 from 0 to 3, M0 from 4 to 5.
    record = recorded("D0i( D0i) D0r( D0r) M0( M0)")
    assert [(i.name, i.first, i.last, i.start, i.end) for i in record.intervals()] == [
        ("D0", 0, 3, 0.0, 3.0),
        ("M0", 4, 5, 4.0, 5.0),
    ]
    assert record.overlaps() == [] and record.hidden_share() == 0.0


@pytest.mark.row(42)
def test_overlap_is_read_from_the_order_of_events() -> None:
    # D1 from 4 to 9, M0 from 6 to 7: one second of the 3 + 5 on the way was hidden.
    record = recorded("D0i( D0i) D0r( D0r) D1i( D1i) M0( M0) D1r( D1r)")
    assert record.overlaps() == [("D1", "M0")]
    assert record.hidden_share() == pytest.approx(1 / 8)
    assert [(s.stage, s.start, s.end) for s in record.spans()] == [
        ("dispatch", 0.0, 3.0),
        ("dispatch", 4.0, 9.0),
        ("experts", 6.0, 7.0),
    ]


def test_steps_of_one_tile_are_no_overlap_and_what_never_ended_is_no_interval() -> None:
    assert recorded("D0i( M0( D0r) M0)").overlaps() == []
    assert recorded("D0i( M1( M1)").overlaps() == []
    assert recorded("M0( M0)").hidden_share() is None
