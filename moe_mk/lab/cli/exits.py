"""Exit codes: 0 ok, 1 mismatch or a failed peer, 2 usage, 3 unsupported here, 128 + n: ended by signal n.

Errors are printed once.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn, ParamSpec

import typer

from moe_mk.errors import CommError, ConfigError, MoEMKError, Suppress, UnsupportedError
from moe_mk.lab.cli import environment

OK, MISMATCH, USAGE, UNSUPPORTED = 0, 1, 2, 3
BY_SIGNAL = 128
"""Shells add the number of the signal that ended a command: 130 after Ctrl-C."""
OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "out of memory",
    "Storage size calculation overflowed",
    "multiplication overflow",
)
"""Parts of torch's messages for tensors that are too large."""

ALONE_S = 10.0
"""Seconds after which a rank has met an error alone, since its launcher has not ended it."""

_BY_SIGNAL: list[int] = []
"""The exit code of a command that a signal has ended."""

P = ParamSpec("P")


class RanksFailed(MoEMKError):
    """Some ranks failed: their messages, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        self.code = code
        super().__init__(message)


def exit_code_of(problem: MoEMKError) -> int:
    """The exit code that an error stands for."""
    if isinstance(problem, RanksFailed):
        return problem.code
    if isinstance(problem, UnsupportedError):
        return UNSUPPORTED
    return MISMATCH if isinstance(problem, CommError) else USAGE


def named(problem: Exception) -> MoEMKError | None:
    """An error of the system (file, memory, 64-bit numbers) as a ConfigError; None for a defect or a closed pipe."""
    if isinstance(problem, OSError) and problem.errno not in (None, errno.EPIPE):
        file = problem.filename2 or problem.filename
        found = "standard output or a temporary file" if file is None else file
        where = f"{os.fsdecode(found) if isinstance(found, bytes) else found}: "
        return ConfigError(f"{where}{problem.strerror}; name another file or folder")
    words = str(problem)
    if isinstance(problem, MemoryError) or any(sign in words for sign in OUT_OF_MEMORY):
        return ConfigError(f"this does not fit into memory; use smaller sizes ({words[-200:] or 'MemoryError'})")
    if isinstance(problem, OverflowError) or "Overflow when unpacking" in words:
        return ConfigError(f"a number is too large ({words[:100]}); use smaller ones")
    return None


def print_json(facts: object) -> int:
    """Print the result of a verb; returns OK."""
    typer.echo(json.dumps(facts, indent=2))
    return OK


def print_error(problem: MoEMKError) -> int:
    """Print an error, and return its exit code. Of what all ranks of a launcher meet, the first rank alone prints it.

    The others wait meanwhile: a launcher such as torchrun ends all ranks as soon as one has ended, the first one before
    it has printed anything, or these once it has. After a CommError the first rank of each host prints it, because
    other hosts may be unreachable.
    """
    try:
        place = environment.launched()
    except ConfigError:
        place = None
    if place is None or place.rank == 0 or (isinstance(problem, CommError) and place.local_rank == 0):
        _state(str(problem))
    else:
        time.sleep(ALONE_S)
        _state(f"rank {place.rank}: {problem}")
    return exit_code_of(problem)


def _state(line: str) -> None:
    """Print a line to standard error. Where that is closed or full, the exit code still states the outcome."""
    with Suppress(OSError):
        typer.echo(f"moe-mk: {line}", err=True)


def leave_at_once(code: int) -> NoReturn:
    """End this rank without shutting the interpreter down.

    A gloo thread that releases a tensor meanwhile would abort the process (torch 2.13, pytorch/pytorch#179291),
    and after a failure its threads wait for peers that are gone.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed before the start
            stream.flush()
    os._exit(code)


def end_in_order() -> None:
    """SIGTERM and SIGHUP, where not ignored, end the command as Ctrl-C does: its files and processes are removed."""

    def leave_as_stated() -> None:
        # CPython ends with SIGINT, whatever was stated, where an interrupt passed an `exec` of text, as of dataclasses.
        if _BY_SIGNAL:
            leave_at_once(_BY_SIGNAL[-1])

    atexit.register(leave_as_stated)  # before all others are registered, so that it is called last

    def ended(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, ended)


def with_exit_code(command: Callable[P, int | None]) -> Callable[P, None]:
    """Convert the result and the errors of a verb into exit codes."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(code_of(partial(command, *args, **kwargs)))

    return run


def code_of(command: Callable[[], int | None]) -> int:
    """Make a call, print its errors, and return the exit code. Unexpected exceptions propagate."""
    try:
        return command() or OK
    except MoEMKError as problem:
        return print_error(problem)
    except Exception as problem:
        error = named(problem)
        if error is None:
            raise
        return print_error(error)
    except KeyboardInterrupt as interrupt:
        return _ended_by(interrupt)
    except SystemExit as ended:
        interrupted = ended.__context__ and ended.__context__.__cause__
        if not isinstance(interrupted, KeyboardInterrupt):
            raise
        return _ended_by(interrupted)  # while typer parsed or printed: it exits with 130 and prints nothing


def _ended_by(interrupt: KeyboardInterrupt) -> int:
    number = signal.Signals(*interrupt.args or (signal.SIGINT,))
    if (place := environment.launched()) is None or place.rank == 0:
        _state("interrupted" if number == signal.SIGINT else f"ended by {number.name}")
    _BY_SIGNAL.append(BY_SIGNAL + number)
    return _BY_SIGNAL[-1]
