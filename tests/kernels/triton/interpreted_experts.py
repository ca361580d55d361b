"""The experts backend on tiny shapes; run by test_interpreted.py with TRITON_INTERPRET=1."""

from dataclasses import replace
from threading import get_ident

import pytest
import torch

from moe_mk.config.tuned import Tuned
from moe_mk.experts import EXPERTS, ExpertsContext
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.experts.triton.workspace import Workspace
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.conformance import check_experts
from moe_mk.lab.testing.experts import _poisoned, random_experts
from moe_mk.lab.testing.limits import require_close
from moe_mk.oracle.expected_error import experts_error
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant import BF16, FP32, FP8_1x128, FP8_1x128_UE8M0, FP8_128x128, FP8_128x128_UE8M0, QuantScheme
from moe_mk.quant.plain import Plain
from moe_mk.tokens import BatchedTokens, GroupedTokens, OutputStage, RowTokens
from moe_mk.weights.expert_weights import ExpertWeights
from moe_mk.weights.layer_weights import as_mapped

CPU = torch.device("cpu")
HIDDEN, INNER, SLOTS = 144, 128, 3
"""Hidden ends 16 columns into a second block, the least that a box allows."""
IDS = torch.tensor([[2, 0], [-1, 2], [-1, -1], [2, -1], [0, 2]], dtype=torch.int32)
"""Expert 1 has no rows; assignments and a whole row go nowhere."""


def context(compute: QuantScheme, activation: str = "silu") -> ExpertsContext:
    return ExpertsContext(BF16, compute, activation, SLOTS, HIDDEN, INNER, CPU)


def rows(scheme: QuantScheme, ids: torch.Tensor = IDS) -> RowTokens:
    x_RH = torch.randn((len(ids), HIDDEN), generator=torch.Generator().manual_seed(5)).bfloat16()
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(6)).masked_fill(ids < 0, 0.0)
    return RowTokens(scheme.quantize(x_RH), ids, weights, SLOTS)


def close(backend: TritonExperts, weights: QuantScheme, tokens: RowTokens, layout: type, stack: ExpertWeights) -> None:
    compute = backend.context.compute
    exact = FP32 if isinstance(compute, Plain) else compute
    reference = ReferenceExperts(replace(backend.context, dtype=FP32, compute=exact))
    expected = weight_and_reduce(reference.run(tokens, stack), tokens, OutputStage.REDUCED).y
    given = permute(tokens, (layout,))
    given = _poisoned(given) if isinstance(given, BatchedTokens) else given
    got = weight_and_reduce(backend.run(given, backend.relayout(as_mapped(stack))), given, OutputStage.REDUCED).y
    assert got.dtype == torch.bfloat16
    error = experts_error(BF16, compute, weights, HIDDEN)
    require_close(got.float(), expected, error, f"{layout.__name__} {tokens.x_RH.scheme.name}")


@pytest.mark.parametrize("layout", [RowTokens, GroupedTokens, BatchedTokens])
@pytest.mark.parametrize(
    "weights,compute,travelled",
    [
        (FP8_128x128, FP8_1x128, FP8_1x128),
        (FP8_128x128_UE8M0, FP8_1x128_UE8M0, FP8_1x128_UE8M0),
        (FP8_128x128, FP8_1x128, BF16),
        (BF16, BF16, BF16),
    ],
    ids=["fp8", "ue8m0", "rounded on arrival", "bf16"],
)
def test_every_layout_in_every_format(
    layout: type, weights: QuantScheme, compute: QuantScheme, travelled: QuantScheme
) -> None:
    stack = random_experts(weights, SLOTS, HIDDEN, INNER, CPU)
    close(TritonExperts(context(compute)), weights, rows(travelled), layout, stack)


@pytest.mark.parametrize(
    "weights,compute,inner", [(FP8_128x128, FP8_1x128, 256), (BF16, BF16, 136)], ids=["two blocks", "a ragged block"]
)
def test_more_columns_than_a_tile_has(weights: QuantScheme, compute: QuantScheme, inner: int) -> None:
    backend = TritonExperts(replace(context(compute), intermediate_size=inner))
    close(backend, weights, rows(BF16), RowTokens, random_experts(weights, SLOTS, HIDDEN, inner, CPU))


@pytest.mark.parametrize(
    "tile", [Tile(32, True, 4, 4), Tile(16, False, 4, 4), Tile(64, False, 8, 4)], ids=["swapped", "narrow", "mid"]
)
def test_every_kind_of_tile(tile: Tile) -> None:
    backend = TritonExperts(context(FP8_1x128))
    backend.tuned = Tuned.fixed(tile)
    close(backend, FP8_128x128, rows(BF16), RowTokens, random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, CPU))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
def test_other_activations_and_experts_without_a_gate(activation: str) -> None:
    stack = random_experts(BF16, SLOTS, HIDDEN, INNER, CPU)
    ungated = ExpertWeights(replace(stack.w13, values=stack.w13.values[:, :INNER].contiguous()), stack.w2, gated=False)
    for weights in (stack, ungated) if activation == "relu2" else (stack,):
        close(TritonExperts(context(BF16, activation)), BF16, rows(BF16), RowTokens, weights)


def test_nothing_to_do_is_done() -> None:
    backend = TritonExperts(context(FP8_1x128))
    stack = backend.relayout(random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, CPU))
    for ids in (IDS[:0], torch.full_like(IDS, -1)):
        for layout in (RowTokens, GroupedTokens, BatchedTokens):
            given = permute(rows(BF16, ids), (layout,))
            y = weight_and_reduce(backend.run(given, stack), given, OutputStage.REDUCED).y
            assert y.shape == (len(ids), HIDDEN) and not y.any()


