"""Every type of weights on a GPU: the conformance kit, DeepSeek-V3's own sizes at every tile, shared experts beside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_mk.experts.triton.tuning import DECODED, DECODED_TO_FP8
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.testing.conformance import check_experts
from moe_mk.lab.testing.experts import random_experts
from moe_mk.quant import BF16, FP8_1x128, FP8_1x128_UE8M0, FP8_128x128, QuantScheme
from moe_mk.quant.int8 import INT8_CHANNEL, INT8_TOKEN, INT8_128x128
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import NVFP4
from moe_mk.weights.expert_weights import MappedExpertWeights
from tests.gpu.test_experts import CUDA, HIDDEN, INNER, build, check, draw, of_tile
from tests.support.mxfp4 import products_with_ones, wide_matrix

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]
DECODED_TYPES = (FP8_128x128, INT8_CHANNEL, INT8_128x128, MXFP8, MXFP4, NVFP4)
TYPES = [(INT8_CHANNEL, INT8_TOKEN), (INT8_128x128, INT8_TOKEN), (MXFP4, FP8_1x128)]
TYPES += [(weights, BF16) for weights in DECODED_TYPES]


def named(value: object) -> str:
    return getattr(value, "name", None) or f"{getattr(value, 'rows', value)} rows"


@pytest.fixture(autouse=True)
def fresh_inputs(record_property: pytest.RecordProperty) -> None:
    record_property("seed", torch.seed())


@pytest.mark.parametrize("weights,compute", TYPES, ids=named)
def test_the_conformance_kit(weights: QuantScheme, compute: QuantScheme) -> None:
    assert check_experts("triton", weights, dtype=BF16, compute=compute, device=CUDA) >= 78


@pytest.mark.parametrize("tile", [tile for _, tile in DECODED], ids=named)
@pytest.mark.parametrize("weights,compute", TYPES, ids=named)
def test_every_tile_at_the_sizes_of_deepseek_v3(weights: QuantScheme, compute: QuantScheme, tile: Tile) -> None:
    stack, rows = random_experts(weights, 8, HIDDEN, INNER, CUDA), draw(64, 8, 4)
    check(of_tile(build(compute, 8), tile), stack, rows, rows)


@pytest.mark.parametrize("tile", [tile for _, tile in DECODED_TO_FP8], ids=named)
def test_fp8_times_mxfp4_is_exact_at_every_tile(tile: Tile) -> None:
    q = wide_matrix(320, 1040)
    assert torch.equal(products_with_ones(q, tile, CUDA).cpu(), q.dequantize(torch.float32).T)
    rows, stack = draw(300, 4, 2, 1040), random_experts(MXFP4, 4, 1040, 512, CUDA)
    for compute in (FP8_1x128, FP8_1x128_UE8M0):
        given = replace(rows, x_RH=compute.quantize(rows.x_RH.values))
        check(of_tile(build(compute, 4, 1040, 512), tile), stack, given, given)


@pytest.mark.parametrize("weights,compute", [(MXFP4, BF16), (MXFP4, FP8_1x128), (INT8_CHANNEL, INT8_TOKEN)], ids=named)
def test_the_smallest_tile_at_the_sizes_of_deepseek_v3(weights: QuantScheme, compute: QuantScheme) -> None:
    stack, rows = random_experts(weights, 8, HIDDEN, INNER, CUDA), draw(64, 8, 4)
    check(of_tile(build(compute, 8), DECODED[0][1]), stack, rows, rows)


@pytest.mark.parametrize("weights,compute", [(FP8_128x128, FP8_1x128), (MXFP4, FP8_1x128), (MXFP4, BF16)], ids=named)
def test_shared_experts_join_the_same_pass(weights: QuantScheme, compute: QuantScheme) -> None:
    inner = INNER // 8
    stack, rows = random_experts(weights, 33, HIDDEN, inner, CUDA), draw(16, 32, 4)
    every = [stack.slot(index) for index in range(33)]
    backend, lone = build(compute, 32, inner=inner), build(compute, 1, inner=inner)
    routed = backend.relayout(MappedExpertWeights(every[:32], weights))
    shared = lone.relayout(MappedExpertWeights(every[32:], weights))
    both = backend.fuse_shared_experts(routed, shared)
    assert both is not None
    nought, ones = torch.zeros((16, 1), dtype=torch.int32, device=CUDA), torch.ones((16, 1), device=CUDA)
    one = replace(rows, ids_RK=nought, num_slots=1, weights_RK=ones)
    expected = backend.run(rows, routed).y.float() + lone.run(one, shared).y.float()
    got = backend.run(rows, both).y.float()
    assert float((got - expected).norm() / expected.norm()) < 0.01
