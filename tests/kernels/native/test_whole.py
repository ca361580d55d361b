"""A layer in one native call against its parts one after the other: the same bits, and the load counted."""

from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.native.experts_mode import ExpertsMode
from moe_mk.kernels.native.layer import Gating, Places, PreparedCall, RowsOfExperts, Stack, Stage
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.prepared import RouteMode, Scoring, experts_rows
from moe_mk.router.replay import CapturedIds
from tests.kernels.native.layers import Layer, Storage, route

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
    at_TK = where.physical_of_E[ids_TK.clamp_min(0).long()].long()
    is_here_TK = (ids_TK >= 0) & (at_TK >= 0) & (where.rank_of_P[at_TK.clamp_min(0)] == where.rank)
    slots_TK = torch.where(is_here_TK, where.slot_of_P[at_TK.clamp_min(0)], -1)
    return experts_rows(native, x_TH, slots_TK, weights_TK, stack.w13, stack.w2, shared=stack.shared), load_E


def stack_of(native: Native, slots: int = EXPERTS, storage: Storage = Storage.FP8, *, shared: bool = True) -> Stack:
    w13, w2 = Layer(slots, HIDDEN, INNER, storage).pack(native)
    return Stack(w13, w2, Layer(1, HIDDEN, 2 * INNER, storage, seed=9).pack(native) if shared else None)


def layer_of(
    native: Native, chosen: Gating | None, where: Places, stack: Stack, shared: Stack | None = None, ran: object = None
) -> PreparedCall:
    def rows(of: Stack) -> RowsOfExperts:
        return RowsOfExperts(native, of, lambda _: ExpertsMode(), by_rows=False, takes_fp8=True)

    return PreparedCall(rows(stack), None if shared is None else rows(shared), chosen, where, ran)  # type: ignore[arg-type]


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator("cpu").manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("count", [0, 1, 2, 17, 40])
@pytest.mark.parametrize("storage", [Storage.FP8, Storage.BF16])
def test_one_call_has_the_bits_of_its_parts_for_any_number_of_threads(
    native: Native, count: int, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, where, stack = gating(f32=storage is Storage.BF16), places(), stack_of(native, storage=storage)
    x_TH = tokens(count)
    wanted_TH, load_E = in_parts(native, chosen, where, stack, x_TH)
    whole = layer_of(native, chosen, where, stack)
    for threads in (1, 2, 3):
        counted_E = torch.zeros(EXPERTS, dtype=torch.int64)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(whole(x_TH, counted_E), wanted_TH)
        assert torch.equal(counted_E, load_E) and int(counted_E.sum()) == 3 * count


def test_experts_that_are_not_here_are_counted_and_left_out(native: Native) -> None:
    # Eight of twelve lie here; expert 3 lies nowhere.
    where, stack, x_TH = places(here=8), stack_of(native, 8, shared=False), tokens(9)
    where.physical_of_E[3] = -1
    wanted_TH, load_E = in_parts(native, gating(), where, stack, x_TH)
    counted_E = torch.zeros(EXPERTS, dtype=torch.int64)
    assert torch.equal(layer_of(native, gating(), where, stack)(x_TH, counted_E), wanted_TH)
    assert torch.equal(counted_E, load_E) and int(load_E.sum()) == 27 and load_E[3] > 0


def test_places_are_read_at_every_call(native: Native) -> None:
    where, stack, x_TH = places(), stack_of(native), tokens(5)
    whole = layer_of(native, gating(), where, stack)
    before_TH = whole(x_TH, torch.zeros(EXPERTS, dtype=torch.int64))
    where.physical_of_E.copy_(ORDER.flip(0))
    wanted_TH, _ = in_parts(native, gating(), places(ORDER.flip(0)), stack, x_TH)
    after_TH = whole(x_TH, torch.zeros(EXPERTS, dtype=torch.int64))
    assert torch.equal(after_TH, wanted_TH) and not torch.equal(after_TH, before_TH)


def test_a_token_with_a_nan_score_counts_for_nobody_and_keeps_the_shared_expert(native: Native) -> None:
    # Infinite inputs of both signs make NaN logits; finite tokens beside it do not notice.
    x_TH, stack = tokens(3), stack_of(native)
    x_TH[1, :2] = torch.tensor([torch.inf, -torch.inf])
    wanted_TH, load_E = in_parts(native, gating(), places(), stack, x_TH)
    counted_E = torch.zeros(EXPERTS, dtype=torch.int64)
    y_TH = layer_of(native, gating(), places(), stack)(x_TH, counted_E)
    assert torch.equal(y_TH[[0, 2]], wanted_TH[[0, 2]]) and torch.equal(counted_E, load_E)
    assert int(counted_E.sum()) == 6


def test_calls_at_once_count_every_choice(native: Native) -> None:
    whole = layer_of(native, gating(), places(), stack_of(native))
    inputs, counted_E, wrong = [tokens(3 + 5 * i, i) for i in range(4)], torch.zeros(EXPERTS, dtype=torch.int64), []
    alone = [whole(x_TH, torch.zeros(EXPERTS, dtype=torch.int64)) for x_TH in inputs]

    def work(i: int) -> None:
        for _ in range(25):
            if not torch.equal(whole(inputs[i], counted_E), alone[i]):
                wrong.append(i)

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(work, range(4)))  # raises what they raise
    assert wrong == [] and int(counted_E.sum()) == 25 * 3 * sum(map(len, inputs))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_calls_at_once_keep_every_choice_within_the_rows_of_a_capture(native: Native, dtype: torch.dtype) -> None:
    whole, x_TH, callers, calls = layer_of(native, gating(), places(), stack_of(native)), tokens(3), 4, 6
    room = callers * calls * 3 - 2  # one call has no room
    kept_TXK = torch.full((room + 3, 3, 3), 77, dtype=dtype)
    captured, chosen = CapturedIds(kept_TXK[:room, 1]), gating()
    wanted_TK, _, _ = route(native, x_TH, chosen.gate_EH, chosen.bias_E, MODE)
    refused, counted_E = list[str](), torch.zeros(EXPERTS, dtype=torch.int64)

    def work(_: int) -> None:
        for _ in range(calls):
            try:
                whole(x_TH, counted_E, captured=captured.address)
            except ShapeError as error:
                refused.append(str(error))

    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(work, range(callers)))
    assert len(refused) == 1 and captured.block.num_tokens == room - 1 and int(counted_E.sum()) == 3 * (room - 1)
    assert torch.equal(kept_TXK[: room - 1, 1].int(), wanted_TK.repeat(callers * calls - 1, 1))
    assert bool((kept_TXK[room - 1 :].int() == 77).all()) and bool((kept_TXK[:, ::2].int() == 77).all())