def test_runs_allocate_once_and_layers_share_what_was_allocated() -> None:
    workspace = Workspace()
    first, second = (TritonExperts(context(FP8_1x128), workspace) for _ in range(2))
    assert TritonExperts(context(FP8_1x128)).workspace is not workspace
    stack = first.relayout(random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, CPU))
    arena, results = workspace.arena((0, get_ident())), []
    for backend in (first, second, first):
        results.append(backend.run(rows(BF16), stack).y)
        if backend is first and len(results) == 1:
            after_one, bytes_of_one = arena.allocations, workspace.high_water
    assert list(workspace.arenas) == [(0, get_ident())] and after_one > 0 < bytes_of_one
    assert arena.allocations == after_one and workspace.high_water == bytes_of_one
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_rows_with_few_experts_here_take_a_workspace_of_their_size_and_give_the_same_bits() -> None:
    """A window of a wide group: 8 ids a row, of which at most one is of this rank's."""
    ids = torch.full((24, 8), -1, dtype=torch.int32)
    ids[torch.arange(20), torch.arange(20) % 8] = torch.arange(20, dtype=torch.int32) % SLOTS
    given, stack, taken, results = rows(BF16, ids), random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, CPU), [], []
    for most_K in (None, 1):
        workspace = Workspace()
        backend = TritonExperts(context(FP8_1x128), workspace)
        backend.tuned = Tuned.fixed(Tile(16, True, 4, 3))
        results.append(backend.run(replace(given, most_K=most_K), backend.relayout(stack)).y)
        taken.append(workspace.high_water)
    assert torch.equal(*results) and 5 * taken[1] < taken[0]


def test_a_row_gets_the_same_bits_in_any_company() -> None:
    backend = TritonExperts(replace(context(FP8_1x128), batch_invariant=True))
    stack, many = backend.relayout(random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, CPU)), rows(BF16)
    together = backend.run(many, stack).y
    for row in (0, 3):
        alone = replace(many, x_RH=many.x_RH[torch.tensor([row])], ids_RK=many.ids_RK[row : row + 1],
                        weights_RK=many.weights_RK[row : row + 1])  # fmt: skip
        assert torch.equal(backend.run(alone, stack).y[0], together[row])


def test_the_output_goes_where_the_transport_wants_it() -> None:
    backend = TritonExperts(context(FP8_1x128))
    stack = backend.relayout(random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, CPU))
    out = torch.full((len(IDS), HIDDEN), torch.nan, dtype=torch.bfloat16)
    y = backend.run(replace(rows(BF16), out_RH=out), stack).y
    assert y.data_ptr() == out.data_ptr() and torch.equal(out, backend.run(rows(BF16), stack).y)


ONE = torch.tensor([[2], [-1], [0], [2], [-1], [0], [2]], dtype=torch.int32)


@pytest.mark.parametrize(
    "weights,compute,travelled,ids",
    [
        (FP8_128x128, FP8_1x128, BF16, ONE),
        (BF16, BF16, BF16, ONE),
        *((FP8_128x128, FP8_1x128, FP8_1x128, ids) for ids in (ONE, ONE.abs() % 3, torch.full_like(ONE, -1))),
    ],
    ids=["rounded on arrival", "bf16", "fp8", "all kept", "all dropped"],
)
def test_one_expert_a_row_has_the_bits_of_a_sum_and_zeros_where_there_is_none(
    weights: QuantScheme, compute: QuantScheme, travelled: QuantScheme, ids: torch.Tensor
) -> None:
    """A bf16 output is written by the second product, one in f32 or with a pitch by `combine`. Columns of zeros times a
    weight below 0 are -0, which a sum is not."""
    backend, stack = TritonExperts(context(compute)), random_experts(weights, SLOTS, HIDDEN, INNER, CPU)
    stack.w2.values.view(torch.uint8)[:, :5] = 0
    own, given = backend.relayout(stack), rows(travelled, ids)
    given = replace(given, weights_RK=-given.weights_RK)
    outs = [torch.full((len(ids), HIDDEN), torch.nan, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    outs.append(torch.full((len(ids), HIDDEN + 16), torch.nan, dtype=torch.bfloat16)[:, :HIDDEN])
    direct, summed, apart = (backend.run(replace(given, out_RH=out), own).y for out in outs)
    assert direct.data_ptr() == outs[0].data_ptr() and torch.equal(backend.run(given, own).y, direct)
    assert bits_of(direct) == bits_of(summed.bfloat16()) == bits_of(apart)
    assert torch.equal(summed, summed.bfloat16().float())
    assert (direct.any(1) == (ids[:, 0] >= 0)).all()


@pytest.mark.stress
@pytest.mark.timeout(580)
@pytest.mark.parametrize(
    "weights,compute",
    [(FP8_128x128, FP8_1x128), (FP8_128x128_UE8M0, FP8_1x128_UE8M0), (BF16, BF16)],
    ids=["fp8", "ue8m0", "bf16"],
)
def test_the_whole_kit(weights: QuantScheme, compute: QuantScheme) -> None:
    rounds = 1 if compute is BF16 else 2
    ran = check_experts("triton", weights, dtype=BF16, compute=compute, hidden_size=HIDDEN, num_slots=SLOTS)
    assert ran == 13 * rounds * 2 * len(EXPERTS["triton"].traits.consumes)
