"""Tuning sessions: measure candidates within a budget of seconds, keep all measurements, resume after an interruption.

For each number of tokens the session first measures the built-in parameters against themselves, which gives the noise
of the measurement, then every other candidate against the built-in parameters, and the best candidate a second time.
Each trial is one line of `<case>.part.jsonl`, written before the next trial starts: an interrupted session loses one
trial, and the next session with the same case continues from the file.

Candidates are compared in paired rounds. Built-in parameters and candidate run alternately, each first in every other
round, so that slowdowns of the machine affect both; the ratio of the two times of each round is kept. A candidate
replaces the built-in parameters if the upper end of a confidence interval of the median ratio is below 1 - MARGIN, in
its first rounds and in a second set of rounds, because the best of many candidates looks better than it is.

A candidate is skipped and listed if it raises, or if its result differs from that of the built-in parameters by more
than AGREES. On a GPU runs are captured in CUDA graphs, where the backend allows it, to exclude the time of Python
launches; a candidate that ended an earlier session is skipped.

The interval is that of order statistics: from the k-th smallest to the k-th largest of n ratios, with the largest k for
which the median is above it with a probability of at most 2.5 %. It only assumes that rounds are alike.

A backend that can be tuned has two further methods; a CPU backend without them is tuned by torch's number of threads:

    @classmethod
    def tuning_space(cls, context, rows) -> Sequence[Mapping[str, int | bool | str]]     candidates, built-in ones first
    def tuned_with(self, parameters) -> FusedExperts                                     the backend with one candidate

Results are written to `configs/tuned/<device>/<experts>/<case>.json`, each with a `.meta.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moe_mk.config.tuned import Candidate, Case, TunedPoint
from moe_mk.errors import ConfigError, UnsupportedError, unless_signalled
from moe_mk.experts.base import EXPERTS, ExpertsContext, FusedExperts
from moe_mk.external.device import graph_of, synchronize
from moe_mk.files import parse_json, write_text
from moe_mk.lab.files import errors_named, new_folders, read_lines
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import OutputStage, RowTokens, Tokens
from moe_mk.trace.clock import now
from moe_mk.weights.expert_weights import ExpertWeights, Weights

ROUNDS = 12
MARGIN = 0.02
"""The smallest gain for which the built-in parameters are replaced."""
TAIL = 0.025
AGREES = 0.02
"""Relative L2 distance between two orders of the same FP8 sums, generously: hidden rows are rounded to 3 bits."""
RUNS = 4
"""Of one graph: the time of its launch counts once."""
Rounds = tuple[tuple[float, float], ...]
"""Microseconds of (the built-in choice, the candidate)."""
RULE = (
    f"alternating rounds with the built-in choice, {ROUNDS} of each candidate and {ROUNDS} more of the best; one "
    f"replaces it where the upper end of the 95 % interval of the median ratio is below {1 - MARGIN:g} both times"
)


@dataclass(frozen=True)
class Ratio:
    """Time of a candidate over that of the built-in choice."""

    median: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval is below 1 - MARGIN."""
        return self.high < 1.0 - MARGIN


def extremes_allowed(rounds: int) -> int:
    """k: the number of ratios at or beyond either end of the interval; 0: too few rounds."""
    tail, k = 0.0, 0
    while k < rounds // 2 and (tail := tail + comb(rounds, k) / 2**rounds) <= TAIL:
        k += 1
    return k


def ratio_of(rounds: Rounds) -> Ratio:
    """The median ratio and its interval, which is unbounded for too few rounds."""
    ratios = sorted(candidate / built_in for built_in, candidate in rounds)
    k = extremes_allowed(len(ratios))
    if k == 0:
        return Ratio(median(ratios), 0.0, float("inf"))
    return Ratio(median(ratios), ratios[k - 1], ratios[-k])


