"""FP8 times MXFP4 on tiny shapes; run by test_interpreted.py with TRITON_INTERPRET=1."""

from dataclasses import replace

import pytest
import torch

from moe_mk.config.tuned import Tuned
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.experts.triton.tuning import DECODED_TO_FP8
from moe_mk.kernels.reference.activation import activation
from moe_mk.kernels.triton.grouped_w13 import grouped_w13
from moe_mk.kernels.triton.tile import Tile
from moe_mk.kernels.triton.tile_map import tile_map
from moe_mk.lab.testing.experts import random_experts
from moe_mk.quant import BF16, FP8_1x128, FP8_1x128_UE8M0, QuantScheme, QuantTensor
from moe_mk.quant.microscaling import MXFP4
from moe_mk.tokens import BatchedTokens, GroupedTokens, RowTokens
from moe_mk.weights.expert_weights import ExpertWeights
from tests.kernels.triton.interpreted_experts import CPU, HIDDEN, INNER, SLOTS, close, context, rows
from tests.support.mxfp4 import packed, products_with_ones, wide_matrix

TILES = [tile for _, tile in DECODED_TO_FP8]


def sized(tile: Tile) -> str:
    return f"{tile.rows} rows"


@pytest.mark.parametrize("layout", [RowTokens, GroupedTokens, BatchedTokens])
@pytest.mark.parametrize(
    "compute,travelled",
    [(FP8_1x128, FP8_1x128), (FP8_1x128_UE8M0, FP8_1x128_UE8M0), (FP8_1x128, BF16)],
    ids=["fp8", "ue8m0", "rounded on arrival"],
)
def test_every_layout_equals_the_reference(layout: type, compute: QuantScheme, travelled: QuantScheme) -> None:
    backend = TritonExperts(context(compute))
    close(backend, MXFP4, rows(travelled), layout, random_experts(MXFP4, SLOTS, HIDDEN, INNER, CPU))
    assert backend.parameters() == "MXFP4 weights are multiplied as FP8, exactly"


@pytest.mark.parametrize("layout", [RowTokens, GroupedTokens])
@pytest.mark.parametrize("tile", TILES, ids=sized)
def test_every_tile_equals_the_reference(tile: Tile, layout: type) -> None:
    backend = TritonExperts(context(FP8_1x128))
    backend.tuned = Tuned.fixed(tile)
    close(backend, MXFP4, rows(FP8_1x128), layout, random_experts(MXFP4, SLOTS, HIDDEN, INNER, CPU))


@pytest.mark.parametrize("tile", [TILES[0], TILES[2]], ids=["weights left", "weights right"])
def test_every_code_under_every_shift_is_exact(tile: Tile) -> None:
    q = wide_matrix(192, 144)
    assert torch.equal(products_with_ones(q, tile, CPU), q.dequantize(torch.float32).T)


def test_the_smallest_and_the_largest_scale_are_exact() -> None:
    q = wide_matrix(128, 256, spread=0)
    codes = q.scales.view(torch.uint8)
    codes[:, :4], codes[:, 4:] = 0x00, 0xFE
    # 2 and more times 2^127 is beyond f32: only 0, 0.5, 1 and 1.5 under the largest scale.
    small = QuantTensor(q.values & 0xBB, q.scales, MXFP4)
    values = small.dequantize(torch.float32)
    assert values.isfinite().all() and values.abs().max() == 1.5 * 2.0**127 and values[:, :128].abs().max() > 0
    assert torch.equal(products_with_ones(small, TILES[0], CPU), values.T)


def hidden_rows(q: QuantTensor, x: QuantTensor, tile: Tile, *, gathered: bool) -> QuantTensor:
    """What the first GEMM makes of tokens; gate above up."""
    weights = packed(q, q, CPU)
    w13, num, inner = weights.w13, len(x.values), q.shape[0] // 2
    values, scales = torch.empty((num, inner), dtype=torch.float8_e4m3fn), torch.empty((num, inner // 128))
    grouped_w13(
        (x.values, x.scales), (w13.values, w13.scales), (values, scales),
        tile_map(torch.tensor([num]), num, tile.rows), tile, power_of_two=True, format=weights.format,
        row_scales=w13.blocks, order=torch.arange(num, dtype=torch.int32) if gathered else None,
    )  # fmt: skip
    return QuantTensor(values, scales.to(torch.float8_e8m0fnu), FP8_1x128_UE8M0)


def test_hidden_rows_have_the_same_bits_at_every_tile() -> None:
    """Small integers times four binades of weights: no sum is rounded, whatever its order."""
    q = wide_matrix(512, 272, spread=3, base=118)
    x = torch.randint(-2, 3, (20, 272), generator=torch.Generator().manual_seed(1)).float()
    quantised = FP8_1x128_UE8M0.quantize(x)
    found = [hidden_rows(q, quantised, tile, gathered=gathered) for tile in TILES for gathered in (False, True)]
    gate, up = (x.double() @ q.dequantize(torch.float64).T).chunk(2, dim=1)
    expected = FP8_1x128_UE8M0.quantize(activation("silu", gate.float(), up.float()))
    for each in found:
        assert torch.equal(each.values.view(torch.uint8), found[0].values.view(torch.uint8))
        assert torch.equal(each.scales.view(torch.uint8), expected.scales.view(torch.uint8))
        differing = each.values.view(torch.uint8) != expected.values.view(torch.uint8)
        assert differing.float().mean() < 0.01, "the exponential may round to the other side of a tie"


def with_a_small_group(stack: ExpertWeights) -> ExpertWeights:
    """The scale of one group of the last expert 2^12 times smaller than those around it."""
    scales = stack.w2.scales.clone().view(torch.uint8)
    scales[-1, 5, 1] = scales[-1, :, :].max() - 12
    return ExpertWeights(stack.w13, QuantTensor(stack.w2.values, scales.view(torch.float8_e8m0fnu), MXFP4))


@pytest.mark.parametrize("travelled", [BF16, FP8_1x128])
def test_weights_that_fp8_cannot_represent_are_decoded_to_bf16(travelled: QuantScheme) -> None:
    stack = with_a_small_group(random_experts(MXFP4, SLOTS, HIDDEN, INNER, CPU))
    backend, given = TritonExperts(context(FP8_1x128)), rows(travelled)
    close(backend, MXFP4, given, RowTokens, stack)
    assert backend.parameters() == (
        "MXFP4 weights are decoded to bf16, and activations are not rounded: scales within 128 x 128 weights differ by "
        "more than 2^11"
    )
    plain = TritonExperts(context(BF16))
    assert torch.equal(backend.run(given, backend.relayout(stack)).y, plain.run(given, plain.relayout(stack)).y), (
        "as weight-only experts do"
    )


@pytest.mark.parametrize("hidden,inner", [(HIDDEN, 96), (136, INNER)])
def test_sizes_of_no_whole_groups_are_decoded_to_bf16(hidden: int, inner: int) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    stack, found = random_experts(MXFP4, SLOTS, hidden, inner, CPU), []
    given = replace(rows(BF16), x_RH=BF16.quantize(rows(BF16).x_RH.values[:, :hidden].contiguous()))
    for compute in (FP8_1x128, BF16):
        backend = TritonExperts(replace(context(compute), **sizes))
        found.append(backend.run(given, backend.relayout(stack)).y)
        assert (f"a rank has {hidden} and {inner}" in backend.parameters()) == (compute is FP8_1x128)
    assert torch.equal(*found)
