"""Counters: a word for each source, and their sum."""

import pytest

from tests.support.network_ends import COUNTERS, FLAG_BYTES, FLAGS, RANKS, own_window


@pytest.mark.row(156)
def test_every_source_has_a_word_of_its_own_and_the_counter_is_their_sum() -> None:
    window = own_window(64)
    for source in range(RANKS):
        window.add(source, 1, 10**source)
        window.add(source, 1, 10**source)
    words = [window.words.load((FLAGS + n) * FLAG_BYTES) for n in range(COUNTERS * RANKS)]
    assert words == [0, 0, 0, 0, 2, 20, 200, 2000]
    assert window.counter(1) == 2222 and window.counter(0) == 0


def test_sums_go_around_at_64_bits() -> None:
    window = own_window(64)
    window.add(0, 0, (1 << 64) - 1)
    window.add(1, 0, 3)
    assert window.counter(0) == 2
    window.add(0, 0, 5)
    assert window.counter(0) == 7
