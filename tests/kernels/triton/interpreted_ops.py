"""Small kernels on tiny shapes; run by test_interpreted.py with TRITON_INTERPRET=1."""

import pytest
import torch
from torch import Tensor

from moe_mk import permute
from moe_mk.kernels.reference import quantize as reference
from moe_mk.kernels.reference.activation import activation
from moe_mk.kernels.reference.topk import grouped_topk as reference_grouped_topk
from moe_mk.kernels.triton import align as align_module
from moe_mk.kernels.triton.align import SMALL, STEP, align
from moe_mk.kernels.triton.experts import combine
from moe_mk.kernels.triton.gate_logits import MOST_TOKENS, gate_logits
from moe_mk.kernels.triton.gate_logits import serves as gate_serves
from moe_mk.kernels.triton.permute import first_kept
from moe_mk.kernels.triton.quantize_rows import (
    activation_quantize,
    quantize_rows_into,
    quantize_tokens,
)
from moe_mk.kernels.triton.tile_map import TileMap, tile_map, worst_tiles
from moe_mk.kernels.triton.topk import grouped_topk, serves
from moe_mk.quant import BF16, FP8_1x128, FP8_1x128_UE8M0, QuantScheme
from moe_mk.quant.fp8 import FP8_TOKEN, fp8_static
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, RowTokens


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("scheme", [BF16, FP8_1x128, FP8_1x128_UE8M0], ids=lambda scheme: scheme.name)
def test_rows_are_grouped_and_summed_on_the_device_with_the_bits_of_the_host(
    scheme: QuantScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([[2, -1, 0], [-1, -1, -1], [0, 2, 3], [3, 0, -1]], dtype=torch.int32)
    weights, x = torch.rand(ids.shape).masked_fill(ids < 0, 0.0), torch.randn((4, 200)).bfloat16()
    for most_K, kept_ids in ((None, ids), (2, ids[[0, 1, 3]])):
        rows = slice(None) if most_K is None else torch.tensor([0, 1, 3])
        tokens = RowTokens(scheme.quantize(x[rows]), kept_ids, weights[rows], 5, most_K=most_K)
        expected = permute.permute(tokens, (GroupedTokens,))
        with monkeypatch.context() as patch:
            patch.setattr(permute, "has_kernels", lambda device: True)
            given = permute.permute(tokens, (GroupedTokens,))
        assert isinstance(given, GroupedTokens) and isinstance(expected, GroupedTokens)
        num = int(expected.counts_L.sum())
        assert given.x_NH.shape[0] == len(kept_ids) * (most_K or 3) > num, "sizes from shapes only"
        for name in ("counts_L", "row_N", "weights_N"):
            one, other = getattr(given, name), getattr(expected, name)
            assert one.dtype == other.dtype and torch.equal(one[: len(other)], other), name
        assert torch.equal(bits(given.x_NH.values[:num]), bits(expected.x_NH.values))
        if scheme is not BF16:
            assert torch.equal(bits(given.x_NH.scales[:num]), bits(expected.x_NH.scales))
        y = torch.randn((given.x_NH.shape[0], 40)).bfloat16()
        y[num:] = torch.nan
        for stage in (OutputStage.RAW, OutputStage.WEIGHTED):
            one, other = (
                permute.weight_and_reduce(ExpertOutput(part, stage), of, OutputStage.REDUCED).y
                for part, of in ((y, given), (y[:num], expected))
            )
            assert torch.equal(one, other), "sums in the order of positions"


def test_the_kept_assignments_of_a_row_come_first() -> None:
    ids = torch.tensor([[-1, 4, -1, 0, -1], [3, -1, -1, -1, -1], [-1] * 5, [-1, -1, -1, 1, 2]], dtype=torch.int32)
    weights = torch.arange(20, dtype=torch.float32).view(4, 5)
    found, shares = first_kept(ids, weights, 2)
    assert found.tolist() == [[4, 0], [3, -1], [-1, -1], [1, 2]]
    assert shares.tolist() == [[1.0, 3.0], [5.0, 0.0], [0.0, 0.0], [18.0, 19.0]]
    assert first_kept(ids[:0], weights[:0], 2)[0].shape == (0, 2)
    draw = torch.Generator().manual_seed(0)
    for rows, top_k, most in ((1, 3, 1), (33, 5, 2), (40, 8, 3), (7, 4, 4)):  # the last of more than that are lost
        ids = torch.randint(-1, 6, (rows, top_k), dtype=torch.int32, generator=draw)
        weights = torch.rand((rows, top_k), generator=draw)
        found, shares = first_kept(ids, weights, most)
        for row in range(rows):
            kept = [(i, w) for i, w in zip(ids[row].tolist(), weights[row].tolist(), strict=True) if i >= 0][:most]
            kept += [(-1, 0.0)] * (most - len(kept))
            assert list(zip(found[row].tolist(), shares[row].tolist(), strict=True)) == kept


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [1e4, 1.0, 1e-3, 1e-12])
def test_rows_are_quantised_bit_for_bit(size: float, power_of_two: bool) -> None:
    x = torch.randn(3, 200) * size  # one whole group of 128, one of 72
    x[0, :128] = 0.0
    x[1, 5] = 448.0 * size
    x[2, :4] = torch.tensor([-0.0, -1e-5, 1e-5, 0.0]) * size  # zeros keep their sign
    for given in (x, x.bfloat16()):
        values, scales = torch.empty((3, 200), dtype=torch.float8_e4m3fn), torch.empty((3, 2))
        quantize_rows_into(given, values, scales, 128, power_of_two=power_of_two)
        expected, expected_scales = reference.quantize_rows(given, 128, power_of_two=power_of_two)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(bits(values), bits(expected))


