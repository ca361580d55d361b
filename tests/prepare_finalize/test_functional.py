"""Dispatch and combine as two calls without state: every field by hand, hostile routings, memory, every option."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_mk.comm import LockstepWorld
from moe_mk.comm.single import SingleRank
from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.flight import Flight, interleave, wait
from moe_mk.lab.testing.cases import hostile_routings
from moe_mk.prepare_finalize.functional import (
    Dispatched,
    DistributeOptions,
    distribute_combine,
    distribute_dispatch,
    plan_distribute,
)
from moe_mk.quant.int8 import INT8_TOKEN

FOUR = DistributeOptions(num_experts=4)
# Rank 0 has tokens a -> experts 0, 3 and b -> 2, nowhere; rank 1 has c -> 0, 1. Two experts a rank.
X = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]
IDS = [torch.tensor([[0, 3], [2, -1]]), torch.tensor([[0, 1]])]
WEIGHTS = [torch.tensor([[0.5, 0.25], [1.0, 0.0]]), torch.tensor([[0.75, 0.125]])]


def dispatched(options: DistributeOptions = FOUR, active: list[Tensor | None] | None = None) -> list[Dispatched]:
    comms, masks = LockstepWorld(2).communicators(), active or [None, None]
    given = zip(X, IDS, WEIGHTS, comms, masks, strict=True)
    return interleave([distribute_dispatch(x, i, w, c, options, m) for x, i, w, c, m in given])


@pytest.mark.row(139)
def test_one_call_returns_all_that_experts_and_combine_need() -> None:
    first, second = dispatched()
    assert first.expand_x.tolist() == [[1.0, 2.0], [5.0, 6.0], [5.0, 6.0]]  # expert 0: a c; expert 1: c
    assert second.expand_x.tolist() == [[3.0, 4.0], [1.0, 2.0]]  # expert 2: b; expert 3: a
    assert first.dynamic_scales is None and second.dynamic_scales is None
    assert first.expand_idx.tolist() == [0, 0, 0, -1] and second.expand_idx.tolist() == [0, 0]
    assert first.expert_token_nums.tolist() == [2, 1] and second.expert_token_nums.tolist() == [1, 1]
    # Expert 0 has a row of rank 0, then one of rank 1; expert 1 has one of rank 1.
    assert first.ep_recv_counts.tolist() == [1, 2, 2, 3] and second.ep_recv_counts.tolist() == [1, 1, 2, 2]
    assert first.tp_recv_counts.tolist() == [3] and second.tp_recv_counts.tolist() == [2]
    assert first.expand_scales.tolist() == [0.5, 0.75, 0.125] and second.expand_scales.tolist() == [1.0, 0.25]
    dtypes = [first.expand_idx.dtype, first.expert_token_nums.dtype, first.ep_recv_counts.dtype]
    assert dtypes == [torch.int32, torch.int64, torch.int32]


@pytest.mark.row(139, 140)
def test_combine_needs_two_of_the_fields_and_nothing_else() -> None:
    first, second = dispatched()
    y = [first.expand_x * torch.tensor([[1.0], [1.0], [2.0]]), second.expand_x * torch.tensor([[4.0], [8.0]])]
    fields = [(d.expand_idx.clone(), d.ep_recv_counts.clone()) for d in (first, second)]
    fresh = LockstepWorld(2).communicators()  # nothing is left of the dispatch
    flights = [
        distribute_combine(*own, c, FOUR)
        for *own, c in zip(y, IDS, WEIGHTS, *zip(*fields, strict=True), fresh, strict=True)
    ]
    # a: (0.5 x 1 + 0.25 x 8) a; b: 1 x 4 b; c: (0.75 x 1 + 0.125 x 2) c
    assert [t.tolist() for t in interleave(flights)] == [[[2.5, 5.0], [12.0, 16.0]], [[5.0, 6.0]]]


def test_assignments_to_one_expert_are_numbered_by_token() -> None:
    ids = torch.tensor([[2, 0], [0, -1], [1, 0]])
    got = wait(distribute_dispatch(torch.ones(3, 2), ids, torch.ones(3, 2), SingleRank(), replace(FOUR, num_experts=3)))
    assert got.expand_idx.tolist() == [0, 0, 1, -1, 0, 2]


def there_and_back(
    x: Tensor, ids: Tensor, weights: Tensor, comm: Any, options: DistributeOptions, active_T: Tensor | None = None
) -> Flight[Tensor]:
    """Identity experts."""
    d = yield from distribute_dispatch(x, ids, weights, active_T=active_T, options=options, comm=comm)
    y = d.expand_x if d.dynamic_scales is None else d.expand_x.float() * d.dynamic_scales[:, None]
    assert len(y) == len(d.expand_scales) == int(d.tp_recv_counts) == int(d.ep_recv_counts[-1])
    back = y.to(x.dtype), ids, weights, d.expand_idx, d.ep_recv_counts, comm, options, active_T
    return (yield from distribute_combine(*back))


@pytest.mark.row(140)
@pytest.mark.parametrize("quant_mode", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_identity_experts_return_each_token_times_the_sum_of_its_weights(ranks: int, quant_mode: int) -> None:
    options = DistributeOptions(num_experts=8, quant_mode=quant_mode)
    for case in hostile_routings(ranks, num_experts=8, top_k=3):
        draw = torch.Generator().manual_seed(ranks)
        x = [torch.randn((count, 16), generator=draw).bfloat16() for count in case.num_tokens]
        weights = [r.weights_TK.to(torch.bfloat16 if quant_mode else torch.float32) for r in case.routings]
        comms = LockstepWorld(ranks).communicators()
        masks = [torch.rand(len(tokens), generator=draw) < 0.6 for tokens in x]
        for active in ([None] * ranks, masks):
            given = zip(x, case.logical_ids, weights, comms, [options] * ranks, active, strict=True)
            combined = interleave([there_and_back(*own) for own in given])
            check_sums(case.name, combined, x, case.logical_ids, weights, active, quant_mode)


def check_sums(
    name: str, combined: list[Tensor], x: list[Tensor], ids_of: list[Tensor], weights: list[Tensor],
    active: Sequence[Tensor | None], quant_mode: int,
) -> None:  # fmt: skip
    """A token that is not active gets nothing."""
    for y_TH, x_TH, ids, w, on in zip(combined, x, ids_of, weights, active, strict=True):
        sent = x_TH if quant_mode == 0 else INT8_TOKEN.quantize(x_TH).dequantize(torch.float32).bfloat16()
        skipped = ids < 0 if on is None else (ids < 0) | ~on[:, None]
        want = sent.double() * w.masked_fill(skipped, 0.0).double().sum(dim=1, keepdim=True)
        torch.testing.assert_close(y_TH.double(), want, rtol=2.0**-8, atol=1e-12, msg=name)


class Allocated(TorchDispatchMode):
    """Bytes of tensors that came to life under this mode and still live, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.note(tensor.untyped_storage())
        return made

    def note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


