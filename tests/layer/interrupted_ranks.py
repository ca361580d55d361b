"""Ranks of which one is interrupted wherever Python may run the handler of a signal within a call of a layer."""

import dis
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

import moe_mk
from moe_mk import CommError, MoELayer
from moe_mk.comm import DistributedCommunicator
from moe_mk.comm.header import EAGER_BYTES
from moe_mk.flight import wait
from moe_mk.layer.forward import steps
from moe_mk.runner import run_dual
from tests.layer.failing_ranks import built, outcome, references, tokens

TIMEOUT_S = 12.0
"""An error in half of it was reported, and not waited for."""
PACKAGE = str(Path(moe_mk.__file__).parent)
CHECKED = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")
"""Instructions after which CPython runs handlers of signals."""


class StepTimeout(RuntimeError):
    """What the handler of an engine's signal may raise: gloo's own errors are of the same class."""


HANDLERS = (StepTimeout, TimeoutError, BlockingIOError, FileNotFoundError, ProcessLookupError, OSError, RuntimeError)


class Interrupts:
    """Counts the places within one call where an interrupt may arise, and raises one at a place."""

    def __init__(
        self,
        place: int | None = None,
        within: CodeType = MoELayer.forward.__code__,
        raised: type[BaseException] = KeyboardInterrupt,
    ) -> None:
        """within: the function of the call, or one of a test that makes it. At its very first instruction nothing of it
        has begun."""
        self._raised = raised
        self.places, self.at = 0, ""
        self._place, self._within = place, within
        self._names: dict[CodeType, list[str]] = {}
        self._inside, self._is_of_handler = 0, True
        self._is_own = within.co_filename.startswith(PACKAGE)

    @contextmanager
    def traced(self) -> Iterator[None]:
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code is self._within:
            self._inside += 1
        if not self._inside or not code.co_filename.startswith(PACKAGE):
            return None
        last = frame.f_lasti

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            if event == "return" and code is self._within:
                self._inside -= 1
            if event != "opcode":
                return trace
            before, last = last, frame.f_lasti
            if self._name(code, last) == "PUSH_EXC_INFO":  # what comes before it has raised, and is no place
                return trace
            back, is_first = frame.f_back, code is self._within
            is_first |= not self._is_own and back is not None and back.f_code is self._within
            if (name := self._name(code, before)) not in CHECKED or (is_first and name == "RESUME"):
                return trace
            error = self._error_at(code, frame.f_lineno, name)
            if error is not None:
                if not self._is_of_handler:  # else it passes for an exception of a signal handler
                    del frame, back, _
                raise error
            return trace

        frame.f_trace = trace  # first: from Python 3.13 on, opcodes of a frame that has no function are not traced
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    def _error_at(self, code: CodeType, line: int, name: str) -> BaseException | None:
        """What is raised here, after an instruction of this name."""
        self.places += 1
        if self.places != self._place:
            return None
        self.at = f"{Path(code.co_filename).name}:{line} in {code.co_name}, after {name}"
        return self._raised("of a handler")

    def _name(self, code: CodeType, at: int) -> str:
        """The instruction at an offset, or before its inline cache."""
        if code not in self._names:
            names = [""] * (len(code.co_code) // 2 + 1)
            for each in dis.get_instructions(code):
                names[each.offset // 2] = each.opname
            self._names[code] = names
        return self._names[code][at // 2] if at >= 0 else ""


def _call(made: MoELayer, rank: int, seed: int, dual: bool) -> torch.Tensor:
    if not dual:
        return made(tokens(rank, 6, seed))
    with torch.no_grad():
        return torch.cat(run_dual([made.steps(tokens(rank, 6, seed + more)) for more in (0, 1)]))


def _function_of(dual: bool) -> CodeType:
    return (steps if dual else MoELayer.forward).__code__


def _traced(interrupts: Interrupts, made: MoELayer, rank: int, dual: bool) -> torch.Tensor:
    with interrupts.traced():
        return _call(made, rank, 0, dual)


def places_in(rank: int, transport: str, first: bool, dual: bool) -> int:
    """How many there are on rank 0, in the first call of a layer or in a later one."""
    made = built(transport, timeout_s=TIMEOUT_S)
    for _ in range(0 if first else 2):
        _call(made, rank, 0, dual)
    interrupts = Interrupts(within=_function_of(dual))
    with interrupts.traced():
        _call(made, rank, 0, dual)
    return interrupts.places


def interrupted(
    rank: int, transport: str, places: list[int], first: bool, dual: bool, seed: int | None = None
) -> list[str]:
    """Rank 0 is interrupted at each of these places; then all recover and call again. Returns what went wrong. seed: of
    the errors of handlers, which are drawn from those that the code around may raise itself."""
    expected = references(rank, 4, 6)
    wanted = [torch.cat(expected[seed : seed + 2]) if dual else expected[seed] for seed in range(3)]
    made = built(transport, timeout_s=TIMEOUT_S)
    wrong: list[str] = []
    for place in places:
        if first:
            made = built(transport, timeout_s=TIMEOUT_S)
        else:
            _call(made, rank, 0, dual)
        raised = KeyboardInterrupt if seed is None else random.Random(f"{seed} {place}").choice(HANDLERS)
        interrupts = Interrupts(place if rank == 0 else None, _function_of(dual), raised)
        failed = outcome(partial(_traced, interrupts, made, rank, dual), wanted[0])
        if made.ep.lock._is_owned():  # type: ignore[attr-defined]
            wrong.append(f"place {place}, {interrupts.at}: the group stays locked")
        allowed = ("right", raised.__name__ if rank == 0 else "CommError")
        blamed = failed["is"] == "CommError" and failed["peer"] != 0
        if failed["is"] not in allowed or blamed or failed["seconds"] > TIMEOUT_S / 2:
            wrong.append(f"place {place}, {interrupts.at}: {failed}")
        try:
            made.recover()
        except moe_mk.MoEMKError as error:
            return [*wrong, f"place {place}, {interrupts.at}: not recovered: {error}"]
        for seed in (1, 2):
            again = outcome(partial(_call, made, rank, seed, dual), wanted[seed])
            if again["is"] != "right":
                return [*wrong, f"place {place}, {interrupts.at}: then {again}"]
    return wrong


def raised_by_a_handler(rank: int, transport: str, raised: type[Exception]) -> list[str]:
    """The handler of a signal raises on rank 0 while it waits for rank 1, which is late; then all recover."""
    made, wanted = built(transport, timeout_s=TIMEOUT_S), references(rank, 2, 6)
    made(tokens(rank, 6, 0))

    def handler(*_: object) -> None:
        raise raised("the step took too long")

    def call(x: torch.Tensor) -> torch.Tensor:
        signal.setitimer(signal.ITIMER_REAL, 0.0 if rank else 0.1)
        time.sleep(0.3 * rank)
        return made(x)

    before = signal.signal(signal.SIGALRM, handler)
    dist.barrier()
    failed = outcome(partial(call, tokens(rank, 6, 1)), wanted[1])
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    made.recover()
    again = outcome(partial(made, tokens(rank, 6, 1)), wanted[1])
    right = (failed["is"], again["is"]) == ("CommError" if rank else raised.__name__, "right")
    blamed = rank == 1 and failed.get("peer") != 0
    return [] if right and not blamed else [f"{failed}; then {again}"]


def recovers_before_its_call(rank: int) -> list[str]:
    """Rank 0 is interrupted right before its call: rank 1, which is in it, gets an error once rank 0 recovers."""
    made, wanted = built("all_to_all", timeout_s=TIMEOUT_S), references(rank, 2, 6)
    made(tokens(rank, 6, 0))
    failed = {"is": "CommError", "seconds": 0.0, "peer": 0}
    if rank == 1:
        failed = outcome(partial(made, tokens(rank, 6, 1)), wanted[1])
    made.recover()
    again = outcome(partial(made, tokens(rank, 6, 1)), wanted[1])
    right = (failed["is"], failed["peer"], again["is"]) == ("CommError", 0, "right")
    return [] if right and failed["seconds"] < TIMEOUT_S / 2 else [f"{failed}; then {again}"]


def long_rows(rank: int, step: int) -> list[str]:
    """Rows that follow their header in a message of their own, interrupted at every `step`th place on rank 0."""
    comm, wrong = DistributedCommunicator(dist.new_group(), timeout_s=TIMEOUT_S), []
    rows, counts = torch.full((2 * EAGER_BYTES, 1), rank, dtype=torch.uint8), [2 * EAGER_BYTES] * 2
    expected = torch.arange(2).repeat_interleave(2 * EAGER_BYTES).view(-1, 1).to(torch.uint8)
    within = DistributedCommunicator._swap.__code__

    def gathered(interrupts: Interrupts) -> torch.Tensor:
        with interrupts.traced():
            return wait(comm.all_gather(rows, counts, "rows"))

    gathered(Interrupts())
    gathered(counting := Interrupts(within=within))
    for place in range(1, wait(comm.gather_count(counting.places, "places"))[0] + 1, step):
        interrupts = Interrupts(place if rank == 0 else None, within)
        try:
            gathered(interrupts)
        except (KeyboardInterrupt, CommError) as error:
            comm.fail(error)
        wait(comm.recover())
        if not torch.equal(wait(comm.all_gather(rows, counts, "rows")), expected):
            wrong.append(f"place {place}, {interrupts.at}")
    return wrong