@pytest.mark.parametrize("size", [1e4, 1.0, 1e-3])
def test_rows_are_quantised_to_int8_bit_for_bit(size: float) -> None:
    x = torch.randn(4, 200) * size
    x[1] = 0.0
    x[2, :3] = torch.tensor([127.0, 2.5, -3.5]) * size  # ties go to even
    for given in (x, x.bfloat16()):
        expected = INT8_TOKEN.quantize(given)
        values, scales = torch.empty((4, 200), dtype=torch.int8), torch.empty((4, 1))
        quantize_tokens(given, values, scales)
        assert torch.equal(values, expected.values) and torch.equal(scales, expected.scales)


@pytest.mark.parametrize("fixed", [None, 0.02], ids=["found", "calibrated"])
@pytest.mark.parametrize("size", [1e4, 1.0, 1e-12])
def test_rows_are_quantised_to_fp8_under_one_scale_bit_for_bit(size: float, fixed: float | None) -> None:
    x = torch.randn(3, 200) * size
    x[1] = 0.0
    for given in (x, x.bfloat16()):
        expected = (FP8_TOKEN if fixed is None else fp8_static(fixed)).quantize(given)
        values, scales = torch.empty((3, 200), dtype=torch.float8_e4m3fn), torch.empty((3, 1))
        quantize_tokens(given, values, scales, fixed=fixed)
        reported = expected.scales if expected.scales is not None else torch.full((3, 1), 0.02)
        assert torch.equal(bits(values), bits(expected.values)) and torch.equal(scales, reported)


ACTIVATIONS: list[tuple[str, float, float | None]] = [
    *((name, 1.0, 0.5) for name in ("silu", "gelu", "gelu_tanh", "relu2")),  # take no notice of a limit
    ("swiglu_limit", 1.0, 0.7), ("swiglu_limit", 1.0, None), ("swiglu_oai", 1.702, 0.9), ("swiglu_oai", 0.5, None),
    ("silu_limit", 1.0, 0.2), ("silu_limit", 1.0, None), ("situ", 0.5, 0.9), ("situ", 0.5, None),
]  # fmt: skip
"""Names, slopes and limits, which many of the values are beyond."""


