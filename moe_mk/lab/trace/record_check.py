"""Find why a routing record does not fit the tokens it is replayed for, by a reference or by statistics, and name it.

    reference   what the gate chooses from recorded hidden states or logits, or another record of the same tokens
    statistics  of the record alone: ranges, groups, repeated rows, and tokens that occur more than once

`Fault` lists what can be found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.lab.trace.record_compare import BYTE, SequencePair, agreements, best_pairs, compare, hole_of, holes_of, some
from moe_mk.lab.trace.records import Fault, Finding, ModelFacts, RecordedSequence, RoutingRecord
from moe_mk.lab.trace.routing_forward import TraceError

LAG, SIGMAS, RUN = 32, 6.0, 8
"""Distances at which a shift is searched by statistics, how certain it is, and rows that do not repeat by chance."""


@dataclass(frozen=True)
class Report:
    """Findings of a check. A record without findings fits."""

    basis: str
    """What the record was compared with."""
    num_rows: int
    findings: tuple[Finding, ...]
    agreement_X: dict[int, float] = field(default_factory=dict)
    """By layer: the share of choices that agree, once the faults that were found are undone; empty for statistics."""

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The names of what was found, each once."""
        return tuple(dict.fromkeys(each.fault for each in self.findings))


def check_record(record: RoutingRecord, facts: ModelFacts | None = None, other: RoutingRecord | None = None) -> Report:
    """Check a record. other: a reference for the same tokens; without one, or for other tokens, statistics decide.

    Raises TraceError where there is nothing to compare: no facts and no reference, or no row.
    """
    if facts is None and other is None:
        raise TraceError("a record alone cannot be checked; pass the checkpoint, or another record of the same tokens")
    if other is not None and facts is None:
        facts = _facts_of(other)
    assert facts is not None
    findings = list(_of_fields(record))
    rows = sum(len(each.ids_TXK) for each in record.sequences if each.ids_TXK is not None)
    findings += _of_top_k(record, facts) + _of_layer_count(record, facts)
    same = other is not None and _has_same_tokens(record, other)
    basis = "statistics of the record" if other is None else f"{other.kind}, {len(other.sequences)} sequences"
    if other is None or not same:
        findings += _statistics(record, facts)
        if other is not None:
            findings += _order_by_loads(record, other, facts)
            basis = f"loads of {basis}, which has other tokens"
        return Report(basis, rows, tuple(findings))
    pairs, mended = list(_pairs(record, other, facts)), dict[int, float]()
    if pairs:  # those of other shapes were reported
        usual = Counter((pair.rec_TXK.shape[1:], pair.ref_TXK.shape[1:]) for pair in pairs).most_common(1)[0][0]
        pairs = [pair for pair in pairs if (pair.rec_TXK.shape[1:], pair.ref_TXK.shape[1:]) == usual]
        compared, mended = compare(pairs, facts, already={each.fault for each in findings})
        findings += compared
    return Report(basis, rows, tuple(findings), mended)


# What the shape shows.


def _facts_of(other: RoutingRecord) -> ModelFacts:
    given = [each.ids_TXK for each in other.sequences if each.ids_TXK is not None]
    shapes = {tuple(ids_TXK.shape[1:]) for ids_TXK in given}
    if len(shapes) != 1:
        raise TraceError(f"the reference has rows of {sorted(shapes)}; one shape of layers and K is needed")
    num_layers, top_k = shapes.pop()
    largest = max(int(ids_TXK.max()) for ids_TXK in given if ids_TXK.numel())
    return ModelFacts(largest + 1, top_k, other.layers or tuple(range(num_layers)))


def _of_fields(record: RoutingRecord) -> Iterator[Finding]:
    without = [each.name for each in record.sequences if each.ids_TXK is None]
    if without:
        evidence = f"{len(without)} of {len(record.sequences)} sequences have no routed experts"
        yield Finding("field dropped", some(without), evidence)


