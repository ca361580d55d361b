"""Compare a routing record with a reference of the same tokens, and undo what makes them differ, fault by fault.

Live routing differs from recorded routing by rounding alone for some percent of the choices. Rows are therefore
compared by how many of their choices agree: log(P(agreements | same token) / P(agreements | other token)), and a
sequence is aligned with its reference by the best path of offsets, where a change of offset has a price.

    offset of the reference   0 0 0 0 3 3 3 3       three rows were lost after the fourth
    by row of the record      0 0 0 0 -4 -4 -4 -4   the first four rows are there twice

X is layers with experts, or states of a path.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.lab.trace.records import Fault, Finding, ModelFacts

SAME = 0.9
"""Probability that a choice of the same token agrees; bf16 against f32 is above it."""
AGREES = 0.75
"""A layer of which fewer choices agree, once every known fault is undone, is reported."""
SWITCH, STRONG = 8.0, 32
"""Price of a change of offset; and of how many choices the evidence of a row is at most (they are not independent)."""
SAMPLE, LAYERS, SEARCHED = 1024, 8, 192
"""Rows for statistics of layers and ids; layers and rows of a sequence by which other offsets are searched."""
FAR = 8192
"""Tokens to both sides among which the one of a row is searched."""
BYTE, PAGE = 256, 16
"""Values of uint8; tokens of a page of a prefix cache, of which pages are multiples."""
HOLE, NONE = "hole", "none"


@dataclass
class SequencePair:
    """One sequence of both records; ids are int64 of the same layers."""

    name: str
    rec_TXK: Tensor
    ref_TXK: Tensor
    start: int
    """The row of the reference that belongs to the first of the record."""
    prompt: int | None
    first: int
    """The token of the first row of the record."""


def agreements(a_TXK: Tensor, b_TXK: Tensor) -> Tensor:
    """The share of choices [T, X] of two routings that agree, whatever their order; -1 agrees with nothing."""
    parts = []
    for a, b in zip(torch.split(a_TXK, SAMPLE), torch.split(b_TXK, SAMPLE), strict=True):
        both = (a[..., :, None] == b[..., None, :]) & (a >= 0)[..., :, None]
        parts.append(both.any(-2).sum(-1).to(torch.float32))
    least = max(min(a_TXK.shape[2], b_TXK.shape[2]), 1)
    return (torch.cat(parts) if parts else a_TXK.new_zeros(a_TXK.shape[:2]).float()) / least


def compare(
    pairs: list[SequencePair], facts: ModelFacts, already: set[Fault]
) -> tuple[list[Finding], dict[int, float]]:
    """Undo fault by fault, ids first, then layers, then rows; what is left is unexplained."""
    findings = _undo_wrap(pairs, facts)
    findings += _undo_layers(pairs, facts)
    if any(pair.rec_TXK.shape[1] != len(facts.layers) for pair in pairs):
        return findings, {}
    findings += _undo_physical(pairs, facts)
    by_rows, share_X = align(pairs)
    findings += by_rows
    agreement_X = dict(zip(facts.layers, share_X.tolist(), strict=True))
    low = [layer for layer, share in agreement_X.items() if share < AGREES]
    if low and not findings and not already:
        shares = f"{100 * min(agreement_X[layer] for layer in low):.0f} % to {100 * max(agreement_X.values()):.0f} %"
        text = f"less than {100 * AGREES:.0f} % of the choices agree ({shares}), and no fault explains it"
        findings.append(Finding("unexplained", f"layers {some(low)}", text))
    return findings, agreement_X


def _sample(pairs: Sequence[SequencePair]) -> tuple[Tensor, Tensor]:
    """Rows of all sequences at offset 0, of the record and of the reference."""
    mine, theirs = [], []
    for pair in pairs:
        first = max(pair.start, 0)
        length = min(len(pair.rec_TXK), len(pair.ref_TXK) - first)
        if length > 0:
            kept = numbers(0, length, max(length * len(pairs) // SAMPLE, 1))
            mine.append(pair.rec_TXK[kept])
            theirs.append(pair.ref_TXK[kept + first])
    if not mine:
        nothing = pairs[0]
        return nothing.rec_TXK[:0], nothing.ref_TXK[:0]
    return torch.cat(mine), torch.cat(theirs)


def _undo_wrap(pairs: Sequence[SequencePair], facts: ModelFacts) -> list[Finding]:
    rec_TXK, ref_TXK = _sample(pairs)
    negative = sum(int((pair.rec_TXK < -1).sum()) for pair in pairs)
    largest = max((int(pair.rec_TXK.max()) for pair in pairs if pair.rec_TXK.numel()), default=-1)
    beyond, count = int((ref_TXK >= BYTE).sum()), rec_TXK.numel()
    wide = beyond and largest < BYTE and count * math.log1p(-beyond / ref_TXK.numel()) < -20.0
    if not wide and not negative:
        return []
    for pair in pairs:
        pair.rec_TXK = torch.where(pair.rec_TXK < -1, pair.rec_TXK + BYTE, pair.rec_TXK)
        pair.ref_TXK = torch.where(pair.ref_TXK >= BYTE, pair.ref_TXK % BYTE, pair.ref_TXK) if wide else pair.ref_TXK
    if negative:
        evidence = f"{negative} ids are below -1: ids of {BYTE // 2} and more in int8"
    else:
        evidence = f"the largest of {count} ids is {largest}, and {beyond} of the reference are {BYTE} to "
        evidence += f"{facts.num_experts - 1}: ids modulo {BYTE}"
    return [Finding("dtype wrap", "all sequences", evidence)]


def _undo_layers(pairs: Sequence[SequencePair], facts: ModelFacts) -> list[Finding]:
    rec_TXK, ref_TXK = _sample(pairs)
    rec_TXK, ref_TXK = rec_TXK[: SAMPLE // 2], ref_TXK[: SAMPLE // 2]
    mine, theirs = rec_TXK.shape[1], ref_TXK.shape[1]
    if not len(rec_TXK):
        return []
    share_XX = torch.stack([agreements(rec_TXK[:, [at] * theirs], ref_TXK).mean(0) for at in range(mine)]).numpy()
    chance = float(np.median(share_XX))
    good = [(at, to) for at, to in best_pairs(share_XX) if share_XX[at, to] > (SAME + chance) / 2]
    if mine != theirs:
        missing = sorted(set(range(theirs)) - {to for _, to in good})
        if len(good) < min(mine, theirs):
            return []
        text = f"layers {some([facts.layers[at] for at in missing])} are missing" if missing else "it has more"
        return [Finding("layer count", f"{mine} layers for {theirs}", text)]
    moved = [(at, to) for at, to in good if at != to and share_XX[at, to] - share_XX[at, at] > 0.2]
    if not moved:
        return []
    order = list(range(mine))
    for at, to in moved:
        order[to] = at
    if sorted(order) != list(range(mine)):
        return []
    for pair in pairs:
        pair.rec_TXK = pair.rec_TXK[:, order]
    shown = ", ".join(f"{facts.layers[at]} holds {facts.layers[to]}" for at, to in moved[:4])
    shares = f"{100 * np.mean([share_XX[at, to] for at, to in moved]):.0f} % instead of "
    shares += f"{100 * np.mean([share_XX[at, at] for at, _ in moved]):.0f} % agree"
    return [Finding("layer order", f"{len(moved)} of {mine} layers", f"{shown}; {shares}")]


def best_pairs(share_XX: NDArray[np.floating[Any]]) -> list[tuple[int, int]]:
    """Rows and columns that belong together, the greatest value first, each once; ordered by rows."""
    left, found = np.array(share_XX, np.float64), []
    for _ in range(min(left.shape)):
        at, to = (int(each) for each in np.unravel_index(left.argmax(), left.shape))
        found.append((at, to))
        left[at], left[:, to] = -np.inf, -np.inf
    return sorted(found)


def _undo_physical(pairs: Sequence[SequencePair], facts: ModelFacts) -> list[Finding]:
    """Learn a map of ids from every other row, layer by layer, and keep it where it holds in the other rows."""
    rec_TXK, ref_TXK = _sample(pairs)
    largest = max((int(pair.rec_TXK.max()) for pair in pairs if pair.rec_TXK.numel()), default=-1)
    mapped, changed = [], 0
    before, after = [], []
    for at in range(rec_TXK.shape[1]) if len(rec_TXK) >= 2 * PAGE else ():
        mine_TK, theirs_TK = rec_TXK[:, at], ref_TXK[:, at]
        map_P = _learned(mine_TK[::2], theirs_TK[::2], facts.num_experts)
        held_T1K, other_T1K = mine_TK[1::2, None], theirs_TK[1::2, None]
        plain = float(agreements(held_T1K, other_T1K).mean())
        learned = float(agreements(_through(map_P, held_T1K), other_T1K).mean())
        if learned > max(plain + 0.1, (SAME + plain) / 2 - 0.1, 0.6):
            map_P = _learned(mine_TK, theirs_TK, facts.num_experts)
            changed += int((map_P != numbers(len(map_P))).sum())
            mapped.append(at)
            before.append(plain)
            after.append(learned)
            for pair in pairs:
                pair.rec_TXK[:, at] = _through(map_P, pair.rec_TXK[:, at])
    if mapped:
        where = f"layers {some([facts.layers[at] for at in mapped])}"
        text = (
            f"a map of {changed} ids makes {100 * np.mean(after):.0f} % instead of {100 * np.mean(before):.0f} % agree"
        )
        return [Finding("physical ids", where, f"{text}; the largest id is {largest} of {facts.num_experts} experts")]
    wide = [
        pair
        for pair in pairs
        if pair.rec_TXK.shape[2] == facts.top_k and bool((pair.rec_TXK >= facts.num_experts).any())
    ]
    if wide and largest not in (2**8 - 1, 2**16 - 1):
        text = f"ids up to {largest} of {facts.num_experts} experts"
        return [Finding("physical ids", some([pair.name for pair in wide]), text)]
    return []


def _learned(mine_TK: Tensor, theirs_TK: Tensor, num_experts: int) -> Tensor:
    """The expert of the reference that occurs most with each id of the record, by its own frequency."""
    size = max(int(mine_TK.max()) + 1, num_experts) if mine_TK.numel() else num_experts
    size = min(size, 2**16)
    pairs = torch.cartesian_prod(numbers(mine_TK.shape[1]), numbers(theirs_TK.shape[1]))
    one, two = mine_TK[:, pairs[:, 0]].flatten(), theirs_TK[:, pairs[:, 1]].flatten()
    valid = (one >= 0) & (two >= 0) & (one < size) & (two < num_experts)
    together = torch.bincount(one[valid] * num_experts + two[valid], minlength=size * num_experts).view(
        size, num_experts
    )
    usual_E = torch.bincount(theirs_TK[theirs_TK >= 0].clamp_max(num_experts - 1), minlength=num_experts).clamp_min(1)
    best = (together / usual_E.sqrt()).max(1)
    own = numbers(size)
    stays = together[own[:num_experts], own[:num_experts]] / usual_E.sqrt() >= best.values[:num_experts]
    learned = torch.where(together.sum(1) >= 2, best.indices, own)
    learned[:num_experts][stays] = own[:num_experts][stays]
    return learned


def _through(map_P: Tensor, ids: Tensor) -> Tensor:
    inside = (ids >= 0) & (ids < len(map_P))
    return torch.where(inside, map_P[ids.clamp(0, len(map_P) - 1)], ids)


def numbers(*ends: int) -> Tensor:
    """int64, as of `range`."""
    return torch.arange(*ends, dtype=torch.int64, device="cpu")


def some(names: Sequence[object]) -> str:
    """The first of some names, and how many there are."""
    shown = ", ".join(map(str, names[:4]))
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


# Rows.


def align(pairs: Sequence[SequencePair]) -> tuple[list[Finding], Tensor]:
    """Align every sequence with the references of all; returns faults and the share of choices that agree by layer."""
    flat_TXK = torch.cat([pair.ref_TXK for pair in pairs])
    bases = [0, *np.cumsum([len(pair.ref_TXK) for pair in pairs]).tolist()]
    rec_TXK, ref_TXK = _sample(pairs)
    chance = min(max(float(agreements(rec_TXK, ref_TXK.roll(len(ref_TXK) // 2 or 1, 0)).mean()), 0.02), 0.7)
    evidence = _Evidence(flat_TXK, chance)
    found: dict[tuple[Fault, str], list[str]] = {}
    sums_X, counted = torch.zeros(flat_TXK.shape[1], dtype=torch.float32, device="cpu"), 0
    for number, pair in enumerate(pairs):
        here = bases[number] + pair.start
        path = _path(evidence, pair.rec_TXK, here)
        for fault, text in _faults_of(path, pair, (bases[number], bases[number + 1])):
            found.setdefault((fault, text), []).append(pair.name)
        for begin, end, state in path:
            if isinstance(state, int):
                rows = slice(here + begin + state, here + end + state)
                sums_X += agreements(pair.rec_TXK[begin:end], flat_TXK[rows]).sum(0)
                counted += end - begin
    findings = [Finding(fault, some(names), text) for (fault, text), names in found.items()]
    return findings, sums_X / max(counted, 1)


Segment = tuple[int, int, int | str]
"""First row, the row behind the last, and the offset of the reference, HOLE or NONE."""


class _Evidence:
    """How much more likely two rows are of the same token than of two tokens, in nats."""

    def __init__(self, flat_TXK: Tensor, chance: float) -> None:
        self.flat_TXK, self.chance = flat_TXK, chance
        step = max(flat_TXK.shape[1] // LAYERS, 1)
        self._few = slice(0, step * LAYERS, step)

    def of(self, share_T: Tensor, choices: int) -> Tensor:
        """share_T: the share of choices that agree; choices: how many a row has."""
        weight = min(choices, STRONG)
        yes, no = math.log(SAME / self.chance), math.log((1 - SAME) / (1 - self.chance))
        return weight * (share_T * yes + (1 - share_T) * no)

    def at(self, rec_TXK: Tensor, here: int) -> Tensor:
        """Of consecutive rows and those of the reference from `here` on; far below 0 beyond its ends."""
        result_T = torch.full((len(rec_TXK),), -1e3, dtype=torch.float32, device="cpu")
        first, last = max(-here, 0), min(len(rec_TXK), len(self.flat_TXK) - here)
        if first < last:
            mine_TXK, theirs_TXK = rec_TXK[first:last], self.flat_TXK[here + first : here + last]
            result_T[first:last] = self.of(agreements(mine_TXK, theirs_TXK).mean(1), mine_TXK[0].numel())
        return result_T

    def offsets(self, rec_TXK: Tensor, rows_X: Tensor, here: int) -> list[int]:
        """Offsets at which some rows match well, the most frequent first."""
        votes: Counter[int] = Counter()
        for row in rows_X.tolist():
            first = max(here + row - FAR, 0)
            few_TXK, mine_TXK = self.flat_TXK[first : here + row + FAR, self._few], rec_TXK[row : row + 1, self._few]
            share_T = agreements(mine_TXK.expand(len(few_TXK), -1, -1), few_TXK).mean(1)
            value_T = self.of(share_T, mine_TXK[0].numel())
            if len(value_T) and (best := float(value_T.max())) > 2.0:
                where = (value_T >= best).nonzero().flatten()[:4]
                votes.update((where + first - here - row).tolist())
        least = 2 if len(rows_X) > 4 else 1
        return [offset for offset, count in votes.most_common(10) if count >= least]


def _path(evidence: _Evidence, rec_TXK: Tensor, here: int) -> list[Segment]:
    """The most likely path of offsets through one sequence, by dynamic programming."""
    length = len(rec_TXK)
    hole_T = holes_of(rec_TXK)
    value_T = evidence.at(rec_TXK, here)
    states: list[int | str] = [HOLE, NONE, 0]
    values = [torch.where(hole_T, 20.0, -1e3), torch.zeros_like(value_T), value_T]
    open_T = (~hole_T & (value_T < 0)).nonzero().flatten()
    if length and not len(open_T) and not hole_T.any():
        return [(0, length, 0)]
    if len(open_T):
        picked = open_T[numbers(0, len(open_T), max(len(open_T) // SEARCHED, 1))]
        for offset in evidence.offsets(rec_TXK, picked, here):
            if offset:
                states.append(offset)
                values.append(evidence.at(rec_TXK, here + offset))
    value_ST = torch.stack(values).masked_fill(hole_T & (numbers(len(states)) > 0)[:, None], -1e3).double().numpy()
    total_S, back = np.where(np.array(states, object) == 0, 0.0, -SWITCH / 2), []
    for t in range(length):
        best = int(total_S.argmax())
        from_S = np.where(total_S >= total_S[best] - SWITCH, np.arange(len(states)), best)
        total_S = np.maximum(total_S, total_S[best] - SWITCH) + value_ST[:, t]
        back.append(from_S)
    segments: list[Segment] = []
    state, end = int(total_S.argmax()), length
    for t in range(length - 1, -1, -1):
        before = int(back[t][state])
        if before != state or t == 0:
            segments.insert(0, (t, end, states[state]))
            state, end = before, t
    return segments


def holes_of(rec_TXK: Tensor) -> Tensor:
    """Rows [T] without choices: one value for all choices of a token, or the row before, from four rows on."""
    length, top_k = len(rec_TXK), rec_TXK.shape[2]
    if not length:
        return torch.zeros(0, dtype=torch.bool, device="cpu")
    flat = rec_TXK.flatten(1)
    # A token has an expert once: one value twice in a layer is no choice. With K = 1 many layers must agree.
    empty_T = (flat == flat[:, :1]).all(1) & ((flat[:, 0] < 0) | (top_k > 1) | (flat.shape[1] >= PAGE))
    same_T = torch.cat((torch.zeros(1, dtype=torch.bool, device="cpu"), (flat[1:] == flat[:-1]).all(1)))
    if flat.shape[1] >= PAGE:
        for start in (~same_T).nonzero().flatten().tolist():
            run = 1
            while start + run < length and same_T[start + run]:
                run += 1
            if run >= 4:
                empty_T[start + 1 : start + run] = True
    return empty_T


def _faults_of(path: Sequence[Segment], pair: SequencePair, own: tuple[int, int]) -> Iterator[tuple[Fault, str]]:
    """Yield the faults that a path means. own: the rows of the sequence's own reference."""
    length, here = len(pair.rec_TXK), own[0] + pair.start
    expected = own[1] - here
    unmatched = sum(end - begin for begin, end, state in path if state == NONE)
    matched = [(begin, end, state) for begin, end, state in path if isinstance(state, int)]
    for begin, end, state in path:
        # Trainers have a row for the last token as well, which no engine has run.
        if state == HOLE and not (end == length and end - begin == 1):
            yield hole_of(begin, end, pair)
    if not length and expected > 1:
        yield "rows lost", f"all {expected - 1} rows are missing"
    elif not matched:
        if unmatched > length // 2:
            yield "unexplained", f"{unmatched} of {length} rows are those of no token of the reference"
    elif (offset := _shift_of(matched, length, here, own)) is not None:
        yield "rows shifted", f"rows are those of {abs(offset)} tokens {'later' if offset > 0 else 'earlier'}"
    else:
        yield from _jumps(matched, pair)
        last = matched[-1][2]
        if not unmatched and length + last < expected - 1:
            count = expected - 1 - length - last
            yield "rows lost", f"the last {count} rows are missing: {length} rows for {expected} tokens"
        if unmatched > max(2, length // 50):
            begin, end = next((begin, end) for begin, end, state in path if state == NONE)
            yield "unexplained", f"rows {begin} to {end - 1} are those of no token of the reference"


def _shift_of(matched: Sequence[tuple[int, int, int]], length: int, here: int, own: tuple[int, int]) -> int | None:
    """The offset of rows that are there, at other tokens: of another sequence, or with none missing before them."""
    longest = max(matched, key=lambda each: each[1] - each[0])
    foreign = [state for begin, _, state in matched if not own[0] <= here + begin + state < own[1]]
    first = matched[0][2]
    if foreign or first < 0 or (first > 0 and length >= own[1] - here - 1):
        return longest[2] or (foreign[0] if foreign else first)
    return None


def _jumps(matched: Sequence[tuple[int, int, int]], pair: SequencePair) -> Iterator[tuple[Fault, str]]:
    """Yield rows that are missing or repeated between the parts of a path."""
    previous = 0
    for begin, _, state in matched:
        if begin == 0 and state > 0:
            yield "prefix missing", f"the first row is that of token {pair.first + state}"
        elif state > previous:
            yield "rows lost", f"{state - previous} rows are missing before row {begin}"
        elif state < previous:
            again = f"rows from {begin} on begin again at token {pair.first + begin + state}"
            yield "prefix repeated", f"{again}, {previous - state} tokens before"
        previous = state


def hole_of(begin: int, end: int, pair: SequencePair) -> tuple[Fault, str]:
    """Rows without choices belong to a cached prefix at its begin, in its prompt, or at the bounds of its pages."""
    paged = begin % PAGE == 0 and (end - begin) % PAGE == 0
    cached = begin == 0 or (paged if pair.prompt is None else pair.first + end <= pair.prompt)
    text = f"rows {begin} to {end - 1} were not recorded (one value, or copies of one row)"
    return ("cache hole" if cached else "rows lost"), text
