"""What a pair holds in addition to the weights, part by part, and the most tokens that a device has room for."""

from dataclasses import replace
from functools import partial

import pytest

from moe_mk import UnsupportedError, oracle
from moe_mk.experts import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.lab.cli.explain import memory_lines
from moe_mk.oracle.memory import (
    Buffers,
    buffers_of,
    limited_to,
    most_tokens,
    resident_experts,
    room_of,
    weights_bytes,
)
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant.fp8 import FP8_1x128
from tests.support import problems

TRITON = frozenset({"triton"})
problem = partial(problems.problem, device="h200", num_tokens=128, installed=TRITON)


def test_buffers_are_counted_by_hand() -> None:
    # 4 ranks of 8 tokens: 32 rows. A row on the wire has 7168 codes and 56 scales of 4 bytes, 7392 bytes, and is there
    # as bytes and as tensors; its output is 7168 values in f32 and in bf16.
    asked = problem(ep=4, num_tokens=8, experts="triton", prepare_finalize="all_to_all")
    transport, workspace = PREPARE_FINALIZE["all_to_all"], EXPERTS["triton"].workspace_bytes
    held = buffers_of(transport, FP8_1x128, workspace, asked)
    assert held.rows == 32 * (2 * 7392 + 7168 * (4 + 2))
    assert (held.workspace, held.transport) == (workspace(asked, 32), 0)
    assert held.total == held.rows + held.workspace


def test_a_workspace_has_room_for_the_assignments_that_a_rank_can_get() -> None:
    """128 tokens of each of 256 ranks are 32,768 rows; with one expert on a rank, a row has one assignment of its 8."""
    workspace = EXPERTS["triton"].workspace_bytes
    one, four, wide = (workspace(problem(ep=ep), 32_768) for ep in (256, 64, 8))
    per_assignment = 3 * 2048 + 2 * 7168 + 20
    assert one == 32_768 * (7168 + 4 * 56 + per_assignment) and one < 1e9
    assert (four - one, wide - one) == (3 * 32_768 * per_assignment, 7 * 32_768 * per_assignment)


def test_every_workspace_is_counted_by_hand() -> None:
    # 10 rows of DeepSeek-V3 (H 7168, I 2048, top 8) on one of 64 ranks, which holds 4 experts: 80 assignments.
    asked, rows = problem(ep=64), 10
    found = {name: experts.workspace_bytes(asked, rows) for name, experts in [*EXPERTS.items(), *MONOLITHIC.items()]}
    row, inner = 10 * 7168, 2048
    by_hand = {
        "reference": 4 * (3 * row + 10 * 3 * inner + 3 * 7168 * inner),  # f32, and one expert
        "torch_cpu": 2 * (10 * 8 * 2 * 7168 + 10 * 3 * inner),  # bf16: rows and outputs of 8 experts each
        "cpu_native": 80 * inner * 2 + 4 * row,  # hidden rows in bf16, sums in f32
        "triton": row + 10 * 4 * 56 + 40 * (3 * inner + 2 * 7168 + 20),  # 4 of the 8 choices at most are here
        "deep_gemm": (40 + 4 * 128) * (3 * 7168 + 5 * inner),  # each expert's rows padded to 128
        "flashinfer_trtllm": 80 * (2 * 7168 + 3 * inner) * 4,  # the default: every assignment in f32
    }
    by_hand["reference_monolithic"] = by_hand["reference"] + 10 * (256 + 2 * 8) * 4  # logits, ids and weights
    assert {name: found[name] for name in by_hand} == by_hand


def test_a_decision_counts_all_of_it_for_the_limit_and_for_the_tokens_asked_for() -> None:
    decision = oracle.select(problem(ep=32, experts="triton", prepare_finalize="hierarchical"))
    assert decision.problem.config.kernel.max_num_tokens == 8192 == 64 * 128
    # Rows, workspace, and what the transport relays all grow with the limit, and so does their sum.
    assert decision.buffers.total == 64 * decision.least_buffers.total == decision.buffer_bytes
    assert decision.buffers.transport == 64 * decision.least_buffers.transport > 0
    stated = decision.as_dict()
    by = {
        "rows": decision.buffers.rows,
        "workspace": decision.buffers.workspace,
        "transport": decision.buffers.transport,
    }
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


def test_a_lower_limit_changes_nothing_else() -> None:
    asked = problem(ep=32, relay_tokens=64, timeout_s=7.0)
    limited = limited_to(asked, 16)
    assert (limited.num_tokens, limited.config.kernel.max_num_tokens) == (16, 16)
    assert limited.config.kernel.timeout_s == 7.0 and limited.device is asked.device
    assert (asked.num_tokens, asked.config.kernel.max_num_tokens) == (128, 8192)


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


@pytest.mark.parametrize("ep", [1, 4, 64, 256])
def test_no_rank_counts_more_resident_experts_than_it_has(ep: int) -> None:
    made = partial(problems.problem, device="cpu", ep=ep)
    whole = made()
    for slots in (1, 2, 63, 64, 65, 256, 1000):
        asked = made(residency={"slots": slots, "store": "/tmp"})
        assert resident_experts(asked) == min(slots, whole.slots)
    of_one = weights_bytes(made(residency={"slots": 1, "store": "/tmp"}))
    for num_bytes in (1, of_one - 1, of_one, 2 * of_one, 10_000 * of_one):
        asked = made(residency={"bytes": num_bytes, "store": "/tmp"})
        assert resident_experts(asked) == min(max(num_bytes // of_one, 1), whole.slots)