def _of_top_k(record: RoutingRecord, facts: ModelFacts) -> list[Finding]:
    found = []
    by_k: dict[int, list[RecordedSequence]] = {}
    for each in record.sequences:
        if each.ids_TXK is not None and each.ids_TXK.shape[2] != facts.top_k:
            by_k.setdefault(each.ids_TXK.shape[2], []).append(each)
    for top_k, those in by_k.items():
        last = those[0].ids_TXK
        assert last is not None
        why = "; the last one is the fused shared expert" if _has_fused(last, facts) else ""
        found.append(
            Finding(
                "top-k", some([each.name for each in those]), f"{top_k} experts a row, the model has {facts.top_k}{why}"
            )
        )
    return found


def _has_fused(ids_TXK: Tensor, facts: ModelFacts) -> bool:
    """Whether a shared expert that is computed as one more routed one was recorded as well."""
    one_more = ids_TXK.shape[2] == facts.top_k + 1 and ids_TXK.numel() > 0
    return one_more and bool((ids_TXK[..., -1] >= facts.num_experts).all())


def _columns(shape: int, record: RoutingRecord, facts: ModelFacts) -> list[int] | None:
    """The columns of a record that are the model's layers, in their order; None where they cannot be known."""
    if record.layers is not None:
        place = {layer: at for at, layer in enumerate(record.layers)}
        return [place[layer] for layer in facts.layers] if set(facts.layers) <= set(place) else None
    if shape == len(facts.layers):
        return list(range(shape))
    return list(facts.layers) if shape == facts.num_hidden_layers else None


def _of_layer_count(record: RoutingRecord, facts: ModelFacts) -> list[Finding]:
    found = Counter(
        each.ids_TXK.shape[1]
        for each in record.sequences
        if each.ids_TXK is not None and _columns(each.ids_TXK.shape[1], record, facts) is None
    )
    expected = f"{len(facts.layers)} with experts" + (
        f" of {facts.num_hidden_layers}" if facts.num_hidden_layers else ""
    )
    return [
        Finding("layer count", f"{count} sequences", f"{layers} layers a row, the model has {expected}")
        for layers, count in found.items()
    ]


def _has_same_tokens(record: RoutingRecord, other: RoutingRecord) -> bool:
    """Whether a reference is of the same sequences, as far as token ids show."""
    if len(record.sequences) != len(other.sequences):
        return False
    known = [
        (one.token_ids_T, two.token_ids_T)
        for one, two in zip(record.sequences, other.sequences, strict=True)
        if one.token_ids_T is not None and two.token_ids_T is not None
    ]
    same = [torch.equal(one[: min(len(one), len(two))], two[: min(len(one), len(two))]) for one, two in known]
    return not same or 2 * sum(same) >= len(same)


def _pairs(record: RoutingRecord, other: RoutingRecord, facts: ModelFacts) -> Iterator[SequencePair]:
    for mine, theirs in zip(record.sequences, other.sequences, strict=True):
        if mine.ids_TXK is None or theirs.ids_TXK is None:
            continue
        ours, columns = _columns(mine.ids_TXK.shape[1], record, facts), _columns(theirs.ids_TXK.shape[1], other, facts)
        if columns is None:
            raise TraceError(f"the reference has {theirs.ids_TXK.shape[1]} layers, the model {len(facts.layers)}")
        rec_TXK = mine.ids_TXK.to(torch.int64)
        rec_TXK = rec_TXK if ours is None else rec_TXK[:, ours]
        if _has_fused(rec_TXK, facts):
            rec_TXK = rec_TXK[..., :-1]
        ref_TXK, first = theirs.ids_TXK.to(torch.int64)[:, columns], max(mine.start, theirs.start)
        name = mine.name if first == mine.start else f"{mine.name} from row {first - mine.start} on"
        rec_TXK = rec_TXK[first - mine.start :]
        yield SequencePair(name, rec_TXK, ref_TXK, first - theirs.start, mine.prompt, first)