def compare(built_in: Callable[[], float], candidate: Callable[[], float], *, whole: bool = False) -> Rounds:
    """Run rounds of both; each callable runs once and returns its microseconds.

    Stops early when the remaining rounds cannot show a gain any more. whole: run all rounds in any case.
    """
    rounds: list[tuple[float, float]] = []
    lost, most = 0, extremes_allowed(ROUNDS)
    while len(rounds) < ROUNDS and (whole or lost < most or most == 0):
        first = len(rounds) % 2 == 0
        before = built_in() if first else 0.0
        its = candidate()
        rounds.append((before if first else built_in(), its))
        lost += its / rounds[-1][0] >= 1.0 - MARGIN
    return tuple(rounds)


@dataclass(frozen=True)
class Trial:
    """Measurements of one candidate at one number of tokens."""

    parameters: Candidate
    rounds: Rounds
    confirmed: Rounds = ()
    """The second set of rounds, for the best candidate."""
    failed: str = ""
    """Why it cannot be used; it has no rounds then."""

    @property
    def ratio(self) -> Ratio:
        """The ratio of its first rounds; a candidate whose rounds were stopped early is not faster."""
        whole = len(self.rounds) >= ROUNDS
        found = ratio_of(self.rounds)
        return found if whole else Ratio(found.median, 0.0, float("inf"))

    @property
    def microseconds(self) -> float:
        """Median of all its runs."""
        return median(its for _, its in (*self.rounds, *self.confirmed))


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The candidate to measure again: of the faster ones, that with the smallest median ratio."""
    faster = [trial for trial in trials if not trial.failed and trial.ratio.is_faster]
    return min(faster, key=lambda trial: trial.ratio.median, default=None)


def chosen(built_in: Trial, trials: Sequence[Trial]) -> Trial:
    """The parameters to use: the best candidate if it was faster in its second rounds too, else the built-in ones."""
    best = best_of(trials)
    return best if best is not None and best.confirmed and ratio_of(best.confirmed).is_faster else built_in


class Stopwatch:
    """Runs one backend on random rows of one number of tokens."""

    def __init__(self, experts: FusedExperts, weights: Weights, space: Space, tokens: int, top_k: int) -> None:
        self.experts, self.weights, self.space = experts, weights, space
        self._rows = _rows(experts, tokens, top_k)
        self.runs = RUNS if experts.context.device.type == "cuda" and experts.traits.graph_safe else 1

    def compare(self, built_in: Candidate, candidate: Candidate, *, whole: bool = False) -> Rounds:
        """Rounds of both, after one run each that warms up. Raises ValueError for another result."""
        runs, results = [], []
        for parameters in (built_in, candidate):
            tuned = self.space.apply(self.experts, parameters)
            run = partial(tuned.run, self._rows, self.weights)
            with threads_of(parameters, self.space), torch.no_grad():
                results.append(weight_and_reduce(run(), self._rows, OutputStage.REDUCED).y.double())
                call = run if self.runs == 1 else graph_of([run] * self.runs, tuned.context.device)
            runs.append(partial(self.microseconds, call, parameters))
            runs[-1]()
        wanted, got = results
        if not (distance := float((got - wanted).norm() / wanted.norm())) <= AGREES:
            raise ValueError(f"its result is {distance:.3f} away from that of {dict(built_in)}")
        return compare(*runs, whole=whole)

    def microseconds(self, call: Callable[[], object], parameters: Candidate) -> float:
        """One run. Threads that were just started or stopped are warmed up first."""
        with threads_of(parameters, self.space), torch.no_grad():
            if self.space.threads_only:
                call()
            synchronize(self.experts.context.device)
            start = now()
            call()
            synchronize(self.experts.context.device)
            return (now() - start) * 1e6 / self.runs


def _rows(experts: FusedExperts, count: int, top_k: int) -> Tokens:
    """Random tokens, each with top_k different experts, in the layout the backend likes best."""
    c, draw = experts.context, torch.Generator("cpu").manual_seed(count)
    x_RH = torch.randn((count, c.hidden_size), generator=draw, dtype=torch.float32, device="cpu")
    scores = torch.rand((count, c.num_slots), generator=draw, dtype=torch.float32, device="cpu")
    ids_RK = scores.argsort(dim=1)[:, :top_k].to(torch.int32)
    weights_RK = torch.full(ids_RK.shape, 1.0 / top_k, dtype=torch.float32, device=c.device)
    x = c.dtype.quantize(x_RH.to(c.device, c.dtype.dtype))
    rows = RowTokens(x, ids_RK.to(c.device), weights_RK, c.num_slots)
    return permute(rows, experts.traits.consumes)


class Parts:
    """Trials by tokens and parameters, of this session and of those before it. Raises nothing for lines cut off."""

    def __init__(self, file: Path, case: str) -> None:
        self.file, self.case = file, case
        self._trials: dict[str, Trial] = {}
        self._is_cut = False
        """Whether the last line has no end, since its writer was killed."""
        for line in read_lines(file) if file.is_file() else []:
            self._take(line)
            self._is_cut = not line.endswith(b"\n")

    def get(self, tokens: int, candidate: Candidate) -> Trial | None:
        """Return the trial of a candidate; None before there is one."""
        return self._trials.get(_key(tokens, candidate))

    def add(
        self, tokens: int, candidate: Candidate, rounds: Rounds, failed: str = "", *, confirms: bool = False
    ) -> None:
        """Write what was measured, or failed. confirms: rounds of its own, of a candidate that is known."""
        held = {"case": self.case, "tokens": tokens, "parameters": dict(candidate), "rounds": rounds, "failed": failed}
        with new_folders(self.file.parent), errors_named(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._append(json.dumps(held | {"confirms": confirms}) + "\n")
        self._enter(tokens, candidate, rounds, confirms=confirms, failed=failed)

    def _append(self, line: str) -> None:
        """Write a line, or leave the file as it was."""
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a", encoding="utf-8") as opened:
                opened.write("\n" * self._is_cut + line)
        except unless_signalled(OSError):
            if size:
                os.truncate(self.file, size)
            else:
                self.file.unlink(missing_ok=True)
            raise
        self._is_cut = False

    def done(self) -> None:
        """Forget the file: all of it stands in the tuned one."""
        self.file.unlink(missing_ok=True)

    def _take(self, line: bytes) -> None:
        """A line that was cut off, or written by another method, is left out."""
        try:
            held: Mapping[str, Any] = parse_json(line)
            if held["case"] != self.case:
                return
            rounds = tuple((float(before), float(its)) for before, its in held["rounds"])
            failed, confirms = str(held.get("failed", "")), bool(held["confirms"])
            self._enter(int(held["tokens"]), held["parameters"], rounds, confirms=confirms, failed=failed)
        except (ValueError, KeyError, TypeError):
            return

    def _enter(self, tokens: int, candidate: Candidate, rounds: Rounds, *, confirms: bool, failed: str) -> None:
        key = _key(tokens, candidate)
        if confirms and key in self._trials:
            self._trials[key] = replace(self._trials[key], confirmed=rounds)
        elif not confirms:
            self._trials[key] = Trial(dict(candidate), rounds, failed=failed)


def _key(tokens: int, candidate: Candidate) -> str:
    return json.dumps([tokens, dict(candidate)], sort_keys=True)


OnMeasured = Callable[[str, int, int], None]
"""Report (what, done, total)."""


@dataclass(frozen=True)
class TuneCase:
    """A tuning case: one backend on one shape."""

    experts: str
    hidden_size: int
    intermediate_size: int
    num_slots: int
    top_k: int
    dtype: Plain
    compute: QuantScheme
    weights: QuantScheme

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        return Case(*self.shape[:3], self.weights.name, self.compute.name).name(self.top_k)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Hidden size, intermediate size, slots, top_k."""
        return self.hidden_size, self.intermediate_size, self.num_slots, self.top_k

    def context(self, device: torch.device) -> ExpertsContext:
        """Return the context from which the backend and its search space are built."""
        sizes = (self.num_slots, self.hidden_size, self.intermediate_size)
        return ExpertsContext(self.dtype, self.compute, "silu", *sizes, device, weights=self.weights, top_k=self.top_k)


