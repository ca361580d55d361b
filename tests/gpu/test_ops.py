"""The small kernels on a GPU against the reference on a CPU, on inputs drawn afresh in every run."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from moe_mk.kernels.reference import quantize as reference
from moe_mk.kernels.reference.topk import grouped_topk as reference_grouped_topk

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh_inputs(record_property: pytest.RecordProperty) -> None:
    """Another seed each run, written into the report so that a failure can be repeated."""
    record_property("seed", torch.seed())


def bits(x: Tensor) -> Tensor:
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.row(98)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rows,hidden", [(1, 7168), (33, 7168), (5, 192), (0, 128), (4096, 2048)])
def test_a_gpu_quantises_bit_for_bit_like_a_cpu(rows: int, hidden: int, power_of_two: bool) -> None:
    from moe_mk.kernels.triton.quantize_rows import quantize_rows_into

    x = (torch.randn(rows, hidden) * 10.0 ** torch.randint(-6, 5, (rows, 1))).bfloat16()
    expected, expected_scales = reference.quantize_rows(x, 128, power_of_two=power_of_two)
    values, scales = torch.empty_like(expected, device=CUDA), torch.empty_like(expected_scales, device=CUDA)
    quantize_rows_into(x.to(CUDA), values, scales, 128, power_of_two=power_of_two)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(bits(values), bits(expected))


@pytest.mark.row(69)
@pytest.mark.parametrize("tokens,hidden,experts", [(1, 7168, 256), (7, 2880, 128), (16, 7168, 384)])
def test_the_gate_of_few_tokens_sums_exact_products(tokens: int, hidden: int, experts: int) -> None:
    from moe_mk.kernels.triton.gate_logits import gate_logits

    x, weight = torch.randn(tokens, hidden).bfloat16(), torch.randn(experts, hidden).bfloat16()
    logits = gate_logits(x.to(CUDA), weight.to(CUDA))
    limit = hidden * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
    assert bool(((logits.cpu() - x.double() @ weight.double().T).abs() <= limit).all())
    assert torch.equal(logits, gate_logits(x.to(CUDA), weight.to(CUDA)))


@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_routing_equals_the_reference_where_scores_are_apart(tokens: int) -> None:
    from moe_mk.kernels.triton.topk import grouped_topk

    logits, bias = torch.randn(tokens, 256), torch.randn(256) * 0.1
    given = (8, 8, 4, "sigmoid")
    weights, ids, _ = grouped_topk(logits.to(CUDA), *given, bias.to(CUDA), True, 2.5, torch.float32)
    expected_weights, expected_ids = reference_grouped_topk(logits, *given, bias, True, 2.5, torch.float32)
    same = (ids.cpu().sort(1).values == expected_ids.sort(1).values).all(1)
    assert float((~same).float().mean()) <= 1e-3, "an exp that differs in its last bit may swap two scores, rarely"
    together, expected = ids.cpu().sort(1), expected_ids.sort(1)
    got = weights.cpu().gather(1, together.indices)[same]
    torch.testing.assert_close(got, expected_weights.gather(1, expected.indices)[same], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    "tokens,slots,tile", [(1, 256, 16), (128, 256, 16), (129, 32, 64), (16384, 256, 128), (0, 8, 16)]
)
def test_assignments_are_sorted_on_the_device(tokens: int, slots: int, tile: int) -> None:
    from moe_mk.kernels.triton.align import align

    ids = torch.randint(-1, slots, (tokens, 8), dtype=torch.int32)
    aligned, flat = align(ids.to(CUDA), slots, tile), ids.flatten()
    kept = int((flat >= 0).sum())
    expected = torch.argsort(torch.where(flat < 0, slots, flat), stable=True)[:kept].int()
    assert torch.equal(aligned.order_N[:kept].cpu(), expected)
    counts = torch.bincount(flat[flat >= 0].long(), minlength=slots).tolist()
    firsts = list(accumulate(counts[:-1], initial=0))
    tiles = [
        (slot, first, firsts[slot] + counts[slot])
        for slot in range(slots)
        for first in range(firsts[slot], firsts[slot] + counts[slot], tile)
    ]
    found = aligned.tiles.tiles_3X.cpu().T[: int(aligned.tiles.count)].tolist()
    assert [tuple(each) for each in found] == tiles


def test_sums_go_in_order_and_dropped_rows_are_not_read() -> None:
    from moe_mk.kernels.triton.experts import combine
    from moe_mk.permute import reduce_rows

    ids = torch.randint(-1, 4, (300, 8), dtype=torch.int32, device=CUDA)
    y = torch.randn(2400, 7168, device=CUDA).bfloat16()
    y[ids.flatten() < 0] = float("nan")
    total = torch.zeros(300, 7168, device=CUDA)
    for k in range(8):
        total += torch.where(ids[:, k, None] >= 0, y.view(300, 8, -1)[:, k].float(), 0.0)
    assert torch.equal(combine(y, ids), total.bfloat16())
    kept = torch.nonzero(ids.flatten() >= 0).flatten()
    rows = [reduce_rows(y[kept], None, kept // 8, 300) for _ in range(3)]
    assert all(torch.equal(each, rows[0]) for each in rows), "equal inputs, equal bits"
    assert torch.equal(rows[0], total.bfloat16())
