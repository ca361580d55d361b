"""Faults injected around the library, never inside: wrapped methods of a layer's parts, signals, cut connections.

At the point of its fault in a call the victim is killed, is stopped, sleeps, raises an exception, sends
impossible counts, starts a second thread, shuts connections down, or ends the threads of its proxy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from moe_mk.comm.header import ANY, Envelope
from moe_mk.comm.network.worker import THREAD_NAME as PROXY_THREAD
from moe_mk.flight import Flight
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.faults.plans import Fault, World
from moe_mk.layer import MoELayer
from moe_mk.layer.forward import steps
from moe_mk.trace.clock import now

POSTPONED_S = 0.0005
"""How long an interrupt waits that did not meet a call."""


class Log:
    """Lines of JSON that are in the file when `write` returns."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **note: object) -> None:
        os.write(self._descriptor, json.dumps(note).encode() + b"\n")


class Injector:
    """Where the victim is in its call, and what it does there."""

    def __init__(self, plan: World, rank: int, log: Log, second_thread: Callable[[], None]) -> None:
        self.plan, self.log = plan, log
        self.fault: Fault | None = plan.fault if plan.fault is not None and plan.fault.victim == rank else None
        self.injected: BaseException | None = None
        self.group_sockets: set[int] = set()
        self.call = -1
        self._fired = False
        self._passed: Counter[str] = Counter()
        self._second_thread = second_thread
        self._is_calling = self._is_interrupted = False

    def begin(self, call: int) -> None:
        """Note which call of the plan this thread makes from now on; -1 is none."""
        self._is_calling = False
        self.call = call
        self._passed.clear()

    def begun(self) -> None:
        """Note that the call itself begins: interrupts are raised in it, and nowhere else."""
        self._is_calling = True
        if self._is_interrupted:
            signal.setitimer(signal.ITIMER_REAL, POSTPONED_S)
        f = self.fault
        if f is not None and f.kind in ("micro_batch", "other_layer") and f.call == self.call and not self._fired:
            self._note()

    def wrap(self, layer: MoELayer) -> None:
        """Pass through the points of a layer's calls. Only the victim's layers are touched."""
        if self.fault is None:
            return
        kernel, comm = layer.kernel, layer.ep
        assert isinstance(kernel, FusedMoEKernel), "a pinned transport has a kernel of its own"
        transport, experts = kernel.prepare_finalize, kernel.experts
        prepare, finalize, run = transport.prepare, transport.finalize, experts.run

        def multiply(*arguments: Any) -> Any:
            self.reach("experts", self._number("experts"))
            return run(*arguments)

        vars(transport).update(
            prepare=lambda *arguments: self._flight("dispatch", prepare, arguments),
            finalize=lambda *arguments: self._flight("combine", finalize, arguments),
            fuse_layer=lambda *_: None,  # the faults are in the stages
        )
        vars(experts).update(run=multiply, fuse_layer=lambda *_: None)
        if self.fault.kind == "counts":
            exchange, swap = comm.exchange_counts, comm.swap_eager
            vars(comm).update(
                exchange_counts=lambda counts, phase: exchange(self._counts(counts), phase),
                swap_eager=lambda going, awaited, phase: swap(self._counted(going, awaited), awaited, phase),
            )

    def reach(self, point: str, number: int, hop: int | None = None) -> None:
        """Inject the fault if this is where it belongs. hop: the yield of a flight; None is its end."""
        f = self.fault
        if f is None or self._fired or f.point != point:
            return
        if point in ("set-up", "tear-down"):
            self._fire(f)
        elif f.kind in ("counts", "micro_batch", "other_layer"):
            return  # the call itself is another, or its counts are
        elif self.call == f.call and number == f.batch and (hop is None or hop >= f.hop):
            self._fire(f)

    def watch_signals(self) -> None:
        """Signals of the supervisor, for faults at a time: SIGINT raises in a call, SIGUSR2 cuts connections.

        A signal that comes when the library is not in a call is raised a moment later: what Python runs before a call
        begins and after it has returned is the engine's, and its peers know nothing of it.
        """

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._is_interrupted = True
            if self._is_calling and _is_in_call(frame):
                self._is_interrupted, self.injected = False, KeyboardInterrupt()
                self._note()
                raise self.injected
            if self._is_calling:
                signal.setitimer(signal.ITIMER_REAL, POSTPONED_S)

        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, interrupt)
        signal.signal(signal.SIGUSR2, lambda number, frame: self._cut())

    def _flight(self, what: str, make: Callable[..., Flight[Any]], arguments: tuple[Any, ...]) -> Flight[Any]:
        """Run a flight and report its points; an exception arises in it, or at the point of the fault."""
        number = self._number(what)
        self.reach(f"before {what}", number)
        flight = make(*arguments)
        hop, thrown = 0, None
        try:
            while True:
                try:
                    at = next(flight) if thrown is None else flight.throw(thrown)
                except StopIteration as finished:
                    self.reach(f"within {what}", number)
                    return finished.value
                thrown = None
                try:
                    self.reach(f"within {what}", number, hop)
                except BaseException as error:
                    if self.fault is None or not self.fault.inside:
                        raise
                    thrown = error
                    continue
                hop += 1
                yield at
        finally:
            flight.close()

    def _number(self, what: str) -> int:
        """Which micro-batch of the call this is."""
        self._passed[what] += 1
        return self._passed[what] - 1

    def _counts(self, counts: Sequence[int]) -> list[int]:
        f = self.fault
        assert f is not None
        if self._fired or self.call != f.call:
            return list(counts)
        self._note()
        return [{"huge": 1 << 40, "negative": -1, "more": count + 3, "none": 0}[f.detail] for count in counts]

    def _counted(self, going: Mapping[int, Envelope], awaited: Mapping[int, int]) -> Mapping[int, Envelope]:
        """Rows that come with their counts, with other counts; the rows are what they were."""
        if ANY not in awaited.values():
            return going  # the receiver has the counts already
        counts = self._counts([envelope.num_rows for envelope in going.values()])
        return {peer: going[peer]._replace(num_rows=count) for peer, count in zip(going, counts, strict=True)}

    def _note(self) -> None:
        self._fired = True
        self.log.write(event="fault", at=now())

    def _fire(self, fault: Fault) -> None:
        self._note()
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind in ("stop", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)
            self.log.write(event="resumed", at=now())
        elif fault.kind == "delay":
            time.sleep(fault.seconds)
        elif fault.kind == "cut":
            self._cut()
        elif fault.kind == "two_threads":
            self._second_thread()
        elif fault.kind == "proxy":
            _end_proxies()
        elif fault.kind == "raise":
            self.injected = error_named(fault.error)
            raise self.injected

    def _cut(self) -> None:
        """Shut down connections of this process: those of its group, or those that were opened later."""
        assert self.fault is not None
        self._fired = True
        mine = sockets()
        chosen = mine & self.group_sockets if self.fault.detail == "group" else mine - self.group_sockets
        cut = [number for number in sorted(chosen) if _shut_down(number)]
        self.log.write(event="cut", connections=len(cut))


