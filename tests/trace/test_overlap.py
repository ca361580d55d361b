"""How much of the time on the way was hidden behind work."""

import threading

import pytest

from moe_mk.trace.recorder import Recorder, Span, hidden_share, merged


def span(stage: str, start: float, end: float) -> Span:
    return Span(stage, start, end, end - start)


@pytest.mark.row(42)
@pytest.mark.parametrize(
    "spans,share",
    [
        # On the way from 0 to 4; experts from 3 to 6: a quarter was hidden.
        ([span("dispatch", 0, 4), span("experts", 3, 6)], 0.25),
        # Two transfers under way at once count once: 0 to 6, of which 2 to 3 and 5 to 6.
        ([span("dispatch", 0, 4), span("combine", 2, 6), span("experts", 2, 3), span("shared", 5, 7)], 2 / 6),
        # Experts on two threads at once hide a moment once.
        ([span("dispatch", 0, 2), span("experts", 0, 1), span("experts", 0, 1)], 0.5),
        ([span("dispatch", 0, 1), span("experts", 1, 2), span("combine", 2, 3)], 0.0),
        ([span("combine", 1, 2), span("experts", 0, 3)], 1.0),
        ([span("route", 0, 1), span("experts", 0, 1)], None),
        ([], None),
    ],
)
def test_share_by_hand(spans: list[Span], share: float | None) -> None:
    assert hidden_share(spans) == (share if share is None else pytest.approx(share))


def test_ranges_that_touch_are_one() -> None:
    assert merged([(3, 4), (0, 1), (1, 2), (0, 0.5)]) == [(0, 2), (3, 4)]
    assert merged([]) == []


def test_each_thread_is_charged_for_its_own_spans() -> None:
    """A span that another thread opens meanwhile takes no time from this one's."""
    recorder, opened, closed = Recorder(), threading.Event(), threading.Event()

    def other() -> None:
        with recorder.span("dispatch"):
            opened.set()
            assert closed.wait(20.0)

    thread = threading.Thread(target=other)
    with recorder.span("experts"):
        thread.start()
        assert opened.wait(20.0)
    closed.set()
    thread.join()
    assert [(s.stage, s.own == s.end - s.start) for s in recorder.spans] == [("experts", True), ("dispatch", True)]
