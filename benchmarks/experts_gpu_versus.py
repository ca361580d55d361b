"""This project's experts and those of others, two processes at a time, alternating on the same weights and tokens.

    python benchmarks/experts_gpu_versus.py --experts 32 --seconds 235 --results results.jsonl
    python benchmarks/experts_gpu_versus.py --switch pdl --results results.jsonl

A contender that fails, or does not answer in time, is ended and named with its reason; the others go on. --switch
compares the Gluon kernels with themselves without programmatic dependent launch ("pdl") or without loads past the L1
cache ("cg").
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experts_gpu_cases import TOKENS, Case, in_turns, is_measured, latency_line, rates_from, summary, write

HERE = Path(__file__).resolve().parent
OURS, GLUON, PEERS = "moe_mk, Triton", "moe_mk, Gluon", ("vLLM, Triton", "DeepGEMM, contiguous", "DeepGEMM, masked")
SWITCHES = {"pdl": "programmatic dependent launch", "cg": "loads past the L1 cache"}
DECODE = (1, 16)
REPLAY_SECONDS = 20.0
MORE_TO_DO = 75


class Failed(Exception):
    """A contender failed or did not answer."""


class Contender:
    """A process that measures one contender."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.failure = name, ""
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def ask(self, seconds: float, **command: Any) -> dict[str, Any]:
        """One command and its answer. Raises Failed, after which the process is gone."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], max(seconds, 0.0))
            line = self.process.stdout.readline() if ready else None
        except OSError as problem:
            raise self._ended(f"the process ended: {problem}") from problem
        if line is None:
            raise self._ended(f"no answer to {command['do']} within {seconds:.0f} s")
        if not line:
            raise self._ended(f"the process ended with status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise self._ended(found["failed"])
        return found

    def _ended(self, reason: str) -> Failed:
        self.failure = reason
        self.process.kill()
        self.process.wait()
        return Failed(reason)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def compare(
    pair: Sequence[Contender], tokens: Sequence[int], rounds: int, seconds: float
) -> list[tuple[int, str, list[float], float]]:
    """Measure contenders in turns: tokens, name, microseconds of every round, and error. Ends after `seconds`."""
    found, until = [], time.monotonic() + seconds
    for count in tokens:
        errors = {}
        for each in pair:
            if not each.failure:
                try:
                    errors[each.name] = each.ask(until - time.monotonic(), do="prepare", tokens=count)["error"]
                except Failed:
                    continue
        there = {each.name: each for each in pair if each.name in errors}

        def once(name: str, there: dict[str, Contender] = there) -> float | None:
            try:
                return float(there[name].ask(min(REPLAY_SECONDS, until - time.monotonic()), do="replay")["us"])
            except Failed:
                return None

        if len(there) == len(pair):
            taken = in_turns(list(there), rounds, once)
            found += [(count, name, times, errors[name]) for name, times in taken.items()]
    return found


def command_of(name: str, experts: int) -> list[str]:
    return [sys.executable, str(HERE / "experts_gpu_peers.py"), "--contender", name, "--experts", str(experts)]


def measured_pair(
    names: Sequence[str], given: argparse.Namespace, experts: int, tokens: Sequence[int], seconds: float
) -> list[tuple[int, str, list[float], float]]:
    """What `compare` finds of two processes, which end with it; the reason of one that failed is a result."""
    pair = [Contender(name, command_of(name, experts)) for name in names]
    try:
        return compare(pair, tokens, given.rounds, seconds)
    finally:
        for each in pair:
            each.close()
            if each.failure:
                write(given.results, {"kind": "skipped", "contender": each.name, "reason": each.failure})


def against_peers(given: argparse.Namespace) -> int:
    """Each peer against our Triton kernels, which the report compares it with."""
    until, case, rates = time.monotonic() + given.seconds, Case(given.experts), rates_from(given.ceilings)
    waiting = [
        (peer, [count for count in TOKENS if not is_measured(given.results, case.name(count), peer)]) for peer in PEERS
    ]
    waiting = [(peer, counts) for peer, counts in waiting if counts]
    for place, (peer, counts) in enumerate(waiting):
        share = (until - time.monotonic()) / (len(waiting) - place)
        measured = measured_pair((OURS, peer), given, given.experts, counts, share)
        ours = {count: summary(times)["median_us"] for count, name, times, _ in measured if name == OURS}
        for count, name, times, error in measured:
            more = {"error": error} if name == OURS else {"error": error, "ours_us": ours.get(count)}
            write(given.results, latency_line(case, count, name, times, rates, **more))
    return 0


def against_itself(given: argparse.Namespace) -> int:
    """The Gluon kernels with and without a switch, in decode with all experts."""
    case, without = Case(256), f"without {given.switch}"
    measured = measured_pair((GLUON, without), given, 256, DECODE, given.seconds)
    medians = {(count, name): summary(times)["median_us"] for count, name, times, _ in measured}
    for count in DECODE:
        if (count, GLUON) in medians and (count, without) in medians:
            line = {"kind": "switch", "switch": SWITCHES[given.switch], "case": case.name(count)}
            on, off = medians[count, GLUON], medians[count, without]
            write(given.results, line | {"on_us": on, "off_us": off})
    return 0 if medians else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=256, choices=[256, 32, 8])
    parser.add_argument("--switch", choices=list(SWITCHES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--ceilings", type=Path)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    return against_itself(given) if given.switch else against_peers(given)


if __name__ == "__main__":
    sys.exit(main())
