"""Who permutes, and who weighs and sums: by hand, undone for random maps, as a matrix, and never from padding."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.comm.single import SingleRank
from moe_mk.errors import ShapeError
from moe_mk.experts.base import FusedExperts
from moe_mk.experts.paged import slots_of_rows
from moe_mk.flight import Flight, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.permute import (
    batch,
    can_permute,
    group,
    permute,
    places,
    reduce_rows,
    sum_in_order,
    weight_and_reduce,
)
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.quant import FP32, FP8_1x128, FP8_1x128_UE8M0, QuantScheme
from moe_mk.router import topk
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, Routing, RowTokens, Tokens
from moe_mk.weights.expert_weights import ExpertWeights

RAW, WEIGHTED, REDUCED = OutputStage.RAW, OutputStage.WEIGHTED, OutputStage.REDUCED
LAYOUTS = [GroupedTokens, BatchedTokens]
# (r0: e1 e0) (r1: e0 -1) (r2: e1 e0)
EXAMPLE = [[1, 0], [0, -1], [1, 0]]


def rows(ids: list[list[int]], num_slots: int, scheme: QuantScheme = FP32, hidden: int = 4) -> RowTokens:
    """Row r is all r + 1; assignment k of row r weighs (r + 1) / 10 + k, and nothing where it goes nowhere."""
    ids_RK = torch.tensor(ids, dtype=torch.int32).view(len(ids), -1)
    x_RH = torch.arange(1, len(ids) + 1, dtype=torch.float32)[:, None].expand(-1, hidden).contiguous()
    weights_RK = torch.arange(1, len(ids) + 1)[:, None] / 10 + torch.arange(ids_RK.shape[1])
    return RowTokens(scheme.quantize(x_RH), ids_RK, torch.where(ids_RK >= 0, weights_RK, 0.0), num_slots, handle="home")


@st.composite
def random_rows(draw: st.DrawFn) -> RowTokens:
    """Any map of up to 12 rows to up to 6 experts: empty experts, dropped assignments and no rows included."""
    num_slots, num_rows, top_k = draw(st.integers(1, 6)), draw(st.integers(0, 12)), draw(st.integers(1, 4))
    ids = [[draw(st.integers(-1, num_slots - 1)) for _ in range(top_k)] for _ in range(num_rows)]
    tokens = rows(ids, num_slots) if ids else rows_of_nothing(num_slots, top_k)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x_RH = torch.randn(num_rows, 4, generator=generator)
    return RowTokens(FP32.quantize(x_RH), tokens.ids_RK, tokens.weights_RK, num_slots)


def rows_of_nothing(num_slots: int, top_k: int = 2) -> RowTokens:
    empty = torch.empty(0, top_k)
    return RowTokens(FP32.quantize(torch.empty(0, 4)), empty.int(), empty.float(), num_slots)


def loop(tokens: RowTokens, y_of: dict[tuple[int, int], Tensor], *, weigh: bool = True) -> Tensor:
    """Sum of the outputs of each row, one assignment after the other, in f64."""
    total = torch.zeros(*tokens.x_RH.shape, dtype=torch.float64)
    for r, ids in enumerate(tokens.ids_RK.tolist()):
        for k, expert in enumerate(ids):
            if expert >= 0:
                total[r] += y_of[r, expert].double() * (float(tokens.weights_RK[r, k]) if weigh else 1.0)
    return total


def blocks(tokens: Tokens) -> Tensor:
    """The blocks of a batch with NaN wherever nothing may look."""
    assert isinstance(tokens, BatchedTokens)
    y = tokens.x_LSH.values.clone()
    for expert, count in enumerate(tokens.counts_L.tolist()):
        y[expert, count:] = float("nan")
    return y


@pytest.mark.row(21)
@settings(max_examples=200)
@given(random_rows())
def test_permutation_is_stable_and_can_be_undone(tokens: RowTokens) -> None:
    grouped = group(tokens)
    ids = tokens.ids_RK.tolist()
    expected = [(e, r) for e in range(tokens.num_slots) for r, chosen in enumerate(ids) for c in chosen if c == e]
    expert_N, place_N = places(grouped.counts_L)
    assert list(zip(expert_N.tolist(), grouped.row_N.tolist(), strict=True)) == expected
    assert grouped.counts_L.tolist() == [sum(e == expert for e, _ in expected) for expert in range(tokens.num_slots)]
    # Undone: writing each assignment's row back at its number gives the rows that go anywhere.
    back = torch.zeros_like(tokens.x_RH.values)
    back[grouped.row_N] = grouped.x_NH.values
    travels = (tokens.ids_RK >= 0).any(dim=1)
    assert torch.equal(back[travels], tokens.x_RH.values[travels]) and not back[~travels].any()
    # And a batch is the same assignments, each at its place in the block of its expert.
    batched = batch(grouped)
    assert torch.equal(batched.x_LSH.values[expert_N, place_N], grouped.x_NH.values)
    assert batched.home is not None and torch.equal(batched.home.row_LS[expert_N, place_N], grouped.row_N)
    assert int((batched.home.row_LS >= 0).sum()) == len(expected)


@pytest.mark.row(22)
@given(random_rows())
def test_permutation_is_a_matrix_product(tokens: RowTokens) -> None:
    # One row an assignment (r, k) that goes somewhere, in order: S copies each row to its assignments, P sorts them.
    kept = [(r, k) for r, ids in enumerate(tokens.ids_RK.tolist()) for k, expert in enumerate(ids) if expert >= 0]
    copies = torch.zeros(len(kept), tokens.x_RH.shape[0])
    permutation = torch.zeros(len(kept), len(kept))
    by_expert = sorted(range(len(kept)), key=lambda n: int(tokens.ids_RK[kept[n]]))  # sorted() is stable
    for n, (r, _) in enumerate(kept):
        copies[n, r] = 1
        permutation[by_expert.index(n), n] = 1
    assert torch.equal(permutation.T @ permutation, torch.eye(len(kept)))
    grouped = group(tokens)
    assert torch.equal(permutation @ copies @ tokens.x_RH.values, grouped.x_NH.values)
    # The way back is its transpose, weighed.
    combined = copies.T @ permutation.T @ (grouped.weights_N[:, None] * grouped.x_NH.values)
    reduced = weight_and_reduce(ExpertOutput(grouped.x_NH.values, RAW), grouped, until=REDUCED)
    torch.testing.assert_close(reduced.y, combined, rtol=1e-5, atol=1e-5)


@given(random_rows(), st.sampled_from(LAYOUTS), st.sampled_from([RAW, WEIGHTED]))
def test_weight_and_reduce_is_a_loop_over_assignments(tokens: RowTokens, layout: type, stage: OutputStage) -> None:
    # Expert e multiplies by e + 1; padding is NaN, and nothing of it may arrive.
    local = permute(tokens, into=[layout])
    y_of = {
        (r, e): tokens.x_RH.values[r] * (e + 1) for r, ids in enumerate(tokens.ids_RK.tolist()) for e in ids if e >= 0
    }
    if isinstance(local, GroupedTokens):
        y = local.x_NH.values * (places(local.counts_L)[0] + 1)[:, None]
    else:
        y = blocks(local) * torch.arange(1, tokens.num_slots + 1)[:, None, None]
    output = ExpertOutput(y, stage)
    reduced = weight_and_reduce(output, local, until=REDUCED)
    expected = loop(tokens, y_of, weigh=stage is RAW)
    assert reduced.y.shape == tokens.x_RH.shape
    torch.testing.assert_close(reduced.y.double(), expected, rtol=1e-5, atol=1e-5)
    if stage is RAW:  # in two steps as in one
        weighted = weight_and_reduce(output, local, until=WEIGHTED)
        assert weighted.stage is WEIGHTED and weighted.y.shape == y.shape
        twice = weight_and_reduce(weighted, local, until=REDUCED)
        assert torch.equal(twice.y, reduced.y)


@pytest.mark.parametrize("scheme", [FP32, FP8_1x128, FP8_1x128_UE8M0], ids=lambda s: s.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_go_with_their_rows(layout: type, scheme: QuantScheme) -> None:
    tokens = rows(EXAMPLE, 2, scheme, hidden=300)
    plain = tokens.x_RH.dequantize(torch.float32)
    local = permute(tokens, into=[layout])
    if isinstance(local, GroupedTokens):
        assert torch.equal(local.x_NH.dequantize(torch.float32), plain[local.row_N])
    else:
        assert isinstance(local, BatchedTokens) and local.x_LSH.scheme == scheme
        back = local.x_LSH.dequantize(torch.float32)
        assert torch.equal(back[0], plain) and torch.equal(back[1, :2], plain[[0, 2]])


def test_sums_run_in_f32_and_are_rounded_once() -> None:
    # bf16 spacing above 256 is 2: 256 + 1 + 1 + 1 is 256 in bf16, 259 in f32, 260 when rounded to even.
    y = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert reduce_rows(y, None, torch.zeros(4, dtype=torch.int64), 1).tolist() == [[260.0]]
    assert reduce_rows(y, torch.full((4,), 0.5), torch.tensor([1, 0, 0, 0]), 2).tolist() == [[1.5], [128.0]]


def test_a_layout_that_is_read_already_stays_as_it_is() -> None:
    tokens = rows(EXAMPLE, 2)
    grouped = group(tokens)
    batched = batch(grouped)
    assert permute(tokens, into=[GroupedTokens, RowTokens]) is tokens
    assert permute(grouped, into=[GroupedTokens]) is grouped and permute(batched, into=[BatchedTokens]) is batched
    assert isinstance(permute(tokens, into=[BatchedTokens, GroupedTokens]), BatchedTokens)


@pytest.mark.parametrize("produced", [RowTokens, *LAYOUTS])
@pytest.mark.parametrize("consumed", [RowTokens, *LAYOUTS])
def test_only_rows_can_become_another_layout(produced: type, consumed: type) -> None:
    tokens: Tokens = rows(EXAMPLE, 2)
    if produced is not RowTokens:
        tokens = permute(tokens, into=[produced])
    if can_permute(produced, consumed):
        assert isinstance(permute(tokens, into=[consumed]), consumed)
    else:
        with pytest.raises(AssertionError, match="tokens cannot be permuted; the oracle refuses this"):
            permute(tokens, into=[consumed])


@pytest.mark.parametrize("stage, until", [(WEIGHTED, RAW), (REDUCED, RAW), (REDUCED, WEIGHTED)])
def test_a_stage_is_never_undone(stage: OutputStage, until: OutputStage) -> None:
    grouped = group(rows(EXAMPLE, 2))
    with pytest.raises(AssertionError, match=f"{stage.name} output cannot go back to {until.name}"):
        weight_and_reduce(ExpertOutput(grouped.x_NH.values, stage), grouped, until)


@pytest.mark.parametrize("stage", list(OutputStage))
def test_a_stage_that_is_reached_needs_nothing(stage: OutputStage) -> None:
    tokens = rows(EXAMPLE, 2)
    output = ExpertOutput(tokens.x_RH.values, stage)
    assert weight_and_reduce(output, tokens, stage) is output


def test_a_batch_without_a_way_home_must_go_home_raw() -> None:
    batched = batch(group(rows(EXAMPLE, 2)))
    homeless = BatchedTokens(batched.x_LSH, batched.counts_L, home=None)
    raw = ExpertOutput(batched.x_LSH.values, RAW)
    assert weight_and_reduce(raw, homeless, until=RAW) is raw
    with pytest.raises(AssertionError):
        weight_and_reduce(raw, homeless, until=REDUCED)


class Here:
    """A transport that goes nowhere."""

    traits = SimpleNamespace(wants=REDUCED)
    context = SimpleNamespace(comm=SingleRank())

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        yield from ()
        return RowTokens(FP32.quantize(x_TH), routing.ids_TK, routing.weights_TK, 4)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        yield from ()
        return output.y


class OneMatrixEach:
    """Experts of one matrix, over rows sorted by expert."""

    traits = SimpleNamespace(consumes=(GroupedTokens,))

    def __call__(self, tokens: Tokens, weights: ExpertWeights) -> ExpertOutput:
        assert isinstance(tokens, GroupedTokens)
        matrices = weights.w2.values[places(tokens.counts_L)[0]]
        return ExpertOutput(torch.einsum("nh,nhi->ni", tokens.x_NH.values, matrices), RAW)


@pytest.mark.row(19)
def test_the_four_stages_by_hand_are_one_forward() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TH, logits_TE = torch.randn(9, 8, generator=generator), torch.randn(9, 4, generator=generator)
    stack = FP32.quantize(torch.randn(4, 8, 8, generator=generator))
    weights = ExpertWeights(stack, stack)
    kernel = FusedMoEKernel(cast(PrepareFinalize, Here()), cast(FusedExperts, OneMatrixEach()))

    weights_TK, ids_TK = topk(logits_TE, 2)  # routing
    grouped = group(RowTokens(FP32.quantize(x_TH), ids_TK, weights_TK, 4))  # permutation
    output = OneMatrixEach()(grouped, weights)  # computation
    by_hand = weight_and_reduce(output, grouped, until=REDUCED).y  # un-permutation

    assert torch.equal(by_hand, wait(kernel.steps(x_TH, Routing(ids_TK, weights_TK), weights)))
    for t in range(9):
        expected = sum(w * (x_TH[t] @ stack.values[e]) for w, e in zip(weights_TK[t], ids_TK[t].long(), strict=True))
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(by_hand[t], expected, rtol=1e-5, atol=1e-5)


def test_sums_without_atomics_are_those_of_index_add_bit_for_bit() -> None:
    # Row 1: rows 0 and 2 of y, in this order; row 0: row 1; row 2: none.
    y = torch.tensor([[1.0], [2.0], [4.0]])
    assert sum_in_order(y, torch.tensor([1, 0, 1]), 3).tolist() == [[2.0], [5.0], [0.0]]
    assert sum_in_order(torch.empty((0, 2)), torch.empty((0,), dtype=torch.int64), 0).shape == (0, 2)
    rows, wide = torch.randint(0, 5, (200,)), torch.randn(200, 9) * 10.0 ** torch.randint(-6, 6, (200, 1))
    assert torch.equal(sum_in_order(wide, rows, 7), torch.zeros((7, 9)).index_add_(0, rows, wide))


def test_rows_of_groups_and_blocks_have_the_slots_that_the_counts_state() -> None:
    counts = torch.tensor([2, 0, 1])
    assert slots_of_rows(counts, torch.empty(4, 8)).tolist() == [[0], [0], [2], [-1]]
    assert slots_of_rows(counts, torch.empty(3, 2, 8)).tolist() == [[0], [0], [-1], [-1], [2], [-1]]
    with pytest.raises(ShapeError, match="sums to 3, but there are 2 rows"):
        slots_of_rows(counts, torch.empty(2, 8))