@dataclass(frozen=True)
class TuneResult:
    """The result of a session."""

    points: tuple[TunedPoint, ...]
    complete: bool
    """Whether every candidate was measured; else the budget ran out and the next session goes on."""
    measured: int
    """Candidates measured now."""
    resumed: int
    """Candidates that an earlier session had measured."""


def tune(
    case: TuneCase,
    tokens: Sequence[int],
    path: Path,
    *,
    budget_s: float,
    cores: int,
    device: torch.device,
    meta: Mapping[str, Any],
    stack: Callable[[TuneCase, torch.device], ExpertWeights],
    on_measured: OnMeasured | None = None,
) -> TuneResult:
    """Measure until every candidate is done or the budget is spent, then write what is known.

    stack: makes the experts to measure with. Raises ConfigError for no tokens or no budget, UnsupportedError for a
    backend without anything to tune.
    """
    if not tokens or min(tokens) < 1 or not budget_s > 0:
        raise ConfigError(f"tokens {list(tokens)} must be positive and the budget of {budget_s:g} s as well")
    context = case.context(device)
    spaces = {count: space_of(EXPERTS[case.experts], context, count, cores) for count in tokens}
    session = _Session(case, context, spaces, Parts(path.with_suffix(".part.jsonl"), case.name), stack, on_measured)
    resumed = session.done
    complete = session.measure(now() + budget_s)
    points = session.points()
    about = {"case": case.name, "complete": complete, "rule": RULE, "judged": session.judged()}
    save_measured(path, points, dict(meta) | about)
    if complete:
        session.parts.done()
    return TuneResult(points, complete, session.done - resumed, resumed)


