"""The package keeps the rules of the house, and each rule bites."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter

import pytest

from moe_mk.experts import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.registry import Registry
from tests.architecture import checks
from tests.architecture.checks import FAMILIES, FLOORS, RULES, SIDEWAYS, Source, package_sources
from tools.decode_step import decode_steps, engine_calls
from tools.house import LIMITS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.row(54)) if name == "imports_go_down" else name for name in RULES]
)
def test_the_package_keeps_the_rule(name: str) -> None:
    findings = [finding for source in package_sources() for finding in RULES[name](source)]
    assert not findings, "\n" + "\n".join(findings)


def test_the_package_is_really_read() -> None:
    paths = {source.path for source in package_sources()}
    assert {"moe_mk/errors.py", "moe_mk/kernel.py", "moe_mk/experts/reference.py"} <= paths
    assert sum(1 for source in package_sources() for _ in source.imports()) > 100
    assert {source.room for source in package_sources()} <= set(FLOORS)


def test_imports_along_a_floor_are_no_circle_and_never_between_families() -> None:
    for room, other in SIDEWAYS:
        assert FLOORS[room] == FLOORS[other] != FAMILIES
    graph = {room: {other for one, other in SIDEWAYS if one == room} for room, _ in SIDEWAYS}
    assert len(list(TopologicalSorter(graph).static_order())) == len({room for pair in SIDEWAYS for room in pair})


@pytest.mark.parametrize("registry", [EXPERTS, PREPARE_FINALIZE, MONOLITHIC], ids=lambda registry: registry.kind)
def test_every_backend_of_the_package_is_declared_with_its_module(registry: Registry) -> None:
    kind = {EXPERTS: "EXPERTS", PREPARE_FINALIZE: "PREPARE_FINALIZE", MONOLITHIC: "MONOLITHIC"}[registry]
    found = {
        (ast.literal_eval(name) if name != "NAME" else "one_sided_gpu", source.path[:-3].replace("/", "."))
        for source in package_sources()
        for name in re.findall(rf"^@{kind}\.register\((.*)\)$", source.text, re.MULTILINE)
    }
    assert found == {(name, registry.origin(name)) for name in registry if registry.origin(name).startswith("moe_mk.")}


BAD = [
    # rule, where the code stands, the code, what the finding states
    ("imports_go_down", "quant/a.py", "from moe_mk.experts.base import X", r"quant \(floor 2\) .* \(floor 3\)"),
    ("imports_go_down", "router/a.py", "from moe_mk import errors, permute", r"router .* moe_mk\.permute"),
    ("imports_go_down", "experts/a.py", "import moe_mk.prepare_finalize.base as b", r"experts .*prepare_finalize"),
    ("imports_go_down", "kernel.py", "def f():\n    from moe_mk.oracle import decide", r"py:2: kernel .*\.oracle"),
    ("imports_go_down", "rebalance/a.py", "import moe_mk.integrations.vllm", r"rebalance .* moe_mk\.integrations"),
    ("imports_go_down", "layer/a.py", "def f():\n    import moe_mk.lab.verify", r"py:2: layer .* moe_mk\.lab"),
    ("imports_go_down", "integrations/a.py", "from moe_mk.lab.cli import app", r"integrations .* moe_mk\.lab"),
    ("imports_go_down", "__init__.py", "from moe_mk import lab", r"__init__ .* moe_mk\.lab"),
    ("imports_go_down", "tokens.py", "if TYPE_CHECKING:\n    import moe_mk.runner", r"tokens .* moe_mk\.runner"),
    ("imports_go_down", "quant/a.py", "import importlib\nimportlib.import_module('moe_mk.layer')", r"py:2: .*layer"),
    ("imports_go_down", "layer.py", "import moe_mk", r"layer .* moe_mk \(floor 7\)"),
    ("imports_go_down", "layer.py", "from moe_mk import MoEConfig", r"front door"),
    ("imports_go_down", "layer.py", "from moe_mk.utils import x", r"stands on no floor"),
    ("imports_go_down", "utils.py", "", r"the room 'utils' stands on no floor"),
    ("optional_libraries_stay_home", "layer.py", "import triton.language as tl", r"triton\.language is optional"),
    ("optional_libraries_stay_home", "kernels/reference/a.py", "from deep_ep import Buffer", r"deep_ep\.Buffer"),
    ("optional_libraries_stay_home", "lab/cli/a.py", "def f():\n    import matplotlib.pyplot", r"py:2: matplotlib"),
    ("optional_libraries_stay_home", "a.py", "from importlib import import_module as i\ni('vllm')", r"py:2: vllm"),
    ("optional_libraries_stay_home", "placement/a.py", "from scipy.optimize import linprog", r"scipy\.optimize"),
    ("optional_libraries_stay_home", "layer/a.py", "def f():\n    import rich", r"py:2: rich"),
    ("environment_is_read_in_one_file", "lab/cli/app.py", "import os\nos.environ['A']", r"py:2: os\.environ"),
    ("environment_is_read_in_one_file", "a.py", "import os as o\no.getenv('A')", r"py:2: os\.getenv"),
    ("environment_is_read_in_one_file", "a.py", "from os import environ", r"py:1: os\.environ"),
    ("clock_is_read_in_one_file", "a.py", "import time\ntime.perf_counter_ns()", r"py:2: time\.perf_counter_ns"),
    ("clock_is_read_in_one_file", "a.py", "from time import monotonic as now", r"py:1: time\.monotonic"),
    ("clock_is_read_in_one_file", "a.py", "import datetime as d\nd.datetime.now()", r"py:2: datetime\.datetime\.now"),
    ("threads_are_started_in_one_file", "experts/a.py", "from concurrent.futures import Future", r"py:1: concurrent"),
    ("threads_are_started_in_one_file", "lab/cli/a.py", "import threading as t\nt.Event()", r"py:2: threading\.Event"),
    ("threads_are_started_in_one_file", "runner/a.py", "from queue import SimpleQueue", r"py:1: queue"),
    ("device_is_asked_in_one_file", "a.py", "import torch\ntorch.cuda.is_available()", r"py:2: torch\.cuda"),
    ("device_is_asked_in_one_file", "external/b.py", "from torch import accelerator", r"torch\.accelerator"),
    ("device_is_asked_in_one_file", "a.py", "from torch.cuda import Stream", r"torch\.cuda"),
    ("process_groups_are_given", "a.py", "import torch.distributed as d\nd.init_process_group()", r"py:2: init_"),
    ("process_groups_are_given", "a.py", "from torch.distributed import init_process_group as i", r"init_process"),
    ("process_groups_are_given", "a.py", "from torch.distributed.device_mesh import init_device_mesh", r"init_device"),
    ("nothing_is_unpickled", "a.py", "import pickle", r"pickle: reads code"),
    ("nothing_is_unpickled", "lab/cli/a.py", "import torch\ntorch.load('f')", r"py:2: torch\.load"),
    ("nothing_is_unpickled", "a.py", "import numpy as np\nnp.load('f', allow_pickle=True)", r"py:2: numpy\.load"),
    ("waits_have_a_deadline", "a.py", "while not is_so:\n    time.sleep(1)", r"py:1: a loop that .* reads no clock"),
    ("waits_have_a_deadline", "a.py", "while load(at) < 3:\n    n += 1", r"py:1: a loop that .* reads no clock"),
    ("waits_have_a_deadline", "a.py", "while not is_so:\n    continue", r"py:1: a loop that .* reads no clock"),
    (
        "waits_have_a_deadline",
        "a.py",
        "own, n = Lock(), 1\nwith self.own:\n    bell.wait(1)",
        r"py:2: a wait with a lock",
    ),
    ("waits_have_a_deadline", "a.py", "import socket\ndef f(door):\n    return door.accept()", r"py:2: a socket that"),
    ("waits_have_a_deadline", "a.py", "from concurrent.futures import Future\ndone.result()", r"py:2: a call without"),
    ("contexts_end_in_finally", "a.py", "@contextmanager\ndef f():\n    yield\n    g()", r"py:4: not done"),
    ("allocations_name_dtype_and_device", "a.py", "import torch\ntorch.empty(3)", r"name dtype and device"),
    ("allocations_name_dtype_and_device", "a.py", "import torch\ntorch.arange(3, dtype=torch.int32)", r"name device"),
    ("allocations_name_dtype_and_device", "a.py", "from torch import zeros as z\nz(3, device='cpu')", r"name dtype"),
    ("allocations_name_dtype_and_device", "a.py", "import torch as t\nt.nn.Linear(3, 4, bias=False)", r"nn\.Linear"),
    ("allocations_name_dtype_and_device", "a.py", "from torch import Tensor\nTensor(3)", r"follows torch's defaults"),
    ("allocations_name_dtype_and_device", "a.py", "import torch\ntorch.randn(3, **options)", r"name dtype and device"),
]
ENDLESS_CALLS = (
    "work.wait() | job.wait(None) | job.wait(float('inf')) | thread.join() | lock.acquire() | lock.acquire(True) | "
    "changed.wait_for(is_so) | process.communicate() | outputs.select() | _epoll.poll() | select.select(a, b, c) | "
    "fcntl.flock(file, fcntl.LOCK_EX) | subprocess.run(command) | pool.submit(subprocess.run, command) | "
    "dist.barrier(group) | dist.all_reduce(x, group=group)"
)
BAD += [("waits_have_a_deadline", "comm/a.py", code, r"py:1: a call without") for code in ENDLESS_CALLS.split(" | ")]


@pytest.mark.parametrize(("name", "where", "code", "complaint"), BAD)
def test_a_rule_finds_what_breaks_it(name: str, where: str, code: str, complaint: str) -> None:
    findings = list(RULES[name](Source(f"moe_mk/{where}", code)))
    assert len(findings) == 1, findings
    assert findings[0].startswith(f"moe_mk/{where}:")
    with pytest.raises(AssertionError, match=complaint):
        raise AssertionError(findings[0])


GOOD = [
    ("imports_go_down", "experts/a.py", "from moe_mk.experts.base import FusedExperts\nfrom moe_mk.errors import X"),
    ("imports_go_down", "registry.py", "from moe_mk.errors import ConfigError"),
    ("imports_go_down", "oracle/fp8.py", "from moe_mk.kernel import FusedMoEKernel"),
    ("imports_go_down", "lab/cli/a.py", "import moe_mk.lab.verify\nfrom moe_mk import layer, integrations"),
    ("imports_go_down", "__init__.py", "from moe_mk.layer import MoELayer"),
    ("optional_libraries_stay_home", "kernels/triton/a.py", "import triton"),
    ("optional_libraries_stay_home", "external/a.py", "import deep_ep"),
    ("optional_libraries_stay_home", "config/a.py", "import yaml, torch, numpy, json"),
    ("optional_libraries_stay_home", "lab/a.py", "import typer, rich.table"),
    ("environment_is_read_in_one_file", "lab/cli/environment.py", "import os\nos.environ['A']"),
    ("environment_is_read_in_one_file", "a.py", "import os\nos.cpu_count()"),
    ("threads_are_started_in_one_file", "a.py", "from threading import Lock, RLock, get_ident, local"),
    ("clock_is_read_in_one_file", "trace/clock.py", "import time\ntime.perf_counter()"),
    ("clock_is_read_in_one_file", "a.py", "def f(time):\n    return time.time()"),
    ("device_is_asked_in_one_file", "external/device.py", "import torch\ntorch.cuda.is_available()"),
    ("waits_have_a_deadline", "a.py", "text.join(words)\nwork.wait(3)\nlock.acquire(timeout=limit_s)\njob.result()"),
    ("waits_have_a_deadline", "a.py", "while not is_so:\n    if now() > until:\n        break\n    time.sleep(1)"),
    ("process_groups_are_given", "lab/testing/world.py", "import torch.distributed as d\nd.init_process_group()"),
    ("nothing_is_unpickled", "a.py", "import numpy as np\nnp.load('f', allow_pickle=False)"),
    ("allocations_name_dtype_and_device", "a.py", "import torch\ntorch.empty(3, dtype=torch.int8, device=x.device)"),
    ("allocations_name_dtype_and_device", "a.py", "import torch\ntorch.empty_like(x)\nx.new_zeros(3)"),
]


@pytest.mark.parametrize(("name", "where", "code"), GOOD)
def test_a_rule_lets_pass_what_keeps_it(name: str, where: str, code: str) -> None:
    assert list(RULES[name](Source(f"moe_mk/{where}", code))) == []


def test_every_exception_is_needed_and_native_code_waits_in_two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    excepted = len(checks.WITHOUT_DEADLINE)
    monkeypatch.setattr(checks, "WITHOUT_DEADLINE", {})
    found = [finding for source in package_sources() for finding in RULES["waits_have_a_deadline"](source)]
    assert len(found) == excepted, found
    waits = re.compile(r"\.wait\(|\.join\(|sched_yield\(|_pause\(|sleep(_for)?\(|futex|_lock\(")
    native = {path.name: path.read_text() for path in (checks.ROOT / "moe_mk/kernels/csrc").glob("*.*")}
    # Threads of a pool wait for work of this process; the other waits for peers, until a time.
    assert {name for name, text in native.items() if waits.search(text)} == {"thread_pool.cpp", "exchange.cpp"}
    assert native["exchange.cpp"].count("relax(turn)") == native["exchange.cpp"].count(">= until) return kLate;") == 1


def test_every_rule_is_shown_to_bite() -> None:
    assert {name for name, *_ in BAD} == set(RULES)


def test_a_decode_step_has_no_more_frames_than_its_limits() -> None:
    counted = {name: number for step in decode_steps() for name, number in step.as_dict().items() if name in LIMITS}
    assert len(counted) == 4 and all(number <= LIMITS[name] for name, number in counted.items()), counted


def test_a_call_of_an_engine_has_no_more_frames_than_its_limits() -> None:
    counted = {f"frames in {engine}": len(frames) for engine, frames in engine_calls().items()}
    assert len(counted) == 2 and all(number <= LIMITS[name] for name, number in counted.items()), counted
