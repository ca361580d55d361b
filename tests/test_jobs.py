"""Jobs end in a result, an error or a limit, and an interrupt of their caller costs no later job anything."""

import os
import signal
import threading
import time
from _thread import start_new_thread
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from moe_mk import jobs
from moe_mk.errors import UnsupportedError
from moe_mk.jobs import Bell, Job, Threads, all_results, listen
from tests.layer.interrupted_ranks import Interrupts
from tests.support.threads import job_threads, job_threads_left


@pytest.fixture(autouse=True)
def no_threads_of_other_tests() -> None:
    assert job_threads_left() == 0


def test_a_job_ends_in_its_result_or_in_its_error() -> None:
    threads = Threads(2)
    right, wrong, leaves = threads.start(lambda: 3), threads.start(lambda: 1 // 0), threads.start(lambda: exit(3))
    assert all(job.wait(60) and job.is_over for job in (right, wrong, leaves))
    assert right.result() == 3 and right.error is None and isinstance(leaves.error, SystemExit)
    with pytest.raises(ZeroDivisionError):
        wrong.result()
    assert not threads.start(partial(time.sleep, 0.3)).wait(0.01)


def test_a_job_that_was_cancelled_never_begins_and_one_that_has_begun_goes_on() -> None:
    threads, may_end, made = Threads(1), threading.Event(), list[int]()
    begun = SimpleQueue[None]()

    def call() -> None:
        begun.put(None)
        assert may_end.wait(60)

    first = threads.start(call)
    begun.get(timeout=60)
    second, third = threads.start(lambda: made.append(2)), threads.start(lambda: made.append(3))
    first.cancel()
    second.cancel()
    assert second.is_over and not first.is_over and not second.has_ended
    may_end.set()
    assert third.wait(60) and first.wait(60) and made == [3] and not second.has_ended


def test_threads_are_never_more_than_asked_for_serve_again_and_end_when_idle() -> None:
    threads, most, lock = Threads(3, linger_s=0.2), 0, threading.Lock()
    running = 0

    def call() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1
        return threading.get_ident()

    used = set(all_results(threads, [call] * 30))
    assert most == 3 == len(used)
    assert set(all_results(threads, [call] * 6)) <= used
    assert job_threads() == 3 and job_threads_left() == 0
    assert all_results(threads, [call] * 2) and job_threads_left() == 0


@pytest.mark.parametrize("linger_s", [0.0, 0.0003])
def test_a_job_that_is_given_while_threads_end_is_run(linger_s: float) -> None:
    threads, draw = Threads(2, linger_s=linger_s), Random(1)
    for _ in range(300):
        job = threads.start(lambda: 1)
        assert job.wait(10)
        time.sleep(draw.uniform(0, 2 * linger_s))


def test_results_are_in_order_and_nothing_begins_after_a_failure() -> None:
    seen, made = list[int](), list[int]()

    def call(number: int) -> int:
        if number == 2:
            raise ValueError("the third")
        time.sleep(0.002 * (number % 3))
        made.append(number)
        return number

    assert all_results(Threads(3), [partial(call, each) for each in (0, 1, 3, 4)], seen.append) == [0, 1, 3, 4] == seen
    made.clear()
    with pytest.raises(ValueError, match="the third"):
        all_results(Threads(1), [partial(call, each) for each in range(50)])
    time.sleep(0.05)
    assert len(made) < 49


@pytest.mark.parametrize("again", [False, True])
def test_no_call_goes_on_after_an_interrupt(again: bool) -> None:
    """What calls write to may be closed next, and the number of its descriptor be that of another file."""
    running = set[int]()

    def call(number: int) -> int:
        running.add(number)
        time.sleep(0.002 if number == 0 else 0.1)
        running.discard(number)
        return number

    def interrupt(number: int) -> None:
        if again:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGALRM)).start()
        raise KeyboardInterrupt

    def handle(number: int, frame: Any) -> None:
        raise InterruptedError("again")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises((KeyboardInterrupt, InterruptedError)):
            all_results(Threads(2), [partial(call, number) for number in range(6)], interrupt)
        assert not running
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_starts_threads_of_its_own() -> None:
    threads = Threads(1)
    assert threads.start(lambda: 1).wait(60)  # its thread lingers
    if not (child := os.fork()):
        ended = threads.start(lambda: 1).wait(30)
        os._exit(0 if ended else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_system_without_threads_is_an_error_unless_there_is_one_already() -> None:
    threads, may_end = Threads(2), threading.Event()
    refused = patch.object(jobs, "start_new_thread", side_effect=RuntimeError("can't start new thread"))
    text = r"a thread cannot be started(.|\n)*can't start new thread; raise"
    with refused, pytest.raises(UnsupportedError, match=text):
        threads.start(lambda: 1)
    first = threads.start(partial(may_end.wait, 60))
    with refused:
        second = threads.start(lambda: 1)
    may_end.set()
    assert second.wait(60) and first.wait(60)


def test_a_ring_that_was_taken_by_an_interrupt_costs_a_moment() -> None:
    bell, so = Bell(), list[int]()
    start_new_thread(lambda: (time.sleep(0.02), so.append(1)), ())  # type: ignore[func-returns-value]
    began = time.monotonic()
    assert listen(bell, lambda: bool(so), 60) and time.monotonic() - began < 20


def test_a_handler_that_takes_longer_than_a_wait_does_not_make_it_endless() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.08))
    try:
        main = threading.main_thread().ident or 0
        start_new_thread(lambda: (time.sleep(0.02), signal.pthread_kill(main, signal.SIGUSR1)), ())  # type: ignore[func-returns-value]
        assert not listen(Bell(), lambda: False, 0.06)
    finally:
        signal.signal(signal.SIGUSR1, before)


