"""The Triton experts on a GPU: the conformance kit, DeepSeek-V3's own sizes, graphs, virtual ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import get_ident

import pytest
import torch
from torch import Tensor

from moe_mk import oracle
from moe_mk.config import device_profile, load_config
from moe_mk.config.moe import ResidencyConfig
from moe_mk.config.problem import Problem
from moe_mk.config.tuned import Tuned
from moe_mk.experts import ExpertsContext
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.experts.triton.tuning import BUILT_IN
from moe_mk.external.library import installed
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.testing.conformance import check_experts
from moe_mk.lab.testing.experts import _poisoned, random_experts
from moe_mk.lab.testing.limits import require_close
from moe_mk.lab.testing.transports import fly_together, world_of
from moe_mk.oracle import Parts, assemble
from moe_mk.oracle.expected_error import experts_error
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant import BF16, FP32, FP8_1x128, FP8_1x128_UE8M0, FP8_128x128, FP8_128x128_UE8M0, QuantScheme
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import BatchedTokens, GroupedTokens, OutputStage, Routing, RowTokens, Tokens
from moe_mk.weights.expert_weights import ExpertWeights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]
CUDA = torch.device("cuda")
HIDDEN, INNER = 7168, 2048
BY_HAND = [Tile(8, True, 4, 6, "gluon"), Tile(16, True, 4, 6, "gluon"), Tile(32, True, 4, 6, "gluon")]
BY_HAND += [Tile(64, False, 4, 5, "gluon"), Tile(128, False, 4, 4, "gluon")]
TILES = [*(tile for _, tile in BUILT_IN), *BY_HAND]


@pytest.fixture(autouse=True)
def fresh_inputs(record_property: pytest.RecordProperty) -> None:
    record_property("seed", torch.seed())


def of_tile(backend: TritonExperts, tile: Tile) -> TritonExperts:
    backend.tuned = Tuned.fixed(tile)
    return backend


def build(
    compute: QuantScheme, slots: int, hidden: int = HIDDEN, inner: int = INNER, limit: float | None = None
) -> TritonExperts:
    context = ExpertsContext(BF16, compute, "silu", slots, hidden, inner, CUDA)
    clamps = {} if limit is None else {"activation": "swiglu_limit", "swiglu_limit": limit}
    return TritonExperts(replace(context, **clamps))


def draw(rows: int, slots: int, top_k: int, hidden: int = HIDDEN, drop: float = 0.2) -> RowTokens:
    order = torch.rand(rows, slots).argsort(1)[:, :top_k].int()
    ids = torch.where(torch.rand(order.shape) < drop, -1, order).to(CUDA)
    weights = torch.rand(order.shape, device=CUDA).masked_fill(ids < 0, 0.0)
    return RowTokens(BF16.quantize(torch.randn(rows, hidden, device=CUDA).bfloat16()), ids, weights, slots)


def check(backend: TritonExperts, stack: ExpertWeights, rows: RowTokens, given: Tokens) -> Tensor:
    compute = backend.context.compute
    exact = FP32 if isinstance(compute, Plain) else compute
    c = backend.context
    reference = ReferenceExperts(replace(c, dtype=FP32, compute=exact))
    expected = weight_and_reduce(reference.run(rows, stack), rows, OutputStage.REDUCED).y
    given = _poisoned(given) if isinstance(given, BatchedTokens) else given
    got = weight_and_reduce(backend.run(given, backend.relayout(stack)), given, OutputStage.REDUCED).y
    error = experts_error(BF16, compute, stack.scheme, c.hidden_size)
    require_close(got.float(), expected, error, f"{type(given).__name__}, {len(rows.ids_RK)} rows")
    return got


@pytest.mark.parametrize(
    "weights,compute",
    [(FP8_128x128, FP8_1x128), (FP8_128x128_UE8M0, FP8_1x128_UE8M0), (BF16, BF16)],
    ids=["fp8", "ue8m0", "bf16"],
)
def test_the_conformance_kit(weights: QuantScheme, compute: QuantScheme) -> None:
    assert check_experts("triton", weights, dtype=BF16, compute=compute, device=CUDA) >= 78


def named(tile: Tile) -> str:
    return f"{tile.engine}-{tile.rows}-{'swap' if tile.swap else 'rows'}"


@pytest.mark.parametrize("tile", TILES, ids=named)
def test_tiny_shapes_whose_steps_are_fewer_than_the_stages(tile: Tile) -> None:
    for inner, limit in ((128, None), (256, 0.7)):
        stack = random_experts(FP8_128x128, 3, 256, inner, CUDA)
        backend = of_tile(build(FP8_1x128, 3, 256, inner, limit), tile)
        for rows in (1, 5, 140):
            tokens = draw(rows, 3, 2, 256)
            for layout in (RowTokens, GroupedTokens, BatchedTokens) if limit is None else (RowTokens,):
                check(backend, stack, tokens, permute(tokens, (layout,)))


@pytest.mark.parametrize("tile", TILES, ids=named)
def test_a_tiny_layer_with_one_expert_a_row_has_the_bits_of_a_sum_and_zeros_where_there_is_none(tile: Tile) -> None:
    backend, stack = of_tile(build(FP8_1x128, 3, 256, 256), tile), random_experts(FP8_128x128, 3, 256, 256, CUDA)
    own = backend.relayout(stack)
    for rows in (1, 7, 200, 2000):
        tokens = draw(rows, 3, 1, 256)
        outs = [torch.full((rows, 256), torch.nan, dtype=dtype, device=CUDA) for dtype in (BF16.dtype, FP32.dtype)]
        direct, summed = (backend.run(replace(tokens, out_RH=out), own).y for out in outs)
        assert torch.equal(direct.view(torch.int16), summed.bfloat16().view(torch.int16))
        assert (direct.any(1) == (tokens.ids_RK[:, 0] >= 0)).all()


@pytest.mark.parametrize("tile", TILES, ids=named)
@pytest.mark.parametrize("layout", [RowTokens, GroupedTokens, BatchedTokens])
def test_every_tile_at_the_sizes_of_deepseek_v3(tile: Tile, layout: type) -> None:
    backend, stack = of_tile(build(FP8_1x128, 4), tile), random_experts(FP8_128x128, 4, HIDDEN, INNER, CUDA)
    for rows in (1, 7, 200):
        tokens = draw(rows, 4, 2)
        given = permute(tokens, (layout,))
        first = check(backend, stack, tokens, given)
        again = weight_and_reduce(backend.run(given, backend.relayout(stack)), given, OutputStage.REDUCED).y
        assert torch.equal(first, again), "equal inputs, equal bits"


@pytest.mark.parametrize("tile", [BUILT_IN[0][1], BY_HAND[0]], ids=named)
def test_the_smallest_tile_of_each_engine_at_the_sizes_of_deepseek_v3(tile: Tile) -> None:
    backend, stack = of_tile(build(FP8_1x128, 4), tile), random_experts(FP8_128x128, 4, HIDDEN, INNER, CUDA)
    for rows in (1, 40):
        tokens = draw(rows, 4, 2)
        check(backend, stack, tokens, tokens)


@pytest.mark.parametrize("tile", [BUILT_IN[0][1], BUILT_IN[-1][1], *BY_HAND], ids=str)
def test_a_captured_graph_serves_other_tokens_and_allocates_nothing(tile: Tile) -> None:
    slots, rows = 8, 32
    backend = of_tile(build(FP8_1x128, slots), tile)
    stack = backend.relayout(random_experts(FP8_128x128, slots, HIDDEN, INNER, CUDA))
    given = draw(rows, slots, 4)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # allocates the arena of the stream that captures
        for _ in range(3):
            backend.run(given, stack)
    torch.cuda.synchronize()
    arena, graph = backend.workspace.arena((stream.cuda_stream, get_ident())), torch.cuda.CUDAGraph()
    allocations = arena.allocations
    with torch.cuda.graph(graph, stream=stream):
        y = backend.run(given, stack).y
    for _ in range(3):
        other = draw(rows, slots, 4)
        given.x_RH.values.copy_(other.x_RH.values)
        given.ids_RK.copy_(other.ids_RK)
        given.weights_RK.copy_(other.weights_RK)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, backend.run(other, stack).y)
    assert arena.allocations == allocations > 0


def test_a_row_gets_the_same_bits_in_any_company() -> None:
    c = build(FP8_1x128, 8).context
    backend = TritonExperts(replace(c, batch_invariant=True))
    stack, many = backend.relayout(random_experts(FP8_128x128, 8, HIDDEN, INNER, CUDA)), draw(2000, 8, 4)
    together = backend.run(many, stack).y
    for count in (1, 5, 300):
        part = RowTokens(BF16.quantize(many.x_RH.values[:count]), many.ids_RK[:count], many.weights_RK[:count], 8)
        assert torch.equal(backend.run(part, stack).y, together[:count])


def test_micro_batches_on_two_streams_use_memory_of_their_own() -> None:
    backend = build(FP8_1x128, 8)
    stack = backend.relayout(random_experts(FP8_128x128, 8, HIDDEN, INNER, CUDA))
    batches, streams = [draw(64, 8, 4) for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    expected = [backend.run(batch, stack).y for batch in batches]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for batch, stream in zip(batches, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(backend.run(batch, stack).y)
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.row(174)
@pytest.mark.parametrize("in_store", [False, True], ids=["host memory", "store"])
def test_experts_below_the_device_have_the_bits_of_those_on_it_from_two_streams(in_store: bool, tmp_path: Path) -> None:
    slots, backend = 16, build(FP8_1x128, 16)
    stack = random_experts(FP8_128x128, slots, HIDDEN, INNER, CUDA)
    residency = ResidencyConfig(slots=5, store=tmp_path if in_store else None)
    paged = TritonExperts(replace(backend.context, residency=residency))
    held, some = backend.relayout(stack), paged.relayout(stack)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for rows in (1, 4, 64, 600, 1, 2):
        tokens = [draw(rows, slots, 4) for _ in streams]
        expected, got = [backend.run(given, held).y for given in tokens], []
        torch.cuda.synchronize()
        for stream, given in zip(streams, tokens, strict=True):
            with torch.cuda.stream(stream):
                got.append(paged.run(given, some).y)
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True)), rows
    assert 0 < some.counts.reads < some.counts.uses  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_virtual_ranks_on_one_device(transport: str, ranks: int) -> None:
    config = load_config("deepseek_v3").with_(
        ep=ranks, prepare_finalize=transport, experts="triton", num_experts=32, max_num_tokens=64
    )
    decision = oracle.select(Problem(config, device_profile("h200"), BF16, 64, installed()))
    stack = random_experts(FP8_128x128, 32, HIDDEN, INNER, CUDA)
    expert_map, world = ExpertMap.linear(32, ranks), world_of(PREPARE_FINALIZE[transport].traits, ranks)
    counts = [(5, 0, 17, 1)[rank % 4] for rank in range(ranks)]
    tokens = [draw(count, 32, 8, HIDDEN) for count in counts]
    flights = []
    for comm, given in zip(world.communicators(), tokens, strict=True):
        kernel = assemble(decision, Parts(expert_map, CUDA, comm))
        own = torch.tensor(expert_map.local_to_global(comm.rank), device=CUDA)
        weights = kernel.experts.relayout(ExpertWeights(pick(stack.w13, own), pick(stack.w2, own)))
        ids = expert_map.tables(CUDA).to_physical(given.ids_RK, salt=comm.rank)
        flights.append(kernel.steps(given.x_RH.values, Routing(ids, given.weights_RK), weights))
    whole = build(FP8_1x128, 32)
    for got, given in zip(fly_together(world, flights), tokens, strict=True):
        expected = whole.run(given, whole.relayout(stack)).y
        require_close(got.float(), expected.float(), experts_error(BF16, FP8_1x128, FP8_128x128, HIDDEN), transport)


def pick(q: QuantTensor, own: Tensor) -> QuantTensor:
    """Some experts of a stack; FP8 values are indexed as bytes."""
    values = q.values.view(torch.uint8)[own].view(q.values.dtype)
    return QuantTensor(values, None if q.scales is None else q.scales[own], q.scheme)
