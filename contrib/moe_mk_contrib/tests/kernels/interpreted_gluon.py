"""The Gluon GEMMs on tensors between interpreted Triton kernels; run by test_interpreted.py with TRITON_INTERPRET=1."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from contrib.moe_mk_contrib.tests.kernels.gluon_interpreter import interpreted
from moe_mk.config.tuned import Tuned
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.experts import _poisoned, random_experts
from moe_mk.lab.testing.limits import require_close
from moe_mk.oracle.expected_error import experts_error
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant import BF16, FP8_1x128, FP8_1x128_UE8M0, FP8_128x128, FP8_128x128_UE8M0, QuantScheme, QuantTensor
from moe_mk.tokens import BatchedTokens, GroupedTokens, OutputStage, RowTokens
from moe_mk.weights.expert_weights import ExpertWeights
from tests.kernels.triton.interpreted_experts import CPU, context

HIDDEN, INNER, SLOTS = 512, 256, 3
"""Two units of a tile in each product, four steps in the first one and two in the second one."""
TILES = [Tile(rows, True, 4, stages, "gluon") for rows, stages in ((8, 3), (16, 6), (32, 2))]
TILES += [Tile(rows, False, 4, stages, "gluon") for rows, stages in ((64, 3), (128, 3))]


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    with interpreted():
        yield


def drawn(rows: int, top_k: int, scheme: QuantScheme = FP8_1x128) -> RowTokens:
    draw = torch.Generator().manual_seed(rows)
    ids = torch.rand((rows, SLOTS), generator=draw).argsort(1)[:, :top_k].int()
    ids[torch.rand(ids.shape, generator=draw) < 0.2] = -1
    weights = torch.rand(ids.shape, generator=draw).masked_fill(ids < 0, 0.0)
    return RowTokens(scheme.quantize(torch.randn((rows, HIDDEN), generator=draw).bfloat16()), ids, weights, SLOTS)


def stacked(scheme: QuantScheme = FP8_128x128) -> ExpertWeights:
    """Experts with very different block scales, so that a wrong scale is more than a rounding error."""
    stack, draw = random_experts(scheme, SLOTS, HIDDEN, INNER, CPU), torch.Generator().manual_seed(1)

    def spread(q: QuantTensor) -> QuantTensor:
        assert q.scales is not None
        scales = q.scales.float() * 2.0 ** torch.randint(-2, 3, q.scales.shape, generator=draw)
        return replace(q, scales=scales.to(q.scales.dtype))

    return replace(stack, w13=spread(stack.w13), w2=spread(stack.w2))


def named(tile: Tile) -> str:
    return f"{tile.rows} rows"


def close(backend: TritonExperts, stack: ExpertWeights, tokens: RowTokens, layout: type) -> None:
    reference, given = ReferenceExperts(backend.context), permute(tokens, (layout,))
    given = _poisoned(given) if isinstance(given, BatchedTokens) else given
    got = weight_and_reduce(backend.run(given, backend.relayout(stack)), given, OutputStage.REDUCED).y
    expected = weight_and_reduce(reference.run(tokens, stack), tokens, OutputStage.REDUCED).y
    error = experts_error(BF16, backend.context.compute, stack.scheme, HIDDEN)
    require_close(got.float(), expected.float(), error, f"{layout.__name__}, {len(tokens.ids_RK)} rows")


def of_tile(tile: Tile, scheme: QuantScheme = FP8_1x128, **more: Any) -> TritonExperts:
    backend = TritonExperts(replace(context(scheme), hidden_size=HIDDEN, intermediate_size=INNER, **more))
    backend.tuned = Tuned.fixed(tile)
    return backend


@pytest.mark.parametrize("layout", [RowTokens, GroupedTokens, BatchedTokens])
@pytest.mark.parametrize("tile", TILES, ids=named)
def test_every_tile_equals_the_reference(tile: Tile, layout: type) -> None:
    for rows in (5, 2 * tile.rows):
        close(of_tile(tile), stacked(), drawn(rows, 2), layout)


@pytest.mark.parametrize("tile", TILES, ids=named)
def test_scales_of_one_byte_and_clamps_equal_the_reference(tile: Tile) -> None:
    backend = of_tile(tile, FP8_1x128_UE8M0, activation="swiglu_limit", swiglu_limit=0.7)
    close(backend, stacked(FP8_128x128_UE8M0), drawn(tile.rows + 5, 2, FP8_1x128_UE8M0), RowTokens)


@pytest.mark.parametrize("rows", [1, 7, 90])
@pytest.mark.parametrize("tile", TILES, ids=named)
def test_one_expert_a_row_has_the_bits_of_a_sum_and_zeros_where_there_is_none(tile: Tile, rows: int) -> None:
    """An output in f32 is written by `combine`; nothing else differs. Zeros times a weight below 0 are -0."""
    backend, stack, tokens = of_tile(tile), stacked(), drawn(rows, 1)
    stack.w2.values.view(torch.uint8)[:, :5] = 0
    weights = backend.relayout(stack)
    for ids in (tokens.ids_RK, torch.full_like(tokens.ids_RK, -1)):
        given = replace(tokens, ids_RK=ids, weights_RK=-tokens.weights_RK)
        outs = [torch.full((rows, HIDDEN), torch.nan, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
        direct, summed = (backend.run(replace(given, out_RH=out), weights).y for out in outs)
        assert bits_of(direct) == bits_of(summed.bfloat16()) and torch.equal(summed, summed.bfloat16().float())
        assert not direct[ids[:, 0] < 0].any() and (direct.any(1) == (ids[:, 0] >= 0)).all()