def _end_proxies() -> None:
    """Raise SystemExit in every thread of a proxy of this process, wherever it is, and let it end."""
    threads = [thread for thread in threading.enumerate() if thread.name == PROXY_THREAD]
    for thread in threads:
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    for thread in threads:
        thread.join()


def _is_in_call(frame: FrameType | None) -> bool:
    """Whether a call of a layer has begun and has not returned; at its very first instruction it has not begun."""
    while frame is not None:
        if frame.f_code is steps.__code__:
            return frame.f_lineno != frame.f_code.co_firstlineno
        frame = frame.f_back
    return False


def error_named(name: str) -> BaseException:
    """The exception that a fault raises."""
    made: dict[str, Callable[[], BaseException]] = {
        "ValueError": lambda: ValueError("injected: a value"),
        "RuntimeError": lambda: RuntimeError("injected: CUDA error: an illegal memory access was encountered"),
        "OSError": lambda: OSError(28, "injected: No space left on device"),
        "AssertionError": lambda: AssertionError("injected"),
        "MemoryError": MemoryError,
        "KeyboardInterrupt": KeyboardInterrupt,
        "SystemExit": SystemExit,
    }
    return made[name]()


def sockets() -> set[int]:
    """The inodes of this process's sockets."""
    return set(_descriptors())


def _descriptors() -> dict[int, int]:
    """Inode to descriptor of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _shut_down(inode: int) -> bool:
    """End one connection both ways, as a dropped network would; whether it was one."""
    descriptor = _descriptors().get(inode)
    if descriptor is None:
        return False
    ours = socket.socket(fileno=os.dup(descriptor))
    try:
        if ours.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        ours.getpeername()
        ours.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # not connected
    finally:
        ours.close()
    return True
