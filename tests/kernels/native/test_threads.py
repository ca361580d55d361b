"""Native calls run on the OpenMP threads of torch or on their own: the same bits on both, and nothing waits forever.
Own threads may be moved to another processor when they wake up, and keep the processors they may use."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk.config.problem import Problem
from moe_mk.config.shipped import load_config
from moe_mk.experts.cpu_native import experts as cpu_native
from moe_mk.external.device import profile_here
from moe_mk.kernels.native.experts_mode import ExpertsMode
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.prepared import ExpertsCall, experts_rows
from moe_mk.kernels.native.threads import Runtime, described, engine_runtime
from moe_mk.quant.plain import BF16
from tests.kernels.native.layers import Layer, Storage, batch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are moved on Linux only")

THREADS = 3
Call = Callable[[int], Tensor]
"""A call with a number of threads."""


def prepared(native: Native) -> tuple[Call, Tensor]:
    """A call, and what it returns on one thread."""
    w13, w2 = Layer(4, 192, 288, Storage.FP8).pack(native)
    x_RH, ids_RK, weights_RK = batch(19, 192, 4, 3)
    call = ExpertsCall(native, w13, w2, None, ExpertsMode())
    return lambda threads: call(x_RH, None, ids_RK, weights_RK, None, threads), experts_rows(
        native, x_RH, ids_RK, weights_RK, w13, w2, threads=1
    )


@pytest.fixture
def on_engine(native: Native) -> Native:
    if isinstance(reason := engine_runtime(), str):
        pytest.skip(reason)
    call, _ = prepared(native)
    for _ in range(70):  # the calls of earlier tests came from another thread
        call(2)
    before = native.functions["pool_calls"](1)
    call(2)
    assert native.functions["pool_calls"](1) == before + 1
    return native


def test_calls_have_the_same_bits_on_any_threads(on_engine: Native) -> None:
    (call, wanted), (own, _) = prepared(on_engine), prepared(replace(on_engine, own_threads=True))
    chance, before = random.Random(5), torch.get_num_threads()
    before_own, num_own = on_engine.functions["pool_calls"](0), 0
    try:
        for _ in range(60):
            torch.set_num_threads(chance.randint(1, 3))  # regions of other sizes between the calls
            torch.ones(40_000).sin()
            run, threads = chance.choice((call, own)), chance.randint(2, 5)
            num_own += run is own
            assert torch.equal(run(threads), wanted)
    finally:
        torch.set_num_threads(before)
    assert on_engine.functions["pool_calls"](0) - before_own == num_own


def test_one_of_several_calls_at_once_has_the_engine_threads(on_engine: Native) -> None:
    call = ExpertsCall(on_engine, *Layer(4, 192, 288, Storage.FP8).pack(on_engine), None, ExpertsMode())
    inputs = [batch(19 + 7 * number, 192, 4, 3, seed=number) for number in range(3)]

    def run(number: int, threads: int = THREADS) -> Tensor:
        x_RH, ids_RK, weights_RK = inputs[number]
        return call(x_RH, None, ids_RK, weights_RK, None, threads)

    wanted = [run(number, 1) for number in range(3)]
    with ThreadPoolExecutor(3) as callers:
        found = list(callers.map(lambda number: [run(number) for _ in range(30)], range(3)))
    assert all(torch.equal(each, wanted[number]) for number, some in enumerate(found) for each in some)


def test_another_thread_takes_the_engine_threads_when_the_first_stops_calling(on_engine: Native) -> None:
    call, wanted = prepared(on_engine)
    seen: list[int] = []

    def serve() -> None:
        for _ in range(80):
            before = on_engine.functions["pool_calls"](1)
            assert torch.equal(call(2), wanted)
            seen.append(on_engine.functions["pool_calls"](1) - before)

    server = threading.Thread(target=serve)
    server.start()
    server.join(60)
    assert seen == [0] * 64 + [1] * 16


def test_a_call_inside_a_parallel_region_uses_own_threads(on_engine: Native) -> None:
    call, wanted = prepared(on_engine)
    runtime = engine_runtime()
    assert isinstance(runtime, Runtime)
    parallel = ctypes.CDLL(runtime.path).GOMP_parallel
    found: list[Tensor] = []
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(call(THREADS)))
    before = on_engine.functions["pool_calls"](1)
    parallel(region, None, 2, 0)
    assert len(found) == 2 and all(torch.equal(each, wanted) for each in found)
    assert on_engine.functions["pool_calls"](1) == before


def test_a_forked_process_uses_own_threads(on_engine: Native) -> None:
    call, wanted = prepared(on_engine)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        before = on_engine.functions["pool_calls"](1)
        right = all(torch.equal(call(THREADS), wanted) for _ in range(3))
        stated = "fork" in described()
        os._exit(0 if right and stated and on_engine.functions["pool_calls"](1) == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(call(THREADS), wanted)


def call_until_interrupted(call: Call, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        call(THREADS)


def test_calls_go_on_after_interrupts(on_engine: Native) -> None:
    call, wanted = prepared(on_engine)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for number in range(5):
            with pytest.raises(KeyboardInterrupt):
                call_until_interrupted(call, 0.001 + 0.0007 * number)
            assert torch.equal(call(THREADS), wanted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


LIMITED = """
import ctypes, os, sys
copies = [ctypes.CDLL(sys.argv[1], mode=getattr(ctypes, sys.argv[3]))]
import torch
copies.append(ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL))
from moe_mk.kernels.native.threads import engine_runtime
runtime = engine_runtime()
torch.set_num_threads(3)
assert ctypes.CFUNCTYPE(ctypes.c_int)(runtime.functions[-1])() == 3, runtime.path
first_is_torchs = runtime.path == sys.argv[1]
assert first_is_torchs == (sys.argv[3] == "RTLD_GLOBAL"), runtime.path
assert [copy.omp_get_max_threads() == 3 for copy in copies] == [first_is_torchs, False]
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from moe_mk.kernels.native.library import compile_and_open
from tests.kernels.native.test_threads import prepared
native = compile_and_open()
call, wanted = prepared(native)
for threads in (2, 3, 5):
    assert torch.equal(call(threads), wanted)
    torch.ones(40_000).sin()
