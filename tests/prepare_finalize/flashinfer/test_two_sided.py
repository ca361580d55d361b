"""FlashInfer's two-sided transport over its emulation: shared workspaces, limits, bytes."""

import pytest

from moe_mk.lab.testing.conformance import check_transport
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.flashinfer.nvlink import NvlinkTwoSided, fifo_bytes
from tests.support.library_ranks import Ranks, problem, reported, with_top_k

NAME = "nvlink_two_sided"


def test_slots_come_in_fours_whatever_the_experts() -> None:
    assert check_transport(NAME, num_ranks=3, num_experts=7, hidden_size=40) >= 12
    assert [t._numbers.total for t in Ranks(NAME, ExpertMap.linear(6, 2)).transports] == [8, 8]


def test_planned_bytes_are_those_of_the_librarys_formula() -> None:
    # H200, EP8: 132 multiprocessors, half for channels of 1 block each way: 33 channels. 8 * 33 FIFOs of 2 MiB + 256 B
    # for rows, 8 of 1 MiB + 256 B for ids.
    assert fifo_bytes(8, 132) == 264 * (2_097_152 + 256) + 8 * (1_048_576 + 256) == 562_106_368
    assert NvlinkTwoSided.plan(problem("h200")).buffer_bytes == 562_106_368
    assert NvlinkTwoSided.plan(problem("h200", num_tokens=4096)).buffer_bytes == 562_106_368, "tokens do not count"
    # B200, 64 ranks: 148 // 2 // 16 = 4 channels.
    assert fifo_bytes(64, 148) == 64 * 4 * 2_097_408 + 64 * 1_048_832
    transport = Ranks(NAME).transports[0]
    held = [t.shape[1] * 8 for t in reversed(transport._session.buffer)]
    assert sum(held) == fifo_bytes(2, 132)


@pytest.mark.row(76)
def test_every_limit_is_reported() -> None:
    assert reported(NAME, problem("h200")) == {} and reported(NAME, with_top_k(32, "h200")) == {}
    assert reported(NAME, with_top_k(33, "h200"))["top_k"] == "the kernels take 32 experts a token, this router has 33"
    assert "needs all ranks in one node, 32 ranks span 4 nodes" in reported(NAME, problem("h200", ep=32))["fabric"]
    assert set(reported(NAME, problem("b200", ep=256, num_tokens=16, ranks_per_node=256))) == {"ranks"}
    assert (
        set(reported(NAME, problem("mi300x"))) == {"device"}
        and reported(NAME, problem("h200", deterministic=True))["deterministic"]
    )
