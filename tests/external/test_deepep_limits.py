"""Sizes of DeepEP's buffers, worked by hand."""

from math import comb

import pytest

from moe_mk.external.deepep_limits import (
    elastic_bytes,
    elastic_sms,
    low_latency_bytes,
    low_latency_tokens,
    most_low_latency_tokens,
    nvlink_bytes,
    rdma_bytes,
    up_to,
)


def test_a_small_low_latency_buffer() -> None:
    # H=2048: 16 + 4096 out, 64 + 4096 = 4160 combined. 4 tokens, 3 experts: 12 rows to send, 12 to receive, twice;
    # 12 bytes of counts take 128.
    assert low_latency_bytes(4, 2048, 3) == 2 * (2 * 12 * 4160 + 128)
    # With one expert and one token the row to send is also a message back.
    assert low_latency_bytes(1, 2048, 1) == up_to(2 * (2 * 4160 + 128), 128)


def test_tokens_are_raised_until_ranks_share_them_in_fours() -> None:
    assert [low_latency_tokens(1, ranks) for ranks in (1, 2, 3, 4, 8)] == [4, 2, 4, 1, 1]
    assert low_latency_tokens(511, 8) == 511 == most_low_latency_tokens() and low_latency_tokens(511, 2) == 512
    assert most_low_latency_tokens(2050) == 1024, "1024 tokens need a depth of 2050"


def test_queues_over_nvlink_and_rdma() -> None:
    assert nvlink_bytes(256, 14336, 8) == 335_709_824  # 10 x 8 x (20 + 256 x 16392), 0.31 GiB
    assert nvlink_bytes(256, 14336, 2) == up_to(10 * 2 * (20 + 256 * 16392), 128)
    assert rdma_bytes(128, 14336, 8) == 0 and rdma_bytes(128, 14336, 16) == up_to(2 * 10 * 2 * (72 + 128 * 16408), 128)


def test_elastic_buffers_grow_with_tokens_times_ranks() -> None:
    plain = elastic_bytes(128, 7168, 8, 8, fp8=False, ranks_per_node=8)
    assert plain == up_to(9 * 128 * 14464, 2 << 20) == 16_777_216
    # FP8 rows are 7168 + 224 + 128; sums still return as bf16: 8 x 128 x 14464 is more.
    assert elastic_bytes(128, 7168, 8, 8, fp8=True, ranks_per_node=8) == up_to(8 * 128 * 14464, 2 << 20)
    assert elastic_bytes(128, 7168, 8, 16, fp8=False, ranks_per_node=8) > 2 * plain


def visited(groups: int) -> float:
    """Expected groups that a token visits: 256 experts, top-8."""
    return groups * (1 - comb(256 - 256 // groups, 8) / comb(256, 8))


@pytest.mark.row(50)
def test_the_analytic_multiprocessors_of_v2_by_hand() -> None:
    # Two ranks of one node, every token visits both. Reads half a row for each that arrives, writes one; half of them
    # cross. 50 GB/s carry 100 GB/s of arriving rows: 2 multiprocessors write that, 0.25 read it. 2.5 is less than 4.
    assert elastic_sms(2.0, 1.0, 2, 8, 50.0, 1.0) == 4
    # 500 GB/s: 20 write, a quarter more is 25, made even.
    assert elastic_sms(2.0, 1.0, 2, 8, 500.0, 1.0) == 26
    # Two nodes of one rank: writes 1 + 1/2 + 1/2 (its own node's half of two nodes), and 1/2 crosses at 40 GB/s:
    # 80 GB/s of rows, 160 GB/s written, 3.2 multiprocessors and a quarter more.
    assert elastic_sms(2.0, 2.0, 2, 1, 500.0, 40.0) == 4
    assert elastic_sms(2.0, 2.0, 2, 1, 500.0, 400.0) == 40


@pytest.mark.row(50)
@pytest.mark.parametrize(
    "ranks,near_gbs,published",
    [(16, 430.0, 12), (32, 430.0, 6), (8, 810.0, 24)],
    ids=["SM90, two nodes", "SM90, four nodes", "SM100, one node"],
)
def test_the_analytic_multiprocessors_are_those_of_deepep_s_table(ranks: int, near_gbs: float, published: int) -> None:
    # README of DeepEP V2: 256 experts, top-8, no limit of groups; NVLink at nine tenths of its speed, 50 GB/s of RDMA.
    assert elastic_sms(visited(ranks), visited(-(-ranks // 8)), ranks, 8, near_gbs, 50.0) == published
