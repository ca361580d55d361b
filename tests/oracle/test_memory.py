"""What a pair holds in addition to the weights, part by part, and the most tokens that a device has room for."""

from dataclasses import replace
from functools import partial

import pytest

from moe_mk import UnsupportedError, oracle
from moe_mk.experts import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.lab.cli.explain import memory_lines
from moe_mk.oracle.memory import Buffers, expected_reads, most_tokens, resident_experts, room_of, weights_bytes
from tests.support import problems

TRITON = frozenset({"triton"})
problem = partial(problems.problem, device="h200", num_tokens=128, installed=TRITON)


@pytest.mark.parametrize("ep,slots,here", [(64, 4, 4), (256, 1, 1), (8, 32, 8)])
def test_every_workspace_is_counted_by_hand(ep: int, slots: int, here: int) -> None:
    # 10 rows of DeepSeek-V3 (H 7168, I 2048, top 8) on one of the ranks, where so many of a row's 8 choices may be.
    asked, rows = problem(ep=ep), 10
    found = {name: experts.workspace_bytes(asked, rows) for name, experts in [*EXPERTS.items(), *MONOLITHIC.items()]}
    row, inner = 10 * 7168, 2048
    by_hand = {
        "reference": 4 * (3 * row + 10 * 3 * inner + 3 * 7168 * inner),  # f32, and one expert
        "torch_cpu": 2 * (10 * 8 * 2 * 7168 + 10 * 3 * inner),  # bf16: rows and outputs of 8 experts each
        "cpu_native": 80 * inner * 2 + 4 * row,  # hidden rows in bf16, sums in f32
        "triton": row + 10 * 4 * 56 + 10 * here * (3 * inner + 2 * 7168 + 20),
        "deep_gemm": (10 * here + slots * 128) * (3 * 7168 + 5 * inner),  # each expert's rows padded to 128
        "flashinfer_trtllm": 80 * (2 * 7168 + 3 * inner) * 4,  # the default: every assignment in f32
    }
    by_hand["reference_monolithic"] = by_hand["reference"] + 10 * (256 + 2 * 8) * 4  # logits, ids and weights
    assert {name: found[name] for name in by_hand} == by_hand


def test_a_decision_states_all_of_it_for_the_limit_and_for_the_tokens_asked_for() -> None:
    decision = oracle.select(problem(ep=32, experts="triton", prepare_finalize="hierarchical"))
    stated, by = decision.as_dict(), vars(decision.buffers)
    assert stated["bytes"]["buffers_by"] == by and stated["bytes"]["buffers"] == sum(by.values())
    assert stated["bytes"]["least_buffers"] == decision.least_buffers.total and stated["tokens_that_fit"] == 8192


def test_the_most_tokens_just_fit() -> None:
    pins = {"prepare_finalize": "all_to_all", "experts": "triton"}
    asked = problem(ep=256, **pins)
    decision = oracle.select(asked)
    most = decision.tokens_that_fit
    assert asked.num_tokens < most < asked.config.kernel.max_num_tokens

    def need(limit: int) -> int:
        limited = oracle.select(problem(ep=256, num_tokens=1, max_num_tokens=limit, **pins))
        return weights_bytes(asked) + limited.buffers.total

    assert need(most) <= room_of(asked) < need(most + 1)
    assert room_of(asked) == 139 * 2**30


@pytest.mark.parametrize("room,expected", [(0, 1), (10, 1), (999, 99), (1000, 100), (5000, 100)])
def test_the_search_keeps_to_its_ends(room: int, expected: int) -> None:
    asked = problem(ep=32, num_tokens=1, max_num_tokens=100)
    free = room_of(asked) - weights_bytes(asked)
    # Each token takes ten bytes; the rest is as large as leaves `room`.
    held = most_tokens(asked, lambda given: Buffers(free - room, 10 * given.num_tokens, 0))
    assert held == expected


def test_an_explanation_states_who_holds_it_and_what_makes_it_less() -> None:
    pins = {"prepare_finalize": "all_to_all", "experts": "triton"}
    total, parts, room = memory_lines(oracle.select(problem(ep=256, **pins)))
    assert "for 8192 tokens per rank [kernel.max_num_tokens]" in total
    assert "worst routing" in parts and "triton 58.5 GB" in parts and parts.endswith("GB with a limit of 128")
    assert room.startswith("more than the 149 GB of h200, which hold a limit of ")
    enough = memory_lines(oracle.select(problem(ep=32, max_num_tokens=128, **pins)))
    assert len(enough) == 2 and "with a limit" not in enough[1]


def test_a_pair_that_fits_to_the_last_byte_is_eligible_and_with_one_byte_less_it_is_not() -> None:
    pins = {"prepare_finalize": "no_ep", "experts": "reference", "max_num_tokens": 16}
    ask = problems.problem("tiny", "cpu", 16, **pins)
    decision = oracle.select(ask)
    need = decision.weights_bytes + decision.buffer_bytes
    for missing in (0, 1):
        room = replace(ask, device=ask.device.model_copy(update={"memory_gib": (need - missing) / 2**30}))
        if missing:
            with pytest.raises(UnsupportedError, match="exceed the device's"):
                oracle.select(room)
        else:
            assert oracle.select(room).chosen == decision.chosen


@pytest.mark.parametrize(("ep", "tokens"), [(1, 64), (4, 64), (4, 1), (4, 7), (64, 64), (256, 64)])
def test_no_rank_counts_more_resident_experts_than_it_has(ep: int, tokens: int) -> None:
    made = partial(problems.problem, device="cpu", ep=ep, num_tokens=tokens)
    whole, of_one = made(), weights_bytes(made(residency={"slots": 1, "store": "/tmp"}))
    for slots in (1, 2, 63, 64, 65, 256, 1000):
        asked = made(residency={"slots": slots, "store": "/tmp"})
        assert resident_experts(asked) == min(slots, whole.slots)
        if (reads := expected_reads(asked)) is not None:  # the tokens of all ranks have 8 choices each
            most = min(whole.slots, ep * tokens * 8)
            assert (reads.most_used, reads.least_bytes) == (most, max(most - slots, 0) * of_one)
    for num_bytes in (1, of_one - 1, of_one, 2 * of_one, whole.slots * of_one - 1, 10_000 * of_one):
        asked = made(residency={"bytes": num_bytes, "store": "/tmp"})
        assert resident_experts(asked) == min(max(num_bytes // of_one, 1), whole.slots)
