"""Exit codes: 0 ok, 1 mismatch or a failed peer, 2 usage, 3 unsupported here. Errors become one message, once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

import typer

from moe_mk.cli import environment
from moe_mk.errors import CommError, MoEMKError, UnsupportedError

OK, MISMATCH, USAGE, UNSUPPORTED = 0, 1, 2, 3
INTERRUPTED = 130
"""What shells expect of a process that Ctrl-C ended."""

P = ParamSpec("P")


class RanksFailed(MoEMKError):
    """What ended a run on some of its ranks, in their words, with the exit code it stands for."""

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


def tell(problem: MoEMKError) -> int:
    """Say what is wrong, unless the first of several ranks does, and return its exit code.

    A peer may be out of reach, so then the first rank of each host speaks.
    """
    place = environment.launched()
    if place is None or place.rank == 0 or (isinstance(problem, CommError) and place.local_rank == 0):
        sys.stderr.write(f"moe-mk: {problem}\n")
    return exit_code_of(problem)


def leave_at_once(code: int) -> NoReturn:
    """End this rank without shutting the interpreter down.

    A thread of gloo that lets go of a tensor meanwhile would abort the process (torch 2.13, pytorch/pytorch#179291),
    and after a failure its threads wait for peers that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def speaking(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn a command's result and its errors into exit codes; of several ranks only the first one speaks."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except MoEMKError as problem:
            code = tell(problem)
        except KeyboardInterrupt:
            code = INTERRUPTED
        raise typer.Exit(code or OK)

    return run
