"""The emulated flashinfer.comm: its signatures, its laws, and what it refuses as the library does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.lab.testing.emulated.flashinfer import comm as fi
from moe_mk.lab.testing.emulated.flashinfer.comm.mnnvl import MnnvlConfig, TorchDistBackend
from moe_mk.lab.testing.emulated.flashinfer.comm.trtllm_alltoall import MnnvlMoe
from moe_mk.lab.testing.emulated.flashinfer.comm.trtllm_moe_alltoall import (
    moe_a2a_active_rank_mask,
    moe_a2a_get_workspace_size_per_rank,
)
from tests.testing.emulated.row_library_ranks import on_each_rank, on_ranks

MOST, TOP_K, EXPERTS, HIDDEN = 4, 2, 4, 8
NOBODY = 7777


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows or [], dtype=torch.int32).view(-1, TOP_K)


# Rank 0 has tokens a, b; rank 1 has c.   a -> experts 0 and 3   b -> experts 2 and 3   c -> experts 0 and 1
IDS = [ids([0, 3], [2, 3]), ids([0, 1])]
X = [torch.tensor([[1.0], [2.0]]).repeat(1, HIDDEN), torch.tensor([[3.0]]).repeat(1, HIDDEN)]


def opened(group: ThreadCommunicator, **settings: Any) -> fi.MoeAlltoAll:
    mapping = fi.Mapping(group.size, group.rank, group.size, tp_size=group.size, moe_ep_size=group.size)
    config = MnnvlConfig(comm_backend=TorchDistBackend(group))
    size = {"hidden_size": 16 * HIDDEN, **settings}
    return fi.MoeAlltoAll(mapping, MOST, TOP_K, EXPERTS, mnnvl_config=config, **size)


def test_rows_lie_in_the_window_of_their_source_and_padding_is_poison() -> None:
    def job(group: ThreadCommunicator) -> list[Tensor]:
        payloads = [IDS[group.rank], X[group.rank]]
        windows = opened(group).dispatch(IDS[group.rank], payloads, MOST, NOBODY, 0)
        return [window.clone() for window in windows]

    (first_ids, first_x), (second_ids, second_x) = on_ranks(2, job)
    assert first_x.shape == (2, MOST, HIDDEN)
    # Rank 0 gets a from itself and c from rank 1, each once although c wants two of its experts; all picks are kept.
    assert first_x[:, 0, 0].tolist() == [1.0, 3.0] and first_ids[:, 0].tolist() == [[0, 3], [0, 1]]
    assert sorted(second_x[0, :2, 0].tolist()) == [1.0, 2.0]
    assert bool(first_x[:, 1:].isnan().all()) and bool(second_x[1].isnan().all())
    # Only what follows a source's rows is given the invalid id.
    assert first_ids[:, 1:].unique().tolist() == [NOBODY] and second_ids[1].unique().tolist() == [NOBODY]


def test_minus_one_lands_on_rank_0() -> None:
    def job(group: ThreadCommunicator) -> Tensor:
        mine = ids([-1, -1]) if group.rank == 1 else ids()
        return opened(group).dispatch(mine, [torch.ones(len(mine), HIDDEN)], MOST)[0][:, 0, 0].clone()

    first, second = on_ranks(2, job)
    assert first[1].item() == 1.0 and bool(second.isnan().all())


def test_rows_of_a_source_change_places_from_call_to_call() -> None:
    def job(group: ThreadCommunicator) -> set[tuple[float, ...]]:
        exchange, seen = opened(group), set()
        x = torch.arange(1.0, 5.0)[:, None].repeat(1, HIDDEN)
        for _ in range(12):
            (window,) = exchange.dispatch(ids(*[[0, 2]] * 4), [x], MOST)
            seen.add(tuple(window[0, :, 0].tolist()))
            exchange.combine(window.contiguous(), MOST)
        return seen

    assert all(len(seen) > 2 for seen in on_ranks(2, job))


@on_each_rank(2)
def test_the_next_dispatch_destroys_what_the_last_one_returned(group: ThreadCommunicator) -> None:
    exchange = opened(group)
    (window,) = exchange.dispatch(IDS[group.rank], [X[group.rank]], MOST)
    exchange.combine(window.contiguous(), MOST)
    exchange.dispatch(ids(), [torch.empty(0, HIDDEN)], MOST)
    assert float(window.nan_to_num(nan=-1.0).max()) == -1.0


def test_a_masked_rank_gets_no_rows_and_nobody_waits_for_it() -> None:
    mask = moe_a2a_active_rank_mask([0], 2)
    assert mask.tolist() == [1] and mask.dtype == torch.uint64 and mask.device.type == "cpu"

    def job(group: ThreadCommunicator) -> list[int]:
        exchange = opened(group, enable_rank_mask=True)
        if group.rank == 1:
            return []
        (window,) = exchange.dispatch(IDS[0], [X[0]], MOST, active_rank_mask=mask)
        arrived = (~window[..., 0].isnan()).sum(dim=1).tolist()
        y = exchange.combine(window.nan_to_num(nan=0.0).contiguous(), MOST, active_rank_mask=mask)
        return [*arrived, *(y[:, 0] != 0).tolist()]

    # Rank 1 makes no call. Of the tokens of rank 0 only a arrives at rank 0, and comes back from there alone.
    assert on_ranks(2, job) == [[1, 0, 1, 0], []]


def once(call: Callable[[fi.MoeAlltoAll], object], **settings: Any) -> Callable[[ThreadCommunicator], object]:
    return lambda group: call(opened(group, **settings))


EMPTY = torch.empty(0, HIDDEN)


@pytest.mark.parametrize(
    "job,error,message",
    [
        (once(lambda e: e.combine(torch.zeros(2, MOST, 8), MOST)), AssertionError, "before successful dispatch"),
        (once(lambda e: [e.dispatch(ids(), [EMPTY], MOST) for _ in range(2)]), AssertionError, "twice without combine"),
        (once(lambda e: e.dispatch(ids(), [EMPTY], MOST + 1)), AssertionError, "exceeds max_num_tokens"),
        (once(lambda e: e.dispatch(ids(), [EMPTY] * 7, MOST)), RuntimeError, "Too many payloads: 7 > 6"),
        (once(lambda e: e.dispatch(ids().long(), [EMPTY], MOST)), RuntimeError, "int32"),
        (once(lambda e: e.dispatch(ids([4, 0]), [torch.zeros(1, 8)], MOST)), RuntimeError, "illegal memory access"),
        (once(lambda e: e.dispatch(ids(), [torch.empty(0, 500)], MOST)), RuntimeError, "workspace .* insufficient"),
        (
            once(lambda e: e.dispatch(ids(), [torch.empty((0, 3), dtype=torch.uint8), torch.empty(0, 8)], 1)),
            RuntimeError,
            "largest to smallest element size",
        ),
        (
            once(lambda e: e.dispatch(ids(), [EMPTY], MOST, active_rank_mask=moe_a2a_active_rank_mask([0], 2))),
            ValueError,
            "enable_rank_mask",
        ),
        (
            once(lambda e: e.dispatch(ids(), [EMPTY], MOST), enable_rank_mask=True),
            RuntimeError,
            "active_rank_mask must be defined",
        ),
    ],
)
def test_misuse_is_refused_as_the_library_does(job: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        on_ranks(2, job)


def test_unequal_strides_are_reported_instead_of_corrupting_rows() -> None:
    with pytest.raises(RuntimeError, match=r"ranks disagree .*\(0, 3\), \(0, 4\)"):
        on_ranks(2, lambda group: opened(group).dispatch(ids(), [EMPTY], 3 + group.rank))


def test_a_workspace_has_the_size_of_the_formula() -> None:
    # Counters 8 + 8*8 -> 128, flags 32 -> 128 twice, routes 128*22*4 = 11264 twice; 1024 rows of 14400 and of 14336 B.
    assert moe_a2a_get_workspace_size_per_rank(8, 128, 14336 + 64, 14336) == 3 * 128 + 2 * 11264 + 1024 * 28736


def two_sided(group: ThreadCommunicator, slots: int = 4) -> tuple[Any, Any]:
    mapping = fi.Mapping(group.size, group.rank, group.size, tp_size=group.size, moe_ep_size=group.size)
    config = MnnvlConfig(comm_backend=TorchDistBackend(group))
    return MnnvlMoe.get_moe_prepare_workspace(mapping, config), MnnvlMoe.get_moe_workspaces(mapping, config)


def prepared(group: ThreadCommunicator, ids_TK: Tensor, slots: int = 4) -> tuple[Any, Tensor, Tensor, Any]:
    prepare, rows = two_sided(group)
    weights = torch.full(ids_TK.shape, 0.5)
    info, got_ids, got_weights, _ = MnnvlMoe.mnnvl_moe_alltoallv_prepare_without_allgather(
        ids_TK, weights, None, prepare, MOST, group.rank, group.size, slots, slots, TOP_K
    )
    assert got_weights is not None
    return info, got_ids, got_weights, rows


def test_two_sided_rows_lie_behind_each_other_and_foreign_ids_become_the_number_of_slots() -> None:
    def job(group: ThreadCommunicator) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        info, got_ids, got_weights, rows = prepared(group, IDS[group.rank])
        x = MnnvlMoe.mnnvl_moe_alltoallv(X[group.rank], info, rows, group.rank, group.size)
        return x, got_ids, got_weights, info.recv_rank_count_cumsum.tolist()

    (x, got_ids, weights, ends), (_, second_ids, _, second_ends) = on_ranks(2, job)
    assert ends == [1, 2] and second_ends == [2, 2]
    assert x[:2, 0].tolist() == [1.0, 3.0] and bool(x[2:].isnan().all())
    assert got_ids[:2].tolist() == [[0, 4], [0, 1]] and got_ids[2:].unique().tolist() == [4]
    assert weights[:2].unique().tolist() == [0.5] and bool(weights[2:].isnan().all())
    assert sorted(second_ids[:2].tolist()) == [[2, 3], [4, 3]]


@on_each_rank(2)
def test_two_sided_filler_goes_nowhere_and_minus_one_to_rank_0(group: ThreadCommunicator) -> None:
    mine = [ids([4, 4]), ids([-1, -1])][group.rank]
    assert prepared(group, mine)[0].recv_rank_count_cumsum.tolist() == [[0, 1], [0, 0]][group.rank]


def test_two_sided_takes_slots_in_fours_rows_in_16_bytes_and_one_mapping_a_process() -> None:
    with pytest.raises(RuntimeError, match="divisible by 4"):
        on_ranks(2, lambda group: prepared(group, ids(), slots=6))

    def narrow(group: ThreadCommunicator) -> None:
        info, _, _, rows = prepared(group, ids())
        MnnvlMoe.mnnvl_moe_alltoallv(torch.empty(0, 3), info, rows, group.rank, group.size)

    with pytest.raises(RuntimeError, match="aligned to 16 bytes"):
        on_ranks(2, narrow)

    def other(group: ThreadCommunicator) -> None:
        two_sided(group)
        MnnvlMoe.get_moe_workspaces(fi.Mapping(4, group.rank, 4, tp_size=4, moe_ep_size=4), None)

    with pytest.raises(AssertionError, match="only one moe mapping"):
        on_ranks(2, other)