@pytest.mark.row(141)
@pytest.mark.parametrize("quant_mode", [0, 2])
@pytest.mark.parametrize("tokens,hidden,top_k", [(64, 512, 4), (1, 1024, 8), (256, 64, 2)])
def test_a_call_allocates_nothing_beyond_the_plan(tokens: int, hidden: int, top_k: int, quant_mode: int) -> None:
    options = DistributeOptions(num_experts=8, quant_mode=quant_mode)
    plan = plan_distribute(options, ranks=1, num_tokens=tokens, hidden_size=hidden, top_k=top_k, dtype=torch.bfloat16)
    x, weights = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, top_k)
    ids = torch.rand(tokens, 8).argsort(dim=1)[:, :top_k]
    with Allocated() as seen:
        d = wait(distribute_dispatch(x, ids, weights, SingleRank(), options))
        out = seen.peak
        seen.peak = seen.live
        y = d.expand_x if d.dynamic_scales is None else x[:1].expand(len(d.expand_x), -1)
        wait(distribute_combine(y, ids, weights, d.expand_idx, d.ep_recv_counts, SingleRank(), options))
    assert len(d.expand_x) == tokens * top_k <= plan.rows
    assert plan.num_bytes / 8 < out <= plan.num_bytes, "neither beyond the plan nor a plan of anything at all"
    assert seen.peak <= plan.num_bytes


