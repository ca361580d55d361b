"""What holds for every test: fixed seeds, no leaked defaults, known rows, and a skip that states what is missing."""

import importlib.util
import json
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
import yaml

SEED = 20_260_101

DURATIONS: dict[str, float] = json.loads((Path(__file__).parent / "durations.json").read_text(encoding="utf-8"))
"""Seconds of the tests that take longest, which are `slow`; `tools/durations.py` writes them."""

# The same examples on every run, and no deadline: the machines that run this differ by a factor of ten.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    torch.set_num_threads(1)  # as in processes of ranks, whose bits are compared; commands set others
    random.seed(SEED)
    np.random.seed(SEED)  # the legacy generator is the one that third-party code draws from
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def no_leaked_defaults() -> Iterator[None]:
    """Fail a test that leaves torch's default dtype, default device or gradient mode changed."""
    before = _defaults()
    yield
    after = _defaults()
    torch.set_default_dtype(before[0])
    torch.set_default_device(None)
    torch.set_grad_enabled(before[2])
    assert after == before, f"the test left (dtype, device, gradients) at {after}, found {before}"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal: a shell in the background ignores it, and processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["tcp", "nixl"])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test over each network link; proxies and heaps that tests open without naming a link use it."""
    from tests.support.network_ends import CHOSEN

    name = str(request.param)
    skip_without_library(name)
    monkeypatch.setitem(CHOSEN, "link", name)
    return name


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def world_link(request: pytest.FixtureRequest) -> str:
    """A network link for the processes of a module, which are started once for each."""
    name = str(request.param)
    skip_without_library(name)
    return name


def skip_without_library(link: str) -> None:
    from moe_mk.comm.network import LINKS
    from moe_mk.external.library import installed

    library = LINKS[link].library
    if library and library not in installed():
        pytest.skip(f"{library} is not installed: make {library} has it")


def _defaults() -> tuple[torch.dtype, torch.device, bool]:
    return torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--machine-seconds", default="3600", help="how long tests/layer/test_stateful.py draws at random")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    content = yaml.safe_load((Path(__file__).parent / "rows.yaml").read_text(encoding="utf-8"))
    check_rows(items, {row for section in content["sections"] for row in section["rows"]})
    for item in items:
        if item.nodeid in DURATIONS:
            item.add_marker("slow")
        if missing := missing_device(item):
            item.add_marker(pytest.mark.skip(reason=missing))
    # Files that take longest first: a worker that begins one of them last works alone for a minute.
    of_file = defaultdict[str, float](float)
    for item in items:
        of_file[item.nodeid.partition("::")[0]] += DURATIONS.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -of_file[item.nodeid.partition("::")[0]])


def check_rows(items: list[pytest.Item], known: set[str]) -> None:
    """Refuse to run with marks that name rows which do not exist."""
    unknown = {
        f"{item.nodeid}: unknown row {row}"
        for item in items
        for mark in item.iter_markers("row")
        for row in map(str, mark.args)
        if row not in known
    }
    if unknown:
        raise pytest.UsageError("\n".join([*sorted(unknown), "tests/rows.yaml names the rows"]))


def missing_device(item: pytest.Item) -> str:
    """What a test marked `gpu` or `sm90` lacks on this machine, or nothing."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        return "needs a CUDA device"
    if item.get_closest_marker("sm90") is not None and importlib.util.find_spec("triton") is None:
        return "needs triton, to compile for sm_90"
    return ""
