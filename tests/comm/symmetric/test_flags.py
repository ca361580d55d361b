"""Words of 64 bits, an epoch and a count, kept whole; and waits that distinguish the dead from the late."""

import ctypes
from unittest.mock import Mock

import pytest

from moe_mk.comm.symmetric.flags import (
    LIBATOMIC,
    AtomicWords,
    PlainWords,
    WaitingForProcess,
    Words,
    is_behind,
    word_of,
    words_of,
)
from moe_mk.comm.symmetric.memory import Memory
from moe_mk.errors import CommError, UnsupportedError
from moe_mk.process import Process, WatchedProcess


def test_epochs_wrap_and_counts_stay_beside_them() -> None:
    assert word_of(3, 5) == 3 * 2**32 + 5
    assert [is_behind(word_of(4, 9), epoch) for epoch in (3, 4, 5)] == [False, False, True]
    assert is_behind(word_of(2**32 - 1, 0), 2**32) and not is_behind(word_of(2**32, 0), 2**32)


@pytest.mark.parametrize("make", [PlainWords, lambda memory: AtomicWords(memory, ctypes.CDLL(LIBATOMIC))])
def test_words_keep_all_bits(make: type[PlainWords]) -> None:
    memory = Memory(256)
    words: Words = make(memory.bytes)
    words.store(128, 2**64 - 2)
    words.fence()
    assert words.load(128) == 2**64 - 2 and words.load(0) == 0
    assert memory.bytes[128:136].tolist() == [254] + [255] * 7


def test_a_processor_without_total_store_order_needs_libatomic() -> None:
    memory, missing = Memory(64).bytes, Mock(side_effect=OSError("libatomic.so.1"))
    assert isinstance(words_of(memory, "x86_64", missing), PlainWords)
    assert isinstance(words_of(memory, "aarch64"), AtomicWords)
    with pytest.raises(UnsupportedError, match=r"aarch64 orders memory weakly and libatomic.so.1 is not installed"):
        words_of(memory, "aarch64", missing)


def test_a_wait_looks_once_more_before_it_gives_up() -> None:
    me, ticks = WatchedProcess.of(Process.this()), iter(range(1, 1000))
    waiting = WaitingForProcess(0, "combine", 3, "layers.1", peers=[me, me], timeout_s=5, clock=lambda: next(ticks))
    for _ in range(1000):
        waiting.pause(1)
        if waiting._verdict:
            break
    with pytest.raises(CommError, match=r"rank 0, phase 'combine', layer 'layers.1', peer 1: epoch 3: .* within 5 s"):
        waiting.pause(1)
