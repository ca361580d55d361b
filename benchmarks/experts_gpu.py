"""Latency of this project's experts on a GPU against the limits of the device, and against those of others.

    python benchmarks/experts_gpu.py --experts 32 --tiles built-in --seconds 95 --results results.jsonl
    python benchmarks/experts_gpu.py --experts 32 --seconds 235 --results results.jsonl

w13 -> activation -> w2 of DeepSeek-V3 in FP8: all 256 experts of a layer on one GPU, or one rank's share of 8 or 32
ranks. A call sorts, multiplies, weighs and sums; tokens arrive in FP8. `of_floor` is the time that reading the touched
weights and rows once, or multiplying, takes at the measured ceilings, over the median. Each contender has a process,
and two of them alternate on the same weights and tokens: with --tiles those of this project, else each of others with
ours. One that fails, or does not answer in time, is ended and named with its reason; the others go on. What the results
file has already is not measured again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from experts_gpu_cases import TOKENS, Case, in_turns, is_measured, latency_line, rates_from, reason_of, summary, write

OURS, GLUON, PEERS = "moe_mk, Triton", "moe_mk, Gluon", ("vLLM, Triton", "DeepGEMM, contiguous", "DeepGEMM, masked")
TILES = {"built-in": (OURS, GLUON), "tuned": ("moe_mk, tuned",)}
REPLAY_SECONDS = 20.0
MORE_TO_DO = 75


Measured = tuple[int, str, list[float], float]


class Contender:
    """A process that measures one contender."""

    def __init__(self, name: str, experts: int, folder: Path) -> None:
        self.name, self.failure, context = name, "", get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, experts, folder), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, seconds: float, method: str, *given: int) -> float | None:
        """What a method of its process returns; None, with a reason in `failure`, and then the process is gone."""
        try:
            self.connection.send((method, given))
            late = not self.connection.poll(max(seconds, 0.0))
            found = f"no answer to {method} within {seconds:.0f} s" if late else self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            found = f"the process ended with status {self.process.exitcode}"
        if isinstance(found, float):
            return found
        self.failure = found
        self.close()
        return None

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def serve(connection: Connection, name: str, experts: int, folder: Path) -> None:
    """Call methods of a contestant in this process; a failure is a text."""
    os.dup2(2, 1)  # what a library prints is no result
    made = None
    while True:
        method, given = connection.recv()
        try:
            from experts_gpu_peers import Contestant

            made = made or Contestant(name, experts, folder)
            found = getattr(made, method)(*given)
        except Exception as problem:  # a library of others may fail in any way
            found = reason_of(problem)
        connection.send(found)


def compare(
    pair: Sequence[Contender], tokens: Sequence[int], rounds: int, seconds: float, *, together: bool = True
) -> Iterator[Measured]:
    """Measure contenders in turns: tokens, name, microseconds of every round, and error. Ends after `seconds`.

    together: whether a contender is measured only if none has failed.
    """
    until = time.monotonic() + seconds
    for count in tokens:
        if time.monotonic() > until:
            return
        errors: dict[str, float] = {}
        for each in (one for one in pair if not one.failure):
            if (error := each.ask(until - time.monotonic(), "prepare", count)) is not None:
                errors[each.name] = error
        there = {each.name: each for each in pair if each.name in errors}

        def once(name: str, there: dict[str, Contender] = there) -> float | None:
            return there[name].ask(min(REPLAY_SECONDS, until - time.monotonic()), "replay")

        if len(there) == len(pair) or not together:
            taken = in_turns(list(there), rounds, once)
            yield from ((count, name, times, errors[name]) for name, times in taken.items())


def measured_pair(
    names: Sequence[str], given: argparse.Namespace, experts: int, tokens: Sequence[int], seconds: float, **how: bool
) -> Iterator[Measured]:
    """What `compare` finds of two processes, which end with it; the reason of one that failed is a result."""
    pair = [Contender(name, experts, given.folder) for name in names]
    try:
        yield from compare(pair, tokens, given.rounds, seconds, **how)
    finally:
        for each in pair:
            each.close()
            if each.failure:
                write(given.results, {"kind": "skipped", "contender": each.name, "reason": each.failure})


def against_limits(given: argparse.Namespace) -> int:
    """This project's own, with built-in tiles or with tuned ones."""
    case, rates, names, counts = Case(given.experts), rates_from(given.ceilings), TILES[given.tiles], set(TOKENS)
    counts -= {count for count in TOKENS if all(is_measured(given.results, case.name(count), one) for one in names)}
    for count, name, times, error in measured_pair(
        names, given, given.experts, sorted(counts), given.seconds, together=False
    ):
        write(given.results, latency_line(case, count, name, times, rates, error=error))
        counts.discard(count)
    return MORE_TO_DO if counts else 0


def against_peers(given: argparse.Namespace) -> int:
    """Each peer against our Triton kernels, which the report compares it with."""
    until, case, rates = time.monotonic() + given.seconds, Case(given.experts), rates_from(given.ceilings)
    waiting = [
        (peer, [count for count in TOKENS if not is_measured(given.results, case.name(count), peer)]) for peer in PEERS
    ]
    waiting = [(peer, counts) for peer, counts in waiting if counts]
    for place, (peer, counts) in enumerate(waiting):
        share = (until - time.monotonic()) / (len(waiting) - place)
        ours = None
        for count, name, times, error in measured_pair((OURS, peer), given, given.experts, counts, share):
            ours = summary(times)["median_us"] if name == OURS else ours
            more = {"error": error} if name == OURS else {"error": error, "ours_us": ours}
            write(given.results, latency_line(case, count, name, times, rates, **more))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=256, choices=[256, 32, 8])
    parser.add_argument("--tiles", choices=list(TILES), help="measure this project's experts alone, with these tiles")
    parser.add_argument("--folder", type=Path, default=Path("configs/tuned"), help="of tuned tiles")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--ceilings", type=Path)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    return (against_limits if given.tiles else against_peers)(given)


if __name__ == "__main__":
    sys.exit(main())
