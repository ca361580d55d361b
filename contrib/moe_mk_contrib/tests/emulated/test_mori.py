"""The emulated mori: its signatures, its laws, and what it refuses as the library does."""

from typing import Any

import pytest
import torch
from moe_mk_contrib.emulated.mori import ops, shmem
from torch import Tensor

from moe_mk.comm.threads import ThreadCommunicator
from tests.testing.emulated.row_library_ranks import on_each_rank, on_ranks

MOST, HIDDEN = 4, 8

# Rank 0 has tokens a, b; rank 1 has c.   a -> experts 0 and 3   b -> expert 2, and nowhere   c -> experts 0 and 1
IDS = [torch.tensor([[0, 3], [2, -1]], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)]
X = [torch.tensor([[1.0], [2.0]]).repeat(1, HIDDEN), torch.tensor([[3.0]]).repeat(1, HIDDEN)]


def opened(group: ThreadCommunicator, **settings: Any) -> ops.EpDispatchCombineOp:
    shmem.shmem_torch_process_group_init(group.group_name)
    sizes = {"scale_dim": 0, "scale_type_size": 1, "max_token_type_size": 4, "max_num_inp_token_per_rank": MOST}
    sizes |= {"num_experts_per_rank": 2, "num_experts_per_token": 2, "gpu_per_node": group.size, **settings}
    return ops.EpDispatchCombineOp(ops.EpDispatchCombineConfig(torch.float32, group.rank, group.size, HIDDEN, **sizes))


def sent(op: ops.EpDispatchCombineOp, rank: int, **changed: Any) -> Any:
    given = {"input": X[rank], "weights": torch.full((len(X[rank]), 2), 0.5), "scales": None, "indices": IDS[rank]}
    return op.dispatch(**{**given, **changed})


def test_rows_of_all_sources_lie_in_any_order_before_the_total() -> None:
    def job(group: ThreadCommunicator) -> Any:
        x, weights, scales, ids, total = sent(opened(group), group.rank)
        return x.clone(), weights.clone(), scales, ids.clone(), int(total)

    (x, weights, scales, ids, total), (_, _, _, second_ids, second_total) = on_ranks(2, job)
    assert (total, second_total, scales) == (2, 2, None) and x.shape == (2 * MOST, HIDDEN)
    # Rank 0 gets a and c, each once although c wants two of its experts. Ids arrive as they were sent, -1 included.
    assert sorted(x[:2, 0].tolist()) == [1.0, 3.0] and sorted(ids[:2].tolist()) == [[0, 1], [0, 3]]
    assert sorted(second_ids[:2].tolist()) == [[0, 3], [2, -1]]
    assert bool(x[2:].isnan().all()) and bool(weights[2:].isnan().all())
    assert bool((ids[2:] >= 0).all()), "behind the total lie ids that look like any other"


def test_combine_adds_one_row_of_each_rank_and_leaves_the_rest_of_its_room_alone() -> None:
    def job(group: ThreadCommunicator) -> Tensor:
        op = opened(group)
        x = sent(op, group.rank)[0]
        out, weights = op.combine(10.0 ** (1 + group.rank) * x, None, IDS[group.rank])
        assert weights is None and out.shape == (MOST, HIDDEN)
        return out.clone()

    first, second = on_ranks(2, job)
    assert first[:2, 0].tolist() == [110.0, 200.0] and second[:1, 0].tolist() == [30.0]
    assert bool(first[2:].isnan().all()) and bool(second[1:].isnan().all())


@on_each_rank(2)
def test_everything_returned_is_poison_after_the_next_call(group: ThreadCommunicator) -> None:
    op = opened(group)
    x, weights, _, ids, _ = sent(op, group.rank)
    out, _ = op.combine(x.clone(), None, IDS[group.rank])
    after_combine = [bool(x.isnan().all()), bool(weights.isnan().all()), bool((ids < 0).all())]
    was_there = not bool(out[0].isnan().any())
    sent(op, group.rank)
    assert [*after_combine, was_there, bool(out.isnan().all())] == [True] * 5


@pytest.mark.parametrize(
    "changed,error,message",
    [
        ({"input": X[0].half()}, KeyError, "float16"),
        ({"indices": IDS[0].long()}, AssertionError, "ids torch.int64"),
        ({"indices": IDS[0] + 2}, AssertionError, "an id of no rank"),
        ({"input": X[0].repeat(3, 1), "indices": IDS[0].repeat(3, 1)}, AssertionError, "6 tokens"),
        ({"scales": X[0]}, AssertionError, "scale_dim=0"),
        ({"input": X[0].repeat(1, 2)}, AssertionError, "rows of 16"),
    ],
)
def test_dispatch_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        on_ranks(1, lambda group: sent(opened(group, num_experts_per_rank=4), 0, **changed))


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"num_experts_per_token": 10}, "top-k 10"),
        ({"gpu_per_node": 3}, "gpu_per_node=3"),
        ({"rank": 1}, "not those of shmem"),
    ],
)
@on_each_rank(1)
def test_an_operator_refuses_sizes(group: ThreadCommunicator, settings: dict[str, Any], message: str) -> None:
    config = ops.EpDispatchCombineConfig(**{**vars(opened(group).config), **settings})
    with pytest.raises(AssertionError, match=message):
        ops.EpDispatchCombineOp(config)


@on_each_rank(1)
def test_combine_wants_the_ids_that_were_dispatched(group: ThreadCommunicator) -> None:
    op = opened(group, num_experts_per_rank=4)
    x = sent(op, 0)[0]
    with pytest.raises(ValueError, match="indices has 1 rows but this rank dispatched 2 tokens"):
        op.combine(x, None, IDS[1])
    with pytest.raises(AssertionError, match="wants the ids that this rank dispatched"):
        op.combine(x, None, IDS[0] + 1)


@on_each_rank(1)
def test_an_operator_has_one_call_under_way(group: ThreadCommunicator) -> None:
    op = opened(group, num_experts_per_rank=4)
    sent(op, 0)
    with pytest.raises(AssertionError, match="before the combine of the last one"):
        sent(op, 0)


def test_before_the_heap_is_set_up_there_is_no_operator() -> None:
    with pytest.raises(RuntimeError, match="shmem is not initialized"):
        on_ranks(1, lambda group: shmem.shmem_mype())
    with pytest.raises(AssertionError, match="shmem is not initialized"):
        on_ranks(1, lambda group: ops.EpDispatchCombineOp(ops.EpDispatchCombineConfig(*[1] * 10)))  # type: ignore[arg-type]
