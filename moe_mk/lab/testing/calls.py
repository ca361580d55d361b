"""Checks across calls: the given weights are used, outputs stay unchanged, and no tensors leak."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.experts.base import FusedExperts
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.limits import require, require_close
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.tokens import LAYOUT_NAMES, BatchedTokens, ExpertOutput, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import ExpertWeights, Weights

WARM, CALLS = 2, 6
"""Calls before tensors are counted, and calls between two counts."""


def check_calls_of_experts(
    backend: FusedExperts,
    reference: FusedExperts,
    stacks: Sequence[ExpertWeights],
    rows: RowTokens,
    error: float,
    what: str,
) -> None:
    """Two sets of weights in turn through one backend: each output belongs to its weights, and stays unchanged."""
    tokens = permute(rows, (backend.traits.consumes[0],))
    kept = []
    for stack, which in zip((*stacks, stacks[0]), ("first", "second", "first"), strict=True):
        output = backend.run(tokens, backend.relayout(stack))
        expected = weight_and_reduce(reference.run(rows, stack), rows, OutputStage.REDUCED).y
        reduced = weight_and_reduce(output, tokens, OutputStage.REDUCED).y
        require_close(reduced.float(), expected, error, f"{what}, the {which} of two weights in turn")
        kept.append((output, bits_of(_filled(output, tokens))))
    stays = all(bits_of(_filled(output, tokens)) == before for output, before in kept)
    require(stays, f"{what}: an output changed in a later call")


def check_batch_invariance(backend: FusedExperts, stack: ExpertWeights, rows: RowTokens, what: str) -> None:
    """A row in a batch of its own has the same bits as in the full batch."""
    weights = backend.relayout(stack)

    def reduced(some: RowTokens, layout: type) -> Tensor:
        tokens = permute(some, (layout,))
        return weight_and_reduce(backend.run(tokens, weights), tokens, OutputStage.REDUCED).y

    for layout in backend.traits.consumes:
        together_RH = reduced(rows, layout)
        for row in range(len(rows.ids_RK)):
            one = slice(row, row + 1)
            x = replace(rows.x_RH, values=rows.x_RH.values[one], scales=_cut(rows.x_RH.scales, one))
            cut = replace(rows, x_RH=x, ids_RK=rows.ids_RK[one], weights_RK=rows.weights_RK[one])
            same = torch.equal(reduced(cut, layout)[0], together_RH[row])
            require(same, f"{what}, {LAYOUT_NAMES[layout]}: row {row} has other bits in a batch of its own")


def check_alone(backend: FusedExperts, weights: Weights, rows: RowTokens, error: float, what: str) -> None:
    """NaN in the first row changes the output of no other row. rows: of plain values."""
    values = rows.x_RH.values.clone()
    values[0] = torch.nan
    spoiled = replace(rows, x_RH=replace(rows.x_RH, values=values))
    for layout in backend.traits.consumes:
        got = []
        for some in (rows, spoiled):
            tokens = permute(some, (layout,))
            got.append(weight_and_reduce(backend.run(tokens, weights), tokens, OutputStage.REDUCED).y.float()[1:])
        require_close(got[1], got[0], error, f"{what}, {LAYOUT_NAMES[layout]}, with a token of NaN")


def _cut(scales: Tensor | None, rows: slice) -> Tensor | None:
    return None if scales is None else scales[rows]


def _filled(output: ExpertOutput, tokens: Tokens) -> Tensor:
    """An output without its padding, which may hold anything."""
    if not isinstance(tokens, BatchedTokens) or output.stage is OutputStage.REDUCED:
        return output.y
    slot_S = torch.arange(output.y.shape[1], dtype=torch.int64, device=output.y.device)
    return output.y[slot_S < tokens.counts_L[:, None]]


def check_leaves_nothing(call: Callable[[], object], what: str) -> None:
    """The number of tensors held by Python does not grow with each call; memory of a library is not counted."""
    for _ in range(WARM):
        call()
    if _growth(call, collect=False) < CALLS:
        return
    grown = _growth(call, collect=True)  # the collector, which is slow, frees cycles that hold tensors
    require(grown < CALLS, f"{what}: {CALLS} calls leak {grown} tensors")


def _growth(call: Callable[[], object], *, collect: bool) -> int:
    before = _living_tensors(collect=collect)
    for _ in range(CALLS):
        call()
    return _living_tensors(collect=collect) - before


def _living_tensors(*, collect: bool) -> int:
    if collect:
        gc.collect()
    return sum(count for held, count in Counter(map(type, gc.get_objects())).items() if issubclass(held, Tensor))