@pytest.mark.row(141)
@pytest.mark.parametrize("quant_mode,num_bytes", [(0, 1680 + 3328), (2, 1392 + 3328)])
def test_the_plan_by_hand(quant_mode: int, num_bytes: int) -> None:
    # 3 tokens x 3 choices leave and, since a rank has 2 experts, 2 ranks x 3 tokens x 2 rows arrive at most; a row of 8
    # elements is 16 bytes and 4 of its weight, or 8 bytes, 4 of its scale and 4 of its weight in INT8.
    # Out: 4 * 9 * 20 + 4 * 12 * 20 = 1680, less in INT8. Back: 3 * 12 * 16 + 3 * 9 * 16 + 3 * 4 * 8 * 4 = 1392.
    # Indices of 8 bytes: 12 * (9 + 12 + 3) + 16 * 4 experts * 2 ranks are 416.
    options = replace(FOUR, quant_mode=quant_mode)
    plan = plan_distribute(options, ranks=2, num_tokens=3, hidden_size=8, top_k=3, dtype=torch.bfloat16)
    assert (plan.rows, plan.num_bytes) == (12, num_bytes)


def refused(**wrong: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        plan_distribute(replace(FOUR, **wrong), ranks=2, num_tokens=1, hidden_size=2, top_k=2, dtype=torch.float32)
    with pytest.raises(UnsupportedError):
        next(distribute_dispatch(X[0], IDS[0], WEIGHTS[0], LockstepWorld(2).communicators()[0], replace(FOUR, **wrong)))
    return str(caught.value)


@pytest.mark.row(142)
def test_tokens_that_are_not_active_go_nowhere() -> None:
    first, second = dispatched(active=[torch.tensor([True, False]), torch.tensor([True])])
    assert first.expert_token_nums.tolist() == [2, 1] and second.expert_token_nums.tolist() == [0, 1], "b stays"
    assert first.expand_idx.tolist() == [0, 0, -1, -1]


@pytest.mark.row(142)
def test_counts_of_experts_may_be_running_sums() -> None:
    first, second = dispatched(replace(FOUR, token_nums_type=0))
    assert first.expert_token_nums.tolist() == [2, 3] and second.expert_token_nums.tolist() == [1, 2]
    assert "token_nums_type = 2: use 0 (running sums) or 1 (counts)" in refused(token_nums_type=2)


@pytest.mark.row(142)
def test_rows_may_be_rounded_to_int8_by_token() -> None:
    first, _ = dispatched(replace(FOUR, quant_mode=2))
    assert first.expand_x.dtype == torch.int8 and first.dynamic_scales is not None
    # a = [1, 2] with a scale of 2 / 127
    assert first.expand_x[0].tolist() == [64, 127] and float(first.dynamic_scales[0]) == pytest.approx(2 / 127)
    assert "quant_mode = 1: use 0 (as they are) or 2 (INT8 by token)" in refused(quant_mode=1)


@pytest.mark.row(142)
def test_the_batch_of_all_ranks_bounds_that_of_one() -> None:
    plans = [
        plan_distribute(
            replace(FOUR, global_batch=batch), ranks=2, num_tokens=1, hidden_size=2, top_k=2, dtype=torch.float32
        )
        for batch in (0, 2, 16)
    ]
    assert [plan.rows for plan in plans] == [2 * 1 * 2, 2 * 1 * 2, 2 * 8 * 2]
    assert len(dispatched(replace(FOUR, global_batch=4))) == 2
    with pytest.raises(ShapeError, match=r"2 tokens exceed 1 of a rank \[global_batch = 2\]"):
        dispatched(replace(FOUR, global_batch=2))
    assert "global_batch = 3: must be 0 or 2 times the most tokens of a rank" in refused(global_batch=3)


@pytest.mark.row(142)
@pytest.mark.parametrize(
    "option,value,way_out",
    [
        ("expert_shard_type", 1, "only 0 is served"),
        ("shared_expert_num", 1, "compute shared experts where their tokens are"),
        ("shared_expert_ranks", 2, "compute shared experts where their tokens are"),
        ("comm_quant_mode", 2, "sums are returned unquantised; use 0"),
        ("tp_size", 2, "gather over TP outside"),
        ("group_list", 7, "groups are those of dispatch; leave it out"),
        ("num_experts", 5, "must divide over 2 ranks"),
    ],
)
def test_what_is_not_served_is_refused_by_name(option: str, value: int, way_out: str) -> None:
    assert f"{option} = {value}: {way_out}" in refused(**{option: value})


@pytest.mark.row(142)
def test_all_that_is_not_served_is_reported_at_once() -> None:
    text = refused(quant_mode=1, comm_quant_mode=2, shared_expert_ranks=1)
    assert text.count("\n") >= 3 and all(name in text for name in ("quant_mode", "comm_quant_mode", "shared_expert"))
