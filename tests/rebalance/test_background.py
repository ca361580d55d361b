"""A background job always ends in its result, its error, or a timeout."""

import threading
from unittest.mock import Mock

import pytest

from moe_mk import jobs
from moe_mk.errors import UnsupportedError
from moe_mk.jobs import Job
from moe_mk.rebalance.background import BackgroundJob


def wait_for(thread: BackgroundJob[int]) -> Job[int]:
    pause = threading.Event()
    while (outcome := thread.poll()) is None:
        pause.wait(0.005)
    return outcome


def test_a_result_is_returned_once() -> None:
    thread: BackgroundJob[int] = BackgroundJob("adder", limit_s=60)
    assert thread.poll() is None and not thread.busy
    thread.start(lambda: 1 + 1)
    assert thread.busy and wait_for(thread).result() == 2
    assert thread.poll() is None and not thread.busy


@pytest.mark.parametrize(
    ("inline", "error"), [(False, ZeroDivisionError), (True, ZeroDivisionError), (False, SystemExit)]
)
def test_an_error_is_reported_and_not_raised(inline: bool, error: type[BaseException]) -> None:
    thread: BackgroundJob[int] = BackgroundJob("divider", limit_s=60, inline=inline)
    thread.start(Mock(side_effect=error))
    assert isinstance(wait_for(thread).error, error)


def test_a_job_that_hangs_is_given_up_and_the_next_one_runs() -> None:
    release = threading.Event()
    thread: BackgroundJob[int] = BackgroundJob("sleeper", limit_s=0.01)
    thread.start(lambda: int(release.wait(60)))
    assert "sleeper took more than 0.01 s and was abandoned" in str(wait_for(thread).error)
    thread.limit_s = 60.0
    thread.start(lambda: 7)
    release.set()
    assert wait_for(thread).result() == 7


@pytest.mark.parametrize("lacks", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_job_without_a_thread_is_reported_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, lacks: Exception
) -> None:
    thread: BackgroundJob[int] = BackgroundJob("waiter", limit_s=60)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "start_new_thread", Mock(side_effect=lacks))
        thread.start(lambda: 7)
    found = wait_for(thread).error
    assert isinstance(found, UnsupportedError) and found.__cause__ is lacks
    thread.start(lambda: 7)
    assert wait_for(thread).result() == 7
