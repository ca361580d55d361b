"""How experts_cpu.py measures: everybody in turn, each call directly behind another one of its own.

A decoder calls one layer after the other, so what counts is a call that follows a call. Before each turn there is a
pause, until the last one's idle threads have stopped spinning; then comes a call that wakes the threads up, and behind
it those that count. Up to FEW tokens the one that wakes up is the same call, and its time is kept as well: the first
call after a pause, in which threads may start milliseconds late (a virtual machine may put them on one core at first).
Of more tokens it is the first few of them, which is cheap beside what is measured.

In an engine every call follows an operator of torch, whose threads spin for a while afterwards. With such an operator
each turn has further calls, each directly behind it.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from experts_cpu_peers import Batch, Experts

from moe_mk.kernels.native.instruction_set import choice
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix

Times = dict[str, float]
Clocks = tuple[float, float]

PAUSE = 0.03
STEP, STEPS = 0.002, 50
"""Seconds and number of further sleeps of `settle`."""
FEW = 16
PEAK_ITERATIONS = 3_000_000
IN_A_ROW = 3
"""Calls that count in each turn, of few tokens; of more it is one."""


def settle(pause: float = PAUSE) -> None:
    """Sleep for `pause` seconds, then until no thread of this process uses the processor, 0.1 seconds more at most.

    Idle threads of OpenMP stop spinning within a few milliseconds, those of kt-kernel after 30 to 45.
    """
    time.sleep(pause)
    for _ in range(STEPS):
        start = time.process_time()
        time.sleep(STEP)
        if time.process_time() - start < STEP / 10:
            return


def clocked(call: Callable[[], object]) -> Clocks:
    """Wall and processor milliseconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


@dataclass
class Candidate:
    """Somebody who is measured. awake: the call before those that count, the same one for few tokens."""

    call: Callable[[], object]
    awake: Callable[[], object]
    few: bool
    operator: Callable[[], object] | None = None
    """The operator of torch that further calls follow."""
    first: list[Clocks] = field(default_factory=list)
    seen: list[Clocks] = field(default_factory=list)
    behind: list[Clocks] = field(default_factory=list)
    """Of calls behind the operator."""

    def turn(self) -> None:
        """One turn: pause, wake up, measure."""
        settle()
        self.first.append(clocked(self.awake))
        calls = IN_A_ROW if self.few else 1
        self.seen += [clocked(self.call) for _ in range(calls)]
        for _ in range(calls if self.operator is not None else 0):
            self.operator()
            self.behind.append(clocked(self.call))

    def times(self) -> Times:
        """Medians and minima; those of the first call after a pause where it was the same call."""
        wall, cpu = zip(*self.seen, strict=True)
        found = {"wall_ms": statistics.median(wall), "cpu_ms": statistics.median(cpu), "cpu_ms_min": min(cpu)}
        if self.behind:
            wall, cpu = zip(*self.behind, strict=True)
            found |= {"behind_wall_ms": statistics.median(wall), "behind_cpu_ms": statistics.median(cpu)}
        if not self.few:
            return found
        wall, cpu = zip(*self.first, strict=True)
        return found | {"first_wall_ms": statistics.median(wall), "first_cpu_ms": statistics.median(cpu)}


class Yardsticks:
    """What the machine can do: read the touched weights, and multiply."""

    WAYS = 2
    """Of reading (`ReadWay` of csrc/abi.h): which is the faster one depends on the processor."""

    def __init__(self, native: Native, weights: tuple[PackedMatrix, PackedMatrix], threads: int) -> None:
        self.native, self.weights, self.threads = native, weights, threads
        self.flops = 0.0

    def read(self, share: float, way: int) -> None:
        """Read that share of the packed weights once."""
        folded = ctypes.c_uint64(0)
        for matrix in self.weights:
            size = int(matrix.values_LB.numel() * share)
            pointer, best = matrix.values_LB.data_ptr(), int(self.native.best)
            self.native.call("read_rate", pointer, size, way, self.threads, best, ctypes.byref(folded))

    def multiply(self, iterations: int = 0) -> None:
        """Run the bare multiply-add loop with the most products an instruction; self.flops is what it did."""
        self.operations(choice(self.native, Format.INT4).isa, 0, iterations or PEAK_ITERATIONS)

    def operations(self, isa: Isa, floats: int, iterations: int) -> float:
        """Operations a second of all threads by a multiply-add instruction of a set: of integers, or of floats."""
        done, start = ctypes.c_double(0), time.perf_counter()
        self.native.call("peak_rate", iterations, self.threads, int(isa), floats, ctypes.byref(done))
        self.flops = done.value
        return self.flops / (time.perf_counter() - start)

    def candidates(self, share: float) -> dict[str, Candidate]:
        """Reading in every way, and multiplying."""
        reads = [lambda way=way: self.read(share, way) for way in range(self.WAYS)]
        found = {f"read {way}": Candidate(read, read, few=True) for way, read in enumerate(reads)}
        return found | {"peak": Candidate(self.multiply, lambda: self.multiply(PEAK_ITERATIONS // 100), few=False)}


def measure(
    experts: Mapping[str, Experts],
    yardsticks: Yardsticks,
    batch: Batch,
    rounds: int,
    until: float,
    operator: Callable[[], object] | None = None,
) -> dict[str, Times]:
    """Call everything in turn, `rounds` times and until a time. "read" is the fastest way of reading: an upper bound.

    until: a time of time.monotonic(). operator: of torch, which further calls of the experts follow.
    """
    share = batch[1].unique().numel() / yardsticks.weights[0].num_slots
    start = (batch[0][:FEW], batch[1][:FEW], batch[2][:FEW])
    few = batch[0].shape[0] <= FEW
    everybody = yardsticks.candidates(share) | {
        name: Candidate(lambda run=run: run(*batch), lambda run=run: run(*start), few, operator)
        for name, run in experts.items()
    }
    for each in everybody.values():
        each.call()
    while rounds > 0 or time.monotonic() < until:
        for each in everybody.values():
            each.turn()
        rounds -= 1
    times = {name: each.times() for name, each in everybody.items()}
    reads = [times.pop(f"read {way}") for way in range(yardsticks.WAYS)]
    return {"read": min(reads, key=lambda read: read["wall_ms"]), **times}
