"""Four bits restore order: immediates by hand, groups by hand, every shuffle inside the window, and beyond it."""

import random

import pytest

from moe_mk.comm.network.frames import TURN, WINDOW, Frame, FrameError, Kind, Reorder, WindowOverflow


def test_an_immediate_is_32_bits_with_the_sequence_in_the_lowest_four() -> None:
    # Group 35 = lap 2, sequence 3; kind 2; flag 5.
    frame = Frame(Kind.STORE, 35, flag=5)
    assert int.from_bytes(frame.pack()[:4], "little") == 3 | 2 << 4 | 2 << 16 | 5 << 20
    for number in (0, 15, 16, TURN - 1):
        for kind in Kind:
            frame = Frame(kind, number, 1, 2, 3, 4, 4095, 6, 7)
            assert Frame.unpack(frame.pack()) == frame
    assert Frame.unpack(Frame(Kind.FENCE, TURN + 2).pack()).number == 2
    with pytest.raises(FrameError, match="no message begins with 00000f00: 15 is not a valid Kind"):
        Frame.unpack((15 << 16).to_bytes(32, "little"))


@pytest.mark.row(154, 155)
def test_a_group_waits_for_its_parts_and_for_the_groups_before_it() -> None:
    inbox: Reorder[str] = Reorder()
    inbox.control(1, 0, "second")
    assert inbox.ready() == [], "the first group is not there"
    inbox.part(0, 1)
    inbox.control(0, 2, "first")
    assert inbox.ready() == [], "part 0 of the first group is not there"
    inbox.part(2, 0)  # payload of a later group may come at any time
    inbox.part(0, 0)
    assert inbox.ready() == ["first", "second"]
    inbox.control(2, 1, "third")
    assert inbox.ready() == ["third"] and inbox.applied == 3


@pytest.mark.row(154)
def test_any_order_within_the_window_is_put_right() -> None:
    draw = random.Random(1)
    for turn in range(200):
        inbox: Reorder[int] = Reorder(applied=turn * 997)
        first = inbox.applied
        parts_of = [draw.randint(0, 3) for _ in range(WINDOW)]
        messages = [(first + n, part) for n in range(WINDOW) for part in range(parts_of[n])]
        messages += [(first + n, -1) for n in range(WINDOW)]
        draw.shuffle(messages)
        messages += draw.sample(messages, 5)  # late duplicates
        got: list[int] = []
        for number, part in messages:
            if part < 0:
                inbox.control(number % TURN, parts_of[number - first], number)
            else:
                inbox.part(number % TURN, part)
            got += inbox.ready()
        assert got == list(range(first, first + WINDOW))


@pytest.mark.row(154)
def test_a_group_beyond_the_window_is_an_error_and_changes_nothing() -> None:
    inbox: Reorder[str] = Reorder(applied=5)
    # Sequence 5 of the next lap: four bits alone would take it for group 5 itself.
    with pytest.raises(
        WindowOverflow, match="group 21 is 16 ahead of the next one .* reaches 15; the sender must wait"
    ):
        inbox.control(5 + WINDOW, 0, "wrong")
    with pytest.raises(WindowOverflow):
        inbox.part(5 + WINDOW, 0)
    inbox.control(5, 0, "right")
    assert inbox.ready() == ["right"]


def test_what_was_applied_before_counts_for_nothing() -> None:
    inbox: Reorder[str] = Reorder(applied=20)
    for number in (19, 4, 0):
        assert not inbox.is_new(number)
        inbox.part(number, 0)
        inbox.control(number, 1, "again")
    assert inbox.ready() == [] and inbox.applied == 20