# Statistics of a record alone.


def _statistics(record: RoutingRecord, facts: ModelFacts) -> Iterator[Finding]:
    """Yield the faults that a record shows without a reference."""
    given: list[tuple[RecordedSequence, Tensor]] = []
    for each in record.sequences:
        if each.ids_TXK is not None:
            columns = _columns(each.ids_TXK.shape[1], record, facts)
            wide = each.ids_TXK.to(torch.int64)
            given.append((each, wide if columns is None else wide[:, columns]))
    yield from _ranges(given, facts)
    intact = []
    for each, ids_TXK in given:
        found = list(_rows_of_sequence(each, ids_TXK))
        yield from found
        if not found:
            intact.append((each, ids_TXK))
    if (shift := _shift_by_tokens(intact)) is not None:
        yield shift


def _ranges(given: Sequence[tuple[RecordedSequence, Tensor]], facts: ModelFacts) -> Iterator[Finding]:
    wide = [ids_TXK[~holes_of(ids_TXK)].flatten() for _, ids_TXK in given]
    values = torch.cat(wide) if wide else torch.zeros(0, dtype=torch.int64, device="cpu")
    if not len(values):
        return
    lowest, largest = (int(each) for each in torch.aminmax(values))
    every = "all sequences"
    # Experts from 256 on have at least a quarter of their share, or one that is never chosen would look the same.
    share = (facts.num_experts - BYTE) / facts.num_experts / 4
    if lowest < -1:
        yield Finding("dtype wrap", every, f"ids down to {lowest}: ids of {BYTE // 2} and more in int8")
    elif share > 0 and largest < BYTE and len(values) * math.log1p(-share) < -20.0:
        text = (
            f"the largest of {len(values)} ids is {largest}, the model has {facts.num_experts} experts: modulo {BYTE}"
        )
        yield Finding("dtype wrap", every, text)
    fits = all(each.shape[2] == facts.top_k for _, each in given)
    if largest >= facts.num_experts and fits:
        yield Finding("physical ids", every, f"ids up to {largest} of {facts.num_experts} experts")
    elif facts.top_groups < facts.num_groups and fits:
        rows_NK = torch.cat([ids_TXK[~holes_of(ids_TXK)].flatten(0, 1) for _, ids_TXK in given])
        group_NK = rows_NK.clamp_min(0) // (facts.num_experts // facts.num_groups)
        used_N = torch.nn.functional.one_hot(group_NK, facts.num_groups).amax(1).sum(1)
        wrong = int((used_N > facts.top_groups).sum())
        if wrong > len(rows_NK) // 100:
            text = f"{wrong} of {len(rows_NK)} rows have experts of more than {facts.top_groups} groups"
            yield Finding("physical ids", every, text)


def _rows_of_sequence(each: RecordedSequence, ids_TXK: Tensor) -> Iterator[Finding]:
    length, hole_T = len(ids_TXK), holes_of(ids_TXK)
    expected = None if each.token_ids_T is None else len(each.token_ids_T) - each.start
    edges = (torch.nn.functional.pad(hole_T.int(), (1, 1)).diff() != 0).nonzero().flatten().tolist()
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        if not (end == length and end - begin == 1):
            pair = SequencePair(each.name, ids_TXK, ids_TXK, 0, each.prompt, each.start)
            fault, text = hole_of(begin, end, pair)
            yield Finding(fault, each.name, text)
    repeated = _repeated(ids_TXK, hole_T)
    if repeated and (expected is None or length > expected):
        text = f"rows {repeated} to {2 * repeated - 1} are those from 0 on once more"
        yield Finding("prefix repeated", each.name, text)
    elif expected is not None and length > expected:
        yield Finding("prefix repeated", each.name, f"{length} rows for {expected} tokens")
    elif expected is not None and length < expected - 1:
        yield Finding("rows lost", each.name, f"{length} rows for {expected} tokens, {expected - 1} of which have one")


