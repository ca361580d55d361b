"""Who is named when a peer of another host leaves while it is awaited."""

import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

from moe_mk.comm.network.heap import GRACE_S, WaitingForHosts
from moe_mk.errors import CommError


def waiting(dead: Callable[[], int | None], clock: Iterator[float], ended: str = "") -> WaitingForHosts:
    """Rank 3 awaits rank 0 of another host, which has stated goodbye; rank 2 is on this host."""
    window = SimpleNamespace(arrived=threading.Event())
    proxy: Any = SimpleNamespace(lost={}, fault=None, left={0: ended}, window=window, resuming=lambda: "")
    made: Any = WaitingForHosts(
        3, "combine", 7, "layers.3", peers=[], timeout_s=30.0, clock=lambda: next(clock), far=frozenset({0, 1}),
        proxy=proxy,
    )  # fmt: skip
    made._first_dead = dead
    return made  # type: ignore[no-any-return]


def pauses_until_raised(wait: WaitingForHosts, most: int = 50) -> tuple[int, str]:
    for number in range(most):
        try:
            wait.pause(0)
        except CommError as problem:
            return number, str(problem)
    raise AssertionError(f"{most} pauses and no error")


def test_a_process_that_is_still_ending_is_named_and_not_who_left_because_of_it() -> None:
    seen = iter([None, None, 2])  # connections are gone before the process counts as ended
    pauses, text = pauses_until_raised(waiting(lambda: next(seen), count(0.0, 0.01)))
    assert pauses == 3 and "peer 2: epoch 7: its process has ended" in text


def test_a_peer_that_left_of_its_own_is_named_after_a_moment() -> None:
    clock = count(0.0, GRACE_S / 4)
    _, text = pauses_until_raised(waiting(lambda: None, clock, "link 1 has ended"))
    start = "rank 3, phase 'combine', layer 'layers.3', peer 0: epoch 7: has closed its windows after link 1 has ended"
    assert text == start
    assert GRACE_S < next(clock) < 30.0
