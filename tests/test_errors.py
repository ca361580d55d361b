"""Errors say everything, belong to the built-in families, and survive pickling (they cross processes)."""

import copy
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from moe_mk.errors import (
    CommError,
    ConfigError,
    FallbackWarning,
    LibraryMissing,
    LostExpertError,
    MoEMKError,
    MoEMKWarning,
    PluginWarning,
    RegroupError,
    ShapeError,
    Suppress,
    UnsupportedError,
    WeightError,
    unless_signalled,
)
from moe_mk.files import read_json

ERRORS = [
    ConfigError("top_k=9 exceeds 8"),
    ShapeError("x has 3 dimensions"),
    WeightError("2 tensors are missing"),
    UnsupportedError("nothing serves", ["first reason", "second reason"]),
    UnsupportedError("nothing serves"),
    LibraryMissing("deep_ep cannot be imported", ["No module named 'deep_ep'", "pip install it"]),
    LostExpertError("experts 1, 2 have no live copy", layer="layers.3", experts=[1, 2]),
    RegroupError("4 ranks cannot go on as 3", ["rank 1: no memory"]),
    CommError("is dead", rank=3, phase="dispatch", layer="layers.3", peer=1),
    CommError("is dead", rank=0, phase="combine"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: f"{type(e).__name__}-{len(str(e))}")
@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_errors_travel_whole(error: MoEMKError, copied: object) -> None:
    assert callable(copied)
    twin = copied(error)
    assert type(twin) is type(error) and str(twin) == str(error) and vars(twin) == vars(error)


def test_every_reason_is_in_the_message() -> None:
    error = UnsupportedError("no pair serves this", ["needs a GPU", "needs sm_90"])
    assert str(error) == "no pair serves this\n  - needs a GPU\n  - needs sm_90"
    assert error.reasons == ("needs a GPU", "needs sm_90")


def test_a_comm_error_states_where_and_who() -> None:
    assert str(ERRORS[-2]) == "rank 3, phase 'dispatch', layer 'layers.3', peer 1: is dead"
    assert str(ERRORS[-1]) == "rank 0, phase 'combine': is dead"


@pytest.mark.parametrize(
    "error, family",
    [
        (ConfigError, ValueError),
        (ShapeError, ValueError),
        (WeightError, ValueError),
        (UnsupportedError, RuntimeError),
        (LibraryMissing, ImportError),
        (LibraryMissing, UnsupportedError),
        (CommError, RuntimeError),
    ],
)
def test_errors_belong_to_the_families_that_hosts_catch(error: type, family: type) -> None:
    assert issubclass(error, family) and issubclass(error, MoEMKError)


def test_warnings_have_one_base_that_a_host_can_filter() -> None:
    assert issubclass(FallbackWarning, MoEMKWarning) and issubclass(PluginWarning, MoEMKWarning)
    assert issubclass(MoEMKWarning, UserWarning)


class Stop(TimeoutError):
    pass


def plain(signum: int, frame: object) -> None:
    raise Stop("too late")


class Watch:
    def ring(self, signum: int, frame: object) -> None:
        plain(signum, None)

    def __call__(self, *_: object) -> None:
        raise Stop("too late")


HANDLERS = [plain, lambda *_: plain(0, None), Watch().ring, Watch(), partial(lambda text, *_: plain(0, None), "x")]


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[..., None], float], None]]:
    before = signal.getsignal(signal.SIGALRM)

    def set_to(handler: Callable[..., None], seconds: float) -> None:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield set_to
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def guarded(call: Callable[[], object]) -> str:
    """What code that expects errors of the system takes for one."""
    with Suppress(BlockingIOError):
        try:
            call()
        except unless_signalled(RuntimeError, OSError) as problem:
            return type(problem).__name__
    return ""


@pytest.mark.parametrize("handler", HANDLERS)
def test_what_a_handler_raises_is_not_taken_for_an_error_of_the_code_around(
    handler: Callable[..., None], alarm: Callable[[Callable[..., None], float], None]
) -> None:
    with pytest.raises(Stop):
        guarded(lambda: (alarm(handler, 0.01), time.sleep(5.0)))
    assert guarded(Path("/nowhere/at/all").stat) == "FileNotFoundError"
    assert guarded(partial(plain, 0, None)) == "Stop"  # called by hand


def test_a_handler_may_raise_at_any_moment_of_reading_a_file(
    tmp_path: Path, alarm: Callable[[Callable[..., None], float], None]
) -> None:
    file, draw, ends = tmp_path / "a.json", random.Random(0), set[str]()
    file.write_text('{"a": [' + "1, " * 20_000 + "2]}")
    for _ in range(60):
        try:
            alarm(HANDLERS[draw.randrange(len(HANDLERS))], draw.uniform(1e-5, 2e-3))
            read_json(file)
            ends.add("read")
            time.sleep(0.01)
        except Exception as error:
            ends.add(type(error).__name__)
    assert ends <= {"read", "Stop"} and "Stop" in ends
