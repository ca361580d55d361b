"""The Gluon GEMMs on tensors between interpreted Triton kernels; run by test_interpreted.py with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_mk.config.tuned import Tuned
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.kernels.triton.tile import Tile
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128, QuantTensor
from moe_mk.testing.experts import _poisoned, random_experts
from moe_mk.testing.limits import require_close
from moe_mk.tokens import BatchedTokens, GroupedTokens, OutputStage, RowTokens
from moe_mk.verify.compare import experts_error
from moe_mk.weights.expert_weights import ExpertWeights
from tests.kernels.triton.gluon_interpreter import interpreted
from tests.kernels.triton.interpreted_experts import CPU, context

HIDDEN, INNER, SLOTS = 512, 256, 3
"""Two units of a tile in each product, four steps in the first one and two in the second one."""
TILES = [Tile(rows, True, 4, stages, "gluon") for rows, stages in ((8, 3), (16, 6), (32, 2))]
TILES += [Tile(rows, False, 4, stages, "gluon") for rows, stages in ((64, 3), (128, 3))]


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    with interpreted():
        yield


def drawn(rows: int, top_k: int) -> RowTokens:
    draw = torch.Generator().manual_seed(rows)
    ids = torch.rand((rows, SLOTS), generator=draw).argsort(1)[:, :top_k].int()
    ids[torch.rand(ids.shape, generator=draw) < 0.2] = -1
    weights = torch.rand(ids.shape, generator=draw).masked_fill(ids < 0, 0.0)
    return RowTokens(FP8_1x128.quantize(torch.randn((rows, HIDDEN), generator=draw).bfloat16()), ids, weights, SLOTS)


def stacked() -> ExpertWeights:
    """Experts whose blocks have scales far from each other, so that a wrong one is no rounding error."""
    stack, draw = random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, CPU), torch.Generator().manual_seed(1)

    def spread(q: QuantTensor) -> QuantTensor:
        assert q.scales is not None
        return replace(q, scales=q.scales * 2.0 ** torch.randint(-2, 3, q.scales.shape, generator=draw))

    return replace(stack, w13=spread(stack.w13), w2=spread(stack.w2))


def named(tile: Tile) -> str:
    return f"{tile.rows} rows"


@pytest.mark.parametrize("layout", [RowTokens, GroupedTokens, BatchedTokens])
@pytest.mark.parametrize("tile", TILES, ids=named)
def test_every_tile_equals_the_reference(tile: Tile, layout: type) -> None:
    backend = TritonExperts(replace(context(FP8_1x128), hidden_size=HIDDEN, intermediate_size=INNER))
    backend.tuned = Tuned.fixed(tile)
    reference = ReferenceExperts(backend.context)
    stack = stacked()
    for rows in (5, 2 * tile.rows):
        tokens = drawn(rows, 2)
        given = permute(tokens, (layout,))
        given = _poisoned(given) if isinstance(given, BatchedTokens) else given
        got = weight_and_reduce(backend.run(given, backend.relayout(stack)), given, OutputStage.REDUCED).y
        expected = weight_and_reduce(reference.run(tokens, stack), tokens, OutputStage.REDUCED).y
        error = experts_error(BF16, FP8_1x128, FP8_128x128, HIDDEN)
        require_close(got.float(), expected.float(), error, f"{tile}, {layout.__name__}, {rows} rows")