@dataclass
class _Session:
    """One case under measurement."""

    case: TuneCase
    context: ExpertsContext
    spaces: Mapping[int, Space]
    parts: Parts
    stack: Callable[[TuneCase, torch.device], ExpertWeights]
    on_measured: OnMeasured | None
    weights: Weights | None = None

    @property
    def wanted(self) -> list[tuple[int, Candidate]]:
        """Every number of tokens with every candidate, the built-in one first."""
        return [(count, candidate) for count, space in self.spaces.items() for candidate in space.candidates]

    @property
    def done(self) -> int:
        """Candidates that are measured."""
        return sum(self.parts.get(*one) is not None for one in self.wanted)

    def measure(self, deadline: float) -> bool:
        """Go through all candidates; whether none is left. No trial starts after the deadline."""
        done, total = 0, len(self.wanted)
        for count, space in self.spaces.items():
            watch: Stopwatch | None = None
            for candidate in space.candidates:
                if self.on_measured is not None:
                    self.on_measured(f"{count} tokens", done, total)
                done += 1
                if self.parts.get(count, candidate) is not None:
                    continue
                if now() > deadline:
                    return False
                watch = watch or self._stopwatch(count)
                self._try(watch, count, candidate)
            best = best_of(self.trials(count)[1:])
            if best is None or best.confirmed:
                continue
            if now() > deadline:
                return False
            watch = watch or self._stopwatch(count)
            self.parts.add(count, best.parameters, watch.compare(space.built_in, best.parameters), confirms=True)
        return True

    def _try(self, watch: Stopwatch, count: int, candidate: Candidate) -> None:
        """Measure a candidate, or write down why it cannot be used. Raises what the built-in one raises."""
        built_in, device, failed = self.spaces[count].built_in, self.context.device, ""
        if candidate != built_in and device.type != "cpu":  # a kernel may hang, or end the process
            self.parts.add(count, candidate, (), "did not end in an earlier session")
        try:
            rounds = watch.compare(built_in, candidate, whole=candidate == built_in)
        except unless_signalled(Exception) as problem:
            if candidate == built_in:
                raise
            rounds, failed = (), f"{type(problem).__name__}: {problem}"[:200]
        synchronize(device)
        self.parts.add(count, candidate, rounds, failed)

    def trials(self, count: int) -> list[Trial]:
        """Return the trials at a number of tokens, that of the built-in choice first; none before there is that one."""
        built_in, *others = (self.parts.get(count, candidate) for candidate in self.spaces[count].candidates)
        is_measured = built_in is not None and not built_in.failed
        return [trial for trial in (built_in, *others) if trial is not None] if is_measured else []

    def points(self) -> tuple[TunedPoint, ...]:
        """Return the parameters to use, by tokens; only where the built-in choice was measured."""
        found = [(count, self.trials(count)) for count in sorted(self.spaces)]
        winners = [(count, chosen(trials[0], trials[1:])) for count, trials in found if trials]
        return tuple(TunedPoint(count, dict(winner.parameters), winner.microseconds) for count, winner in winners)

    def judged(self) -> list[dict[str, Any]]:
        """Why each point is what it is."""
        reported = []
        for count in sorted(self.spaces):
            if not (trials := self.trials(count)):
                continue
            best, serves = best_of(trials[1:]), chosen(trials[0], trials[1:])
            line: dict[str, Any] = {"tokens": count, "replaced": serves is not trials[0]}
            line["built_in"] = {"parameters": dict(trials[0].parameters), "beside_itself": asdict(trials[0].ratio)}
            if best is not None:
                again = asdict(ratio_of(best.confirmed)) if best.confirmed else None
                line["best"] = {"parameters": dict(best.parameters), "ratio": asdict(best.ratio), "again": again}
            if failed := [
                {"parameters": dict(trial.parameters), "why": trial.failed} for trial in trials if trial.failed
            ]:
                line["failed"] = failed
            reported.append(line)
        return reported

    def _stopwatch(self, count: int) -> Stopwatch:
        experts = EXPERTS[self.case.experts](self.context)
        self.weights = self.weights or experts.relayout(self.stack(self.case, self.context.device))
        return Stopwatch(experts, self.weights, self.spaces[count], count, self.case.top_k)


