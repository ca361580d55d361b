"""Memory that calls use again: lent to one at a time, kept up to a limit, shared by the layers of a group."""

from dataclasses import replace

import pytest
import torch

from moe_mk.comm import LockstepWorld
from moe_mk.config import device_profile
from moe_mk.prepare_finalize.packing import SMALL_BYTES
from moe_mk.prepare_finalize.rows.exchange import KEPT_BYTES, Borrowed, Scratch, kept_bytes
from tests.support.problems import problem

CPU = torch.device("cpu")


def taken(scratch: Scratch, mib: float) -> Borrowed:
    return scratch.take((int(mib * 1024), 1024), torch.uint8, CPU)


def test_what_was_given_back_is_lent_again_and_never_to_two() -> None:
    scratch = Scratch()
    first, second = taken(scratch, 2), taken(scratch, 2)
    assert first.rows.data_ptr() != second.rows.data_ptr(), "both are out"
    scratch.give(first)
    third = scratch.take((1024, 768), torch.bfloat16, CPU)
    assert third.rows.data_ptr() == first.rows.data_ptr() and third.rows.shape == (1024, 768)
    assert third.rows.dtype is torch.bfloat16 and third.rows.is_contiguous()
    assert taken(scratch, 2).rows.data_ptr() not in (second.rows.data_ptr(), third.rows.data_ptr())


def test_the_smallest_piece_that_is_long_enough_is_lent() -> None:
    scratch = Scratch()
    three, nine, five = (taken(scratch, mib) for mib in (3, 9, 5))
    scratch.give(three, nine, five)
    assert [taken(scratch, mib).rows.data_ptr() for mib in (4, 4)] == [five.rows.data_ptr(), nine.rows.data_ptr()]


def test_a_larger_piece_takes_the_place_of_one_that_is_too_short() -> None:
    scratch = Scratch()
    scratch.give(taken(scratch, 2))
    scratch.give(taken(scratch, 5))
    assert [len(memory) for memory in scratch.free] == [5 << 20]


def test_no_more_is_kept_than_the_limit_whatever_was_lent() -> None:
    scratch, half = Scratch(), KEPT_BYTES / 2 / 2**20
    scratch.give(*[taken(scratch, mib) for mib in (2, half, half, 1.5 * half)])
    assert sum(map(len, scratch.free)) <= KEPT_BYTES
    assert [len(memory) for memory in scratch.free] == [int(1.5 * half) << 20], "the largest is worth the most"


@pytest.mark.parametrize("shape", [(0, 7168), (3, 5), (SMALL_BYTES // 1024 - 1, 1024)])
def test_small_pieces_are_nobodys_to_keep(shape: tuple[int, int]) -> None:
    scratch = Scratch()
    borrowed = scratch.take(shape, torch.uint8, CPU)
    assert borrowed.rows.shape == shape and borrowed.memory is None
    scratch.give(borrowed)
    assert scratch.free == []


def test_memory_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    scratch = Scratch()
    with torch.inference_mode():
        scratch.give(taken(scratch, 2))
    assert [memory.is_inference() for memory in scratch.free] == [False]
    taken(scratch, 2).rows.fill_(1)


def test_layers_of_a_rank_share_it_and_ranks_do_not() -> None:
    first, second = LockstepWorld(2).communicators()
    assert Scratch.of(first) is Scratch.of(first) is not Scratch.of(second)


def test_plans_know_what_is_kept_at_most() -> None:
    asked = problem("deepseek_v3", "cpu", 16, ep=4, max_num_tokens=16)
    # 16 tokens to each of 4 ranks, there and as they come: 7,168 bf16 values, 8 ids of 4 B and 8 weights of 4 B.
    assert kept_bytes(asked) == 2 * 16 * 4 * (7168 * 2 + 8 * 4 + 8 * 4)
    wide = problem("deepseek_v3", "cpu", 16, ep=32, max_num_tokens=16)  # a token goes to 8 of 32 ranks at most
    assert kept_bytes(wide) == 2 * 16 * 8 * (7168 * 2 + 8 * 4 + 8 * 4)
    assert kept_bytes(problem("deepseek_v3", "cpu", 16, ep=1)) == 0
    large = replace(asked, config=asked.config.with_(max_num_tokens=8192))
    assert kept_bytes(large) == KEPT_BYTES and kept_bytes(replace(large, device=device_profile("h200"))) == 0
