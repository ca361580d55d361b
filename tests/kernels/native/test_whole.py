"""A layer in one native call against its parts one after the other: the same bits, and the load counted."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.native import (
    ExpertsMode,
    FusedLayer,
    Gating,
    Given,
    Native,
    Places,
    RouteMode,
    Scoring,
    Stack,
    experts_rows,
    route,
)
from tests.kernels.native.conftest import IsaHere
from tests.kernels.native.layers import Layer, Storage

EXPERTS, HIDDEN, INNER = 12, 192, 96
MODE = RouteMode(3, Scoring.SIGMOID, 4, 2, scale=2.5)
ORDER = torch.tensor([5, 2, 7, 0, 11, 1, 9, 3, 8, 4, 10, 6], dtype=torch.int32)


def gating(*, f32: bool = False, biased: bool = True, mode: RouteMode = MODE) -> Gating:
    g = torch.Generator("cpu").manual_seed(1)
    gate_EH = torch.randn(EXPERTS, HIDDEN, generator=g) * HIDDEN**-0.5
    bias_E = torch.rand(EXPERTS, generator=g) if biased else None
    return Gating(gate_EH if f32 else gate_EH.bfloat16(), bias_E, mode)


def places(order: Tensor = ORDER, here: int = EXPERTS) -> Places:
    """The first `here` physical experts are of rank 0, in slots from the first on; the others are of rank 1."""
    at = torch.arange(EXPERTS, dtype=torch.int32)
    return Places(order.clone(), (at >= here).to(torch.int32), torch.where(at >= here, at - here, at), 0)


def in_parts(native: Native, chosen: Gating, where: Places, stack: Stack, x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """`route`, the load, the slots and `experts_rows`, by torch in between."""
    ids_TK, weights_TK, _ = route(native, x_TH, chosen.gate_EH, chosen.bias_E, chosen.mode)
    load_E = torch.bincount(ids_TK[ids_TK >= 0].long(), minlength=EXPERTS)
    slots_TK = torch.full_like(ids_TK, -1)
    for token, k in (ids_TK >= 0).nonzero().tolist():
        physical = int(where.physical_of_E[ids_TK[token, k]])
        if physical >= 0 and where.rank_of_P[physical] == where.rank:
            slots_TK[token, k] = where.slot_of_P[physical]
    return experts_rows(native, x_TH, slots_TK, weights_TK, stack.w13, stack.w2, shared=stack.shared), load_E


def stack_of(native: Native, slots: int = EXPERTS, storage: Storage = Storage.FP8, *, shared: bool = True) -> Stack:
    w13, w2 = Layer(slots, HIDDEN, INNER, storage).pack(native)
    return Stack(w13, w2, Layer(1, HIDDEN, 2 * INNER, storage, seed=9).pack(native) if shared else None)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator("cpu").manual_seed(seed)).bfloat16()


def no_load() -> Tensor:
    return torch.zeros(EXPERTS, dtype=torch.int64)


@pytest.mark.parametrize("count", [0, 1, 2, 17, 40])
@pytest.mark.parametrize("storage", [Storage.FP8, Storage.BF16])
def test_one_call_has_the_bits_of_its_parts_for_any_number_of_threads(
    native: Native, count: int, storage: Storage
) -> None:
    chosen, where, stack = gating(f32=storage is Storage.BF16), places(), stack_of(native, storage=storage)
    x_TH = tokens(count)
    wanted_TH, load_E = in_parts(native, chosen, where, stack, x_TH)
    whole = FusedLayer(native, chosen, where, stack, ExpertsMode())
    for threads in (1, 2, 3):
        counted_E = no_load()
        assert torch.equal(whole(x_TH, counted_E, threads), wanted_TH)
        assert torch.equal(counted_E, load_E) and int(counted_E.sum()) == 3 * count


@pytest.mark.parametrize("experts", [4, 7, 67, 256])
def test_the_router_has_the_same_bits_for_any_number_of_threads(isa_here: IsaHere, experts: int) -> None:
    # Tasks are cut smaller for more threads; each product stays one thread's, and each token's choice.
    native, isa = isa_here
    g = torch.Generator("cpu").manual_seed(experts)
    gate_EH, bias_E = torch.randn(experts, 200, generator=g).bfloat16(), torch.rand(experts, generator=g)
    for count in (1, 5, 33):
        x_TH = torch.randn(count, 200, generator=g).bfloat16()
        one = route(native, x_TH, gate_EH, bias_E, RouteMode(4), isa=isa, threads=1)
        for threads in (2, 3, 8):
            many = route(native, x_TH, gate_EH, bias_E, RouteMode(4), isa=isa, threads=threads)
            assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True)), (count, threads)


def test_experts_that_are_not_here_are_counted_and_left_out(native: Native) -> None:
    # Eight of twelve lie here; expert 3 lies nowhere.
    where, stack, x_TH = places(here=8), stack_of(native, 8, shared=False), tokens(9)
    where.physical_of_E[3] = -1
    wanted_TH, load_E = in_parts(native, gating(), where, stack, x_TH)
    counted_E = no_load()
    assert torch.equal(FusedLayer(native, gating(), where, stack, ExpertsMode())(x_TH, counted_E, 2), wanted_TH)
    assert torch.equal(counted_E, load_E) and int(load_E.sum()) == 27 and load_E[3] > 0


def test_places_are_read_at_every_call(native: Native) -> None:
    where, stack, x_TH = places(), stack_of(native), tokens(5)
    whole = FusedLayer(native, gating(), where, stack, ExpertsMode())
    before_TH = whole(x_TH, no_load(), 1)
    where.physical_of_E.copy_(ORDER.flip(0))
    wanted_TH, _ = in_parts(native, gating(), places(ORDER.flip(0)), stack, x_TH)
    after_TH = whole(x_TH, no_load(), 1)
    assert torch.equal(after_TH, wanted_TH) and not torch.equal(after_TH, before_TH)


def test_a_token_with_a_nan_score_counts_for_nobody_and_keeps_the_shared_expert(native: Native) -> None:
    # Infinite inputs of both signs make NaN logits; finite tokens beside it do not notice.
    x_TH, stack = tokens(3), stack_of(native)
    x_TH[1, :2] = torch.tensor([torch.inf, -torch.inf])
    wanted_TH, load_E = in_parts(native, gating(), places(), stack, x_TH)
    counted_E = no_load()
    y_TH = FusedLayer(native, gating(), places(), stack, ExpertsMode())(x_TH, counted_E, 2)
    assert torch.equal(y_TH[[0, 2]], wanted_TH[[0, 2]]) and torch.equal(counted_E, load_E)
    assert int(counted_E.sum()) == 6


def test_calls_at_once_count_every_choice(native: Native) -> None:
    whole = FusedLayer(native, gating(), places(), stack_of(native), ExpertsMode())
    inputs, counted_E, wrong = [tokens(3 + 5 * i, i) for i in range(4)], no_load(), []
    alone = [whole(x_TH, no_load(), 1) for x_TH in inputs]

    def work(i: int) -> None:
        for _ in range(25):
            if not torch.equal(whole(inputs[i], counted_E, 2), alone[i]):
                wrong.append(i)

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(work, range(4)))  # raises what they raise
    assert wrong == [] and int(counted_E.sum()) == 25 * 3 * sum(map(len, inputs))


def test_a_forked_child_runs_the_same_block(native: Native) -> None:
    whole, x_TH = FusedLayer(native, gating(), places(), stack_of(native), ExpertsMode()), tokens(7)
    wanted_TH = whole(x_TH, no_load(), 3)

    def child() -> None:
        raise SystemExit(0 if torch.equal(whole(x_TH, no_load(), 3), wanted_TH) else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_what_does_not_fit_is_reported_before_any_call(native: Native) -> None:
    stack, good = stack_of(native), gating()
    with pytest.raises(ShapeError, match=r"gate has H=64 \(axis 1\), expected H=192"):
        FusedLayer(native, Gating(good.gate_EH[:, :64], good.bias_E, MODE), places(), stack, ExpertsMode())
    with pytest.raises(ConfigError, match="top_k=7, but 2 of 4 groups hold 6 experts"):
        FusedLayer(native, gating(mode=RouteMode(7, num_groups=4, top_groups=2)), places(), stack, ExpertsMode())
    with pytest.raises(ShapeError, match="they have 12 and 12 slots, expected one"):
        FusedLayer(native, good, places(), Stack(stack.w13, stack.w2, (stack.w13, stack.w2)), ExpertsMode())
    beyond = places(torch.full((EXPERTS,), EXPERTS, dtype=torch.int32))
    with pytest.raises(ShapeError, match="layer: an id is neither -1 nor a local slot"):
        FusedLayer(native, good, beyond, stack, ExpertsMode())(tokens(1), no_load(), 1)


@pytest.mark.parametrize("wide", [False, True])
def test_a_routing_that_was_written_runs_again_with_the_same_bits_and_load(native: Native, *, wide: bool) -> None:
    # Eight of twelve are here, in another order; what is here must not be read off the ids that were written.
    where, stack, x_TH, counted_E = places(here=8), stack_of(native, 8), tokens(9), no_load()
    ids_TK, weights_TK = torch.empty(9, 3, dtype=torch.int32), torch.empty(9, 3)
    whole = FusedLayer(native, gating(), where, stack, ExpertsMode())
    y_TH = whole(x_TH, counted_E, 2, (ids_TK, weights_TK))
    wanted_ids, wanted_weights, _ = route(native, x_TH, gating().gate_EH, gating().bias_E, MODE)
    assert torch.equal(ids_TK, wanted_ids) and torch.equal(weights_TK, wanted_weights)
    ids_TK, given = (ids_TK.long(), Given.IDS | Given.WIDE) if wide else (ids_TK, Given.IDS)
    routed = FusedLayer(native, None, where, stack, ExpertsMode())
    again_E = no_load()
    assert torch.equal(routed(x_TH, again_E, 2, (ids_TK, weights_TK), given), y_TH) and torch.equal(again_E, counted_E)
    assert torch.equal(whole(x_TH, None, 2, (ids_TK, weights_TK), given), y_TH)
    ids_TK[4] = -1
    left_out_TH = routed(x_TH, None, 1, (ids_TK, weights_TK), given)
    for beyond in (EXPERTS, -2, 2**32 + 1 if wide else 2**31 - 1):
        ids_TK[4] = beyond
        with pytest.raises(ShapeError, match=r"ids of experts out of range \(0 <= id < 12, or -1 for none\)"):
            routed(x_TH, again_E, 1, (ids_TK, weights_TK), given)
        assert torch.equal(again_E, counted_E), "nothing is counted"
        skipped_E = no_load()
        assert torch.equal(routed(x_TH, skipped_E, 1, (ids_TK, weights_TK), given | Given.SKIP), left_out_TH)
        assert int(skipped_E.sum()) == 24
