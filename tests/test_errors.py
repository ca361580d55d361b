"""Errors say everything, belong to the built-in families, and survive pickling (they cross processes)."""

import copy
import pickle

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
    UnsupportedError,
    WeightError,
)

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