def use(threads: Threads) -> list[int]:
    """Every verb."""
    first = threads.start(lambda: 1)
    other = Job(lambda: 2)
    threads.put(other)
    other.cancel()
    assert first.wait(30)
    return all_results(threads, [lambda: 3, lambda: 4])


def interrupted(threads: Threads, place: int | None) -> Interrupts:
    interrupts = Interrupts(place, use.__code__)

    def traced() -> list[int]:
        with interrupts.traced():
            return use(threads)

    with suppress(KeyboardInterrupt):
        assert traced() == [3, 4]
    return interrupts


def test_an_interrupt_at_any_instruction_keeps_no_later_job_from_ending() -> None:
    threads = Threads(2, linger_s=0.1)
    places, raised = interrupted(threads, None).places, 0
    for place in range(1, places + 1):
        raised += bool(interrupted(threads, place).at)
        began = time.monotonic()
        assert use(threads) == [3, 4], place
        assert time.monotonic() - began < 10, place
    assert raised > places // 2
    assert job_threads_left() == 0


def test_what_a_job_has_used_is_free_once_it_has_ended() -> None:
    class Held:
        pass

    from weakref import ref

    held = Held()
    gone, threads = ref(held), Threads(1)

    def fails(value: Any) -> None:
        raise ValueError(type(value).__name__)

    job = threads.start(partial(fails, held))
    assert job.wait(60)
    del held
    job.error = None  # its traceback refers to the frames of the call
    until = time.monotonic() + 5
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None


def test_calls_are_made_by_their_caller_where_no_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread without memory for its first frame ends without running any Python code."""
    monkeypatch.setattr(jobs, "start_new_thread", lambda run, arguments: 0)
    monkeypatch.setattr(jobs, "BEGIN_S", 0.05)
    threads = Threads(2, linger_s=0.1)
    here = threading.get_ident()
    assert all_results(threads, [lambda: threading.get_ident()] * 5) == [here] * 5
    with pytest.raises(ZeroDivisionError):
        all_results(threads, [lambda: 1 // 0])
    monkeypatch.undo()
    time.sleep(0.1)
    assert all_results(threads, [lambda: threading.get_ident()] * 5) != [here] * 5, "threads begin again"


def test_a_call_ends_where_its_error_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(Job[int]):
        def run(self) -> None:
            self._owner["is"] = "thread"
            raise MemoryError

    threads = Threads(1)
    threads.put(job := Short(lambda: 1))
    assert job.wait(5.0)
    with pytest.raises(MemoryError):
        job.result()
    assert all_results(threads, [lambda: 2]) == [2], "the thread goes on"
