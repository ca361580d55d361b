"""Sizes of DeepEP's buffers, worked by hand."""

from moe_mk.external.deepep_limits import (
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
