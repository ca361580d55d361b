"""Measure candidates within a budget of seconds, keep what was measured, and go on from there after an interruption.

Every measurement is a line of `<case>.part.jsonl`, written before the next one starts. A session that is killed loses
the measurement it was in; the next one with the same case reads the lines and does the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moe_mk.config.tuned import Candidate, TunedPoint, case_name
from moe_mk.errors import ConfigError
from moe_mk.experts.base import EXPERTS, ExpertsContext, FusedExperts
from moe_mk.external.device import synchronize
from moe_mk.permute import permute
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import RowTokens, Tokens
from moe_mk.trace.clock import now
from moe_mk.tuning.files import save_measured
from moe_mk.tuning.space import Space, space_of, threads_of
from moe_mk.weights.expert_weights import ExpertWeights, Weights

OnMeasured = Callable[[str, int, int], None]
"""Told (what, done, total)."""
REPEATS = 5


@dataclass(frozen=True)
class TuneCase:
    """What is tuned: one backend on one shape."""

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
        return case_name(self.shape, self.weights, self.compute)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Hidden size, intermediate size, slots, top_k."""
        return self.hidden_size, self.intermediate_size, self.num_slots, self.top_k


@dataclass(frozen=True)
class TuneResult:
    """What a session ends with."""

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
    if not tokens or min(tokens) < 1 or budget_s <= 0:
        raise ConfigError(f"tokens {list(tokens)} must be positive and the budget of {budget_s:g} s as well")
    context = ExpertsContext(
        case.dtype, case.compute, "silu", case.num_slots, case.hidden_size, case.intermediate_size, device
    )
    experts = EXPERTS[case.experts](context)
    spaces = {count: space_of(EXPERTS[case.experts], context, count, cores) for count in tokens}
    wanted = [(count, candidate) for count in tokens for candidate in spaces[count].candidates]
    part = path.with_suffix(".part.jsonl")
    known = _read_part(part, case)
    resumed, start, measured = sum(_key(*one) in known for one in wanted), now(), 0
    weights: Weights | None = None
    for done, (count, candidate) in enumerate(wanted):
        if on_measured is not None:
            on_measured(f"{count} tokens", done, len(wanted))
        if _key(count, candidate) in known:
            continue
        if now() - start > budget_s:
            break
        weights = weights or experts.relayout(stack(case, device))
        micros = _microseconds(experts, weights, _rows(case, count, device), candidate, spaces[count])
        known[_key(count, candidate)] = micros
        _append(part, case, count, candidate, micros)
        measured += 1
    points = _fastest(wanted, known)
    complete = all(_key(*one) in known for one in wanted)
    save_measured(path, points, dict(meta) | {"case": case.name, "complete": complete, "repeats": REPEATS})
    if complete:
        part.unlink(missing_ok=True)
    return TuneResult(points, complete, measured, resumed)


def _microseconds(experts: FusedExperts, weights: Weights, tokens: Tokens, candidate: Candidate, space: Space) -> float:
    """Median of a few runs after one that warms up."""
    tuned, samples = space.apply(experts, candidate), []
    with threads_of(candidate, space), torch.no_grad():
        tuned.run(tokens, weights)
        synchronize(experts.context.device)
        for _ in range(REPEATS):
            start = now()
            tuned.run(tokens, weights)
            synchronize(experts.context.device)
            samples.append(now() - start)
    return median(samples) * 1e6


def _rows(case: TuneCase, count: int, device: torch.device) -> Tokens:
    """Random tokens, each with top_k different experts, in the layout the backend likes best."""
    draw = torch.Generator("cpu").manual_seed(count)
    x_RH = torch.randn((count, case.hidden_size), generator=draw, dtype=torch.float32, device="cpu")
    scores = torch.rand((count, case.num_slots), generator=draw, dtype=torch.float32, device="cpu")
    ids_RK = scores.argsort(dim=1)[:, : case.top_k].to(torch.int32)
    weights_RK = torch.full(ids_RK.shape, 1.0 / case.top_k, dtype=torch.float32, device=device)
    x = case.dtype.quantize(x_RH.to(device, case.dtype.dtype))
    rows = RowTokens(x, ids_RK.to(device), weights_RK, case.num_slots)
    return permute(rows, EXPERTS[case.experts].traits.consumes)


def _key(count: int, candidate: Candidate) -> str:
    return json.dumps([count, dict(candidate)], sort_keys=True)


def _fastest(wanted: Sequence[tuple[int, Candidate]], known: Mapping[str, float]) -> tuple[TunedPoint, ...]:
    best: dict[int, TunedPoint] = {}
    for count, candidate in wanted:
        micros = known.get(_key(count, candidate))
        if micros is not None and (count not in best or micros < best[count].microseconds):
            best[count] = TunedPoint(count, dict(candidate), micros)
    return tuple(best[count] for count in sorted(best))


def _append(part: Path, case: TuneCase, count: int, candidate: Candidate, micros: float) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    line = {"case": case.name, "tokens": count, "parameters": dict(candidate), "microseconds": micros}
    with part.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")


def _read_part(part: Path, case: TuneCase) -> dict[str, float]:
    """What earlier sessions measured; a last line that was cut off is left out."""
    known: dict[str, float] = {}
    for line in part.read_text(encoding="utf-8").splitlines() if part.is_file() else []:
        try:
            held = json.loads(line)
        except json.JSONDecodeError:
            continue
        if held["case"] == case.name:
            known[_key(held["tokens"], held["parameters"])] = float(held["microseconds"])
    return known