def _repeated(ids_TXK: Tensor, hole_T: Tensor) -> int:
    """The least number of rows at the begin that follow once more, choice for choice; 0 if there is none."""
    for size in range(RUN, len(ids_TXK) // 2 + 1):
        again = torch.equal(ids_TXK[:RUN], ids_TXK[size : size + RUN]) and not hole_T[:size].any()
        if again and torch.equal(ids_TXK[:size], ids_TXK[size : 2 * size]):
            return size
    return 0


def _shift_by_tokens(given: Sequence[tuple[RecordedSequence, Tensor]]) -> Finding | None:
    """The distance from their tokens at which rows of equal tokens agree most, in the first layers; None in place."""
    scores: dict[int, list[Tensor]] = {lag: [] for lag in range(-LAG, LAG + 1)}
    for each, ids_TXK in given:
        if each.token_ids_T is None or len(ids_TXK) < 2 * LAG:
            continue
        tokens = each.token_ids_T[each.start : each.start + len(ids_TXK)]
        order = torch.argsort(tokens, stable=True)
        twice = (tokens[order[1:]] == tokens[order[:-1]]).nonzero().flatten()
        one, two = order[twice], order[twice + 1]
        first_TXK = ids_TXK[:, :2]
        for lag, found in scores.items():
            inside = (one + lag >= 0) & (two + lag >= 0) & (one + lag < len(ids_TXK)) & (two + lag < len(ids_TXK))
            found.append(agreements(first_TXK[one[inside] + lag], first_TXK[two[inside] + lag]).mean(1))
    joined = {lag: torch.cat(found) for lag, found in scores.items() if found}
    if not joined or min(len(each) for each in joined.values()) < 50:
        return None
    means = {lag: float(each.mean()) for lag, each in joined.items()}
    best = max(means, key=lambda lag: means[lag])
    spread = math.sqrt(2 * max(float(joined[best].var()), 1e-4) / len(joined[best]))
    if best == 0 or means[best] - means[0] < SIGMAS * spread:
        return None
    shares = f"{100 * means[best]:.0f} % of their experts, rows of equal tokens {100 * means[0]:.0f} %"
    text = f"rows {abs(best)} {'behind' if best > 0 else 'before'} equal tokens share {shares}"
    return Finding("rows shifted", "all sequences", text)


def _order_by_loads(record: RoutingRecord, other: RoutingRecord, facts: ModelFacts) -> Iterator[Finding]:
    """Whether layers have the loads of other layers, in a record of other tokens."""
    loads = [_loads(each, facts) for each in (record, other)]
    if loads[0] is None or loads[1] is None:
        return
    mine_XE, theirs_XE = (each / each.sum(1, keepdims=True).clip(1) for each in loads if each is not None)
    count = len(facts.layers)
    close_XX = np.corrcoef(mine_XE, theirs_XE)[:count, count:]
    moved = [
        (at, to)
        for at, to in best_pairs(np.nan_to_num(close_XX))
        if at != to and close_XX[at, to] > max(0.8, close_XX[at, at] + 0.3)
    ]
    if moved:
        shown = ", ".join(f"{facts.layers[at]} has the loads of {facts.layers[to]}" for at, to in moved[:4])
        yield Finding("layer order", f"{len(moved)} of {count} layers", shown)


def _loads(record: RoutingRecord, facts: ModelFacts) -> NDArray[np.float64] | None:
    total_XE = np.zeros((len(facts.layers), facts.num_experts))
    for each in record.sequences:
        if each.ids_TXK is None:
            continue
        columns = _columns(each.ids_TXK.shape[1], record, facts)
        if columns is None:
            return None
        for place, column in enumerate(columns):
            ids = each.ids_TXK[:, column].flatten().to(torch.int64)
            kept = ids[(ids >= 0) & (ids < facts.num_experts)]
            total_XE[place] += torch.bincount(kept, minlength=facts.num_experts).numpy()
    return total_XE