print(native.functions["pool_calls"](1))
"""


@pytest.mark.parametrize("mode", ["RTLD_LOCAL", pytest.param("RTLD_GLOBAL", marks=pytest.mark.slow)])
def test_limits_of_the_process_and_other_copies_of_the_runtime(mode: str, on_engine: Native, tmp_path: Path) -> None:
    """A copy before and one after torch, two threads allowed, bound to processors, workers that never sleep. torch
    itself uses the earlier copy if its symbols are global."""
    runtime = engine_runtime()
    assert isinstance(runtime, Runtime)
    name = Path(runtime.path).name
    copies = [str(tmp_path / f"{number}{name}") for number in range(2)]
    for number, copy in enumerate(copies):  # as a wheel renames it, in its own entry as well
        soname = (name[:-1] + "ab"[number]).encode()
        Path(copy).write_bytes(Path(runtime.path).read_bytes().replace(name.encode() + b"\0", soname + b"\0"))
    limits = {"OMP_THREAD_LIMIT": "2", "OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "2"}
    command, environment = [sys.executable, "-c", LIMITED, *copies, mode], os.environ | limits
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]


def test_a_pinned_engine_that_is_not_there_is_a_reason_against(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(
        load_config("deepseek_v3").with_(threads="engine"), profile_here(torch.device("cpu")), BF16, 1,
        frozenset({"c++"}), frozenset(),
    )  # fmt: skip
    assert not cpu_native.CpuNativeExperts.reasons_against(problem)
    monkeypatch.setattr(cpu_native, "engine_runtime", lambda: "torch is built without OpenMP")
    reasons = list(map(str, cpu_native.CpuNativeExperts.reasons_against(problem)))
    assert len(reasons) == 1 and "kernel.threads = engine: torch is built without OpenMP" in reasons[0], reasons


def workers() -> list[int]:
    """The native threads of this process besides its own."""
    tasks = Path("/proc/self/task")
    return [int(task.name) for task in tasks.iterdir() if (task / "comm").read_text().strip() == "moe_mk"]


def own_calls(native: Native, number: int) -> list[Tensor]:
    """The same call again and again on own threads; before each one they fall asleep."""
    native = replace(native, own_threads=True)
    w13, w2 = Layer(4, 192, 288, Storage.FP8).pack(native)
    made = []
    for _ in range(number):
        time.sleep(0.002)
        made.append(experts_rows(native, *batch(19, 192, 4, 3), w13, w2, threads=THREADS))
    return made


@pytest.fixture
def processors() -> Iterator[set[int]]:
    """Those that the process may use, which every thread of it may use again after the test."""
    all_of_them = os.sched_getaffinity(0)
    yield all_of_them
    for thread in (0, *workers()):
        os.sched_setaffinity(thread, all_of_them)


def test_threads_may_use_the_same_processors_after_calls(native: Native, processors: set[int]) -> None:
    torch.manual_seed(0)
    own_calls(native, 20)
    assert len(workers()) >= THREADS - 1
    assert all(os.sched_getaffinity(worker) == processors for worker in workers())


def test_threads_that_the_user_has_bound_stay_where_they_are(native: Native, processors: set[int]) -> None:
    own_calls(native, 1)
    own = min(processors)
    for thread in (0, *workers()):  # all of them on the processor of the caller: there is no other one
        os.sched_setaffinity(thread, {own})
    torch.manual_seed(0)
    bound = own_calls(native, 10)
    assert all(os.sched_getaffinity(thread) == {own} for thread in (0, *workers()))

    for thread in (0, *workers()):
        os.sched_setaffinity(thread, processors)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(bound, own_calls(native, 10), strict=True))