@pytest.mark.parametrize("name,alpha,limit", ACTIVATIONS)
def test_activation_and_quantisation_in_one_pass(name: str, alpha: float, limit: float | None) -> None:
    gate_up = torch.randn(3, 2 * 136).bfloat16()
    values, scales = activation_quantize(gate_up, name, 128, alpha=alpha, limit=limit)
    gate, up = gate_up.float().chunk(2, dim=1)
    hidden = activation(name, gate, up, alpha=alpha, limit=limit)
    expected, expected_scales = reference.quantize_rows(hidden, 128)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0.0)
    # The activation itself may differ in its last bit, which moves a value to the next code at most.
    assert int((bits(values).int() - bits(expected).int()).abs().max()) <= 1
    assert float((bits(values) != bits(expected)).float().mean()) < 0.02


ROUTERS = [
    pytest.param(4, 2, "sigmoid", True, True, torch.float32, id="DeepSeek-V3"),
    pytest.param(4, 2, "sigmoid", True, True, torch.bfloat16, id="scores in bf16"),
    pytest.param(3, 1, "softmax", False, False, torch.float32, id="DeepSeek-V2, three groups"),
    pytest.param(12, 5, "sigmoid", True, False, torch.float32, id="groups of one"),
    pytest.param(1, 1, "softmax", True, True, torch.float32, id="no groups"),
]