def save_measured(path: Path, points: Sequence[TunedPoint], meta: Mapping[str, Any]) -> None:
    """Write points in order, and the conditions of measurement to `.meta.json`; both are replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(points, key=lambda point: point.tokens)
    write_text(path, json.dumps({"points": [asdict(point) for point in ordered]}, indent=2) + "\n")
    write_text(path.with_suffix(".meta.json"), json.dumps(dict(meta), indent=2) + "\n")


@dataclass(frozen=True)
class Space:
    """The candidates of one backend for one number of rows, and how to run it with one of them."""

    candidates: tuple[Candidate, ...]
    """The built-in choice first."""
    apply: Callable[[FusedExperts, Candidate], FusedExperts]
    threads_only: bool = False
    """Whether the parameters are torch's threads, which stay as they were outside of a measurement."""

    @property
    def built_in(self) -> Candidate:
        """The parameters in use if nothing was measured."""
        return self.candidates[0]


def space_of(backend: type[FusedExperts], context: ExpertsContext, rows: int, cores: int) -> Space:
    """The candidates of a backend. Raises UnsupportedError if it declares none and does not run on a CPU."""
    declared = getattr(backend, "tuning_space", None)
    if declared is not None:
        candidates: Sequence[Candidate] = declared(context, rows)
        return Space(tuple(dict(c) for c in candidates), lambda experts, c: experts.tuned_with(c))  # type: ignore[attr-defined]
    if context.device.type != "cpu" or "cpu" not in backend.traits.kinds:
        raise UnsupportedError(
            f"{backend.__name__} declares no tuning space",
            ["implement tuning_space() and tuned_with() (see moe_mk.lab.tuning.session)"],
        )
    threads = sorted(thread_counts(cores), key=lambda count: (count != cores, count))
    return Space(tuple({"threads": n} for n in threads), lambda experts, c: experts, threads_only=True)


def thread_counts(cores: int) -> list[int]:
    """Powers of two up to the cores, and the cores themselves."""
    return sorted({2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores})


@contextmanager
def threads_of(candidate: Candidate, space: Space) -> Iterator[None]:
    """Set torch's number of threads to a candidate's, and restore it afterwards."""
    before = torch.get_num_threads()
    if space.threads_only:
        torch.set_num_threads(int(candidate["threads"]))
    try:
        yield
    finally:
        torch.set_num_threads(before)