def test_what_does_not_fit_is_reported_before_any_call(native: Native) -> None:
    stack, good = stack_of(native), gating()
    with pytest.raises(ShapeError, match=r"gate has H=64 \(axis 1\), expected H=192"):
        layer_of(native, Gating(good.gate_EH[:, :64], good.bias_E, MODE), places(), stack)
    with pytest.raises(ConfigError, match="top_k=7, but 2 of 4 groups hold 6 experts"):
        layer_of(native, gating(mode=RouteMode(7, num_groups=4, top_groups=2)), places(), stack)
    with pytest.raises(ShapeError, match="they have 12 and 12 slots, expected one"):
        layer_of(native, good, places(), Stack(stack.w13, stack.w2, (stack.w13, stack.w2)))
    beyond = places(torch.full((EXPERTS,), EXPERTS, dtype=torch.int32))
    with pytest.raises(ShapeError, match="layer: an id is neither -1 nor a local slot"):
        layer_of(native, good, beyond, stack)(tokens(1), torch.zeros(EXPERTS, dtype=torch.int64))


@pytest.mark.parametrize("wide", [False, True])
def test_a_routing_that_was_written_runs_again_with_the_same_bits_and_load(native: Native, *, wide: bool) -> None:
    # Eight of twelve are here, in another order; what is here must not be read off the ids that were written.
    where, stack, x_TH, counted_E = (
        places(here=8),
        stack_of(native, 8),
        tokens(9),
        torch.zeros(EXPERTS, dtype=torch.int64),
    )
    ids_TK, weights_TK = torch.empty(9, 3, dtype=torch.int32), torch.empty(9, 3)
    whole = layer_of(native, gating(), where, stack)
    y_TH = whole(x_TH, counted_E, (ids_TK, weights_TK))
    wanted_ids, wanted_weights, _ = route(native, x_TH, gating().gate_EH, gating().bias_E, MODE)
    assert torch.equal(ids_TK, wanted_ids) and torch.equal(weights_TK, wanted_weights)
    ids_TK = ids_TK.long() if wide else ids_TK
    routed, given = layer_of(native, None, where, stack), (ids_TK, weights_TK)
    again_E = torch.zeros(EXPERTS, dtype=torch.int64)
    assert torch.equal(routed(x_TH, again_E, given, Stage.PLACE), y_TH) and torch.equal(again_E, counted_E)
    assert torch.equal(whole(x_TH, None, given, Stage.PLACE), y_TH)
    ids_TK[4] = -1
    left_out_TH = routed(x_TH, None, given, Stage.PLACE)
    for beyond in (EXPERTS, -2, 2**32 + 1 if wide else 2**31 - 1):
        ids_TK[4] = beyond
        with pytest.raises(ShapeError, match=r"ids of experts out of range \(0 <= id < 12, or -1 for none\)"):
            routed(x_TH, again_E, given, Stage.PLACE)
        assert torch.equal(again_E, counted_E), "nothing is counted"
        skipped_E = torch.zeros(EXPERTS, dtype=torch.int64)
        assert torch.equal(routed(x_TH, skipped_E, given, Stage.PLACE, skip=True), left_out_TH)
        assert int(skipped_E.sum()) == 24


def test_shared_experts_are_a_stage_of_their_own(native: Native) -> None:
    stack, shared, x_TH = (
        stack_of(native, shared=False),
        Stack(*Layer(1, HIDDEN, 2 * INNER, seed=9).pack(native)),
        tokens(9),
    )
    weights_T1, ran = torch.rand(9, 1), (c_int64 * 8)()
    routed_TH, _ = in_parts(native, gating(), places(), stack, x_TH)
    shared_TH = experts_rows(native, x_TH, torch.zeros(9, 1).int(), weights_T1, shared.w13, shared.w2)
    layer = layer_of(native, gating(), places(), stack, shared, ran)
    y_TH = layer(x_TH, None, shared_weights_T=weights_T1)
    assert torch.equal(y_TH, (routed_TH.float() + shared_TH.float()).bfloat16())
    assert ran[:] == [1, 9] * 4, "dispatches, runs of shared and of routed experts, combines, each with its rows"