@pytest.mark.parametrize("groups,kept,scoring,biased,renormalize,dtype", ROUTERS)
def test_routing_equals_the_reference(
    groups: int, kept: int, scoring: str, biased: bool, renormalize: bool, dtype: torch.dtype
) -> None:
    logits = torch.randn(8, 12)
    logits[0] = 0.0  # all tied: the lowest ids win
    logits[1] = torch.tensor([100.0, -100.0] * 6)
    logits[2, 4] = float("nan")  # undecidable: goes nowhere
    bias = torch.randn(12) - 3.0 if biased else None  # kept scores may be negative
    if bias is not None:
        bias[7] = float("-inf")  # an expert that is switched off
    given = (logits, min(3, kept * (12 // groups)), groups, kept, scoring, bias, renormalize, 2.5, dtype)
    weights, ids, _ = grouped_topk(*given)
    expected_weights, expected_ids = reference_grouped_topk(*given)
    assert ids.tolist() == expected_ids.tolist()
    assert ids[2].unique().tolist() == [-1]
    assert grouped_topk(logits[:0], *given[1:])[1].shape == (0, given[1])
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routing_weights_are_within_one_ulp_of_f64(scoring: str, renormalize: bool) -> None:
    for scale in (1.0, 4.0, 30.0):
        logits = torch.randn(12, 64) * scale
        weights, ids, _ = grouped_topk(logits, 8, 1, 1, scoring, None, renormalize, 1.0, torch.float32)
        exact = logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()
        expected = exact.gather(1, ids.long())
        expected = expected / expected.sum(1, keepdim=True) if renormalize else expected
        unit = torch.nextafter(expected.float(), torch.tensor(torch.inf)) - expected.float()
        assert float(((weights.double() - expected).abs() / unit).max()) <= 1


@pytest.mark.parametrize("groups,kept,scoring,biased,renormalize,dtype", ROUTERS)
def test_choices_are_counted_and_placed_in_the_same_launch(
    groups: int, kept: int, scoring: str, biased: bool, renormalize: bool, dtype: torch.dtype
) -> None:
    logits, bias = torch.randn(9, 12), torch.randn(12) if biased else None
    logits[2, 4] = float("nan")
    given = (logits, min(3, kept * (12 // groups)), groups, kept, scoring, bias, renormalize, 2.5, dtype)
    physical_of_E, load_E = torch.randperm(12).int() + 100, torch.arange(12)
    weights, ids, physical = grouped_topk(*given, (load_E, physical_of_E))
    expected_weights, expected_ids, _ = grouped_topk(*given)
    assert torch.equal(weights, expected_weights) and torch.equal(ids, expected_ids)
    went = ids[ids >= 0].long()
    assert torch.equal(load_E, torch.arange(12) + torch.bincount(went, minlength=12))
    assert torch.equal(physical, torch.where(ids >= 0, physical_of_E[ids.clamp_min(0).long()], -1))
    assert physical.dtype == torch.int32 and physical[2].unique().tolist() == [-1]


def test_the_kernel_refuses_what_only_the_reference_computes() -> None:
    logits, f32 = torch.randn(2, 12), torch.float32
    assert serves(logits, 3, 4, "sigmoid", None, f32) and serves(logits, 3, 1, "softmax", logits[0], torch.float16)
    assert not serves(logits, 3, 1, "sqrtsoftplus", None, f32)
    assert not serves(logits, 3, 1, "sigmoid", None, torch.float16), "rounds scores to bf16 only"
    assert not serves(logits.T, 1, 1, "sigmoid", None, f32), "reads rows"
    assert not serves(logits, 3, 1, "sigmoid", logits[:, 0][:12], f32), "and a dense bias"
    assert not serves(torch.randn(1, 1025), 3, 1, "sigmoid", None, f32)
    assert not serves(torch.randn(1, 1023), 33, 1, "sigmoid", None, f32)
    trained = logits.clone().requires_grad_()
    assert not serves(trained, 3, 1, "sigmoid", None, f32), "has no gradient"
    with torch.no_grad():
        assert serves(trained, 3, 1, "sigmoid", None, f32)


def listed(tiles: TileMap) -> list[tuple[int, ...]]:
    return [tuple(column) for column in tiles.tiles_3X.T.tolist()[: int(tiles.count)]]


def test_assignments_are_sorted_and_cut_into_tiles() -> None:
    # Expert 0: assignments 1, 2 and 6; expert 2: 0 and 4; expert 1 has none, 3 and 5 go nowhere.
    ids = torch.tensor([[2, 0], [0, -1], [2, -1], [0, -1]], dtype=torch.int32)
    aligned = align(ids, 3, 2)
    assert aligned.order_N.tolist()[:5] == [1, 2, 6, 0, 4]
    assert listed(aligned.tiles) == [(0, 0, 3), (0, 2, 3), (2, 3, 5)]


@pytest.mark.parametrize("assignments", [0, 1, STEP, STEP + 1, 200, SMALL, SMALL + 1, 2 * SMALL + 77])
def test_both_ways_to_sort_keep_the_order_inside_an_expert(assignments: int) -> None:
    ids = torch.randint(-1, 5, (assignments, 1), dtype=torch.int32)
    aligned, flat = align(ids, 5, 64), ids.flatten()
    kept = int((flat >= 0).sum())
    assert torch.equal(aligned.order_N[:kept], torch.argsort(torch.where(flat < 0, 5, flat), stable=True)[:kept].int())
    counts = [int((flat == expert).sum()) for expert in range(5)]
    firsts = [sum(counts[:expert]) for expert in range(5)]
    expected = [
        (expert, first, firsts[expert] + counts[expert])
        for expert in range(5)
        for first in range(firsts[expert], firsts[expert] + counts[expert], 64)
    ]
    assert listed(aligned.tiles) == expected
    assert len(expected) <= worst_tiles(assignments, 5, 64) == aligned.tiles.tiles_3X.shape[1]


@pytest.mark.parametrize("rows,small", [(3, SMALL), (300, SMALL), (300, 8)], ids=["one step", "one program", "chunks"])
def test_every_row_may_visit_the_last_slot_as_well(rows: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two choices a row among slots 0 and 1; slot 2 is everybody's.
    ids = torch.randint(-1, 2, (rows, 2), dtype=torch.int32) if rows > 3 else torch.tensor([[1, -1], [-1, -1], [0, 1]])
    ids, weights = ids.int(), torch.rand(rows, 2)
    monkeypatch.setattr(align_module, "SMALL", small)
    aligned = align(ids, 3, 4, fuse_shared=weights)
    assert torch.equal(aligned.ids_RK, torch.cat((ids, torch.full((rows, 1), 2, dtype=torch.int32)), dim=1))
    assert aligned.weights_RK is not None
    assert torch.equal(aligned.weights_RK, torch.cat((weights, torch.ones(rows, 1)), dim=1))
    same = align(aligned.ids_RK, 3, 4)
    assert listed(aligned.tiles) == listed(same.tiles)
    kept = int((aligned.ids_RK >= 0).sum())
    assert torch.equal(aligned.order_N[:kept], same.order_N[:kept])


def test_tiles_of_counts() -> None:
    counts = torch.tensor([3, 0, 5])
    assert listed(tile_map(counts, 8, 4)) == [(0, 0, 3), (2, 3, 8), (2, 7, 8)]
    assert listed(tile_map(counts, 24, 4, block=8)) == [(0, 0, 3), (2, 16, 21), (2, 20, 21)]
    assert listed(tile_map(torch.zeros(3, dtype=torch.int64), 24, 4, block=8)) == []


def test_rows_return_in_order_and_dropped_ones_are_not_read() -> None:
    ids = torch.tensor([[0, -1], [1, 1], [-1, -1]], dtype=torch.int32)
    y = torch.tensor([[1.0], [torch.nan], [2.0], [3.0], [torch.nan], [torch.nan]])
    assert combine(y, ids).tolist() == [[1.0], [5.0], [0.0]]
    assert combine(y, ids, torch.tensor([[2.0, 9.0], [10.0, 1.0], [0.0, 0.0]])).tolist() == [[2.0], [23.0], [0.0]]
    out = torch.empty((3, 4))[:, :1]
    assert combine(y, ids, out=out) is out and out.tolist() == [[1.0], [5.0], [0.0]]
    wide = torch.randn(4 * 8, 1030).bfloat16()
    expected = wide.view(4, 8, -1).float().unbind(1)
    total = torch.zeros(4, 1030)
    for part in expected:
        total += part
    assert torch.equal(combine(wide, torch.zeros((4, 8), dtype=torch.int32)), total.bfloat16())


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("tokens,hidden,experts", [(1, 64, 3), (5, 700, 6), (16, 1100, 4), (0, 64, 3)])
def test_gate_logits_are_f32_sums_of_exact_products(
    tokens: int, hidden: int, experts: int, weight_dtype: torch.dtype
) -> None:
    x, weight = torch.randn(tokens, hidden).bfloat16(), torch.randn(experts, hidden).to(weight_dtype)
    logits = gate_logits(x, weight)
    assert logits.dtype == torch.float32 and logits.shape == (tokens, experts)
    exact = x.double() @ weight.double().T
    # Each of hidden additions, and each product of an f32 weight, errs by half an ulp of what it adds at most.
    limit = hidden * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
    assert bool(((logits - exact).abs() <= limit).all())
    wide = torch.randn(tokens, 2 * hidden).bfloat16()
    assert torch.equal(gate_logits(wide[:, :hidden], weight), gate_logits(wide[:, :hidden].contiguous(), weight))


def test_gate_logits_of_a_token_do_not_depend_on_the_others() -> None:
    x, weight = torch.randn(MOST_TOKENS, 600).bfloat16(), torch.randn(5, 600).bfloat16()
    whole = gate_logits(x, weight)
    other = x.clone()
    other[1:] = torch.nan
    assert torch.equal(gate_logits(other, weight)[0], whole[0])
    assert torch.equal(gate_logits(x[9:], weight), gate_logits(x[9:].clone(), weight))


def test_the_gate_serves_sixteen_tokens_of_dense_rows_without_a_gradient() -> None:
    x, weight = torch.randn(16, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    assert gate_serves(x, weight) and gate_serves(x, weight.float()) and gate_serves(x.float(), weight)
    assert not gate_serves(torch.cat((x, x[:1])), weight) and not gate_serves(x.T.contiguous().T, weight)
    assert not gate_serves(x.half(), weight) and not gate_serves(x, weight.half())
    assert not gate_serves(x.clone().requires_grad_(), weight)
    with torch.no_grad():
        assert gate_serves(x.clone().requires_grad_(), weight)
