"""Sizes of DeepEP's buffers, worked by hand."""

import pytest

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


def queue_bytes(slots: int, nodes_in_head: int, chunk: int, row_bytes: int, more: int) -> int:
    """Term by term as csrc/config.hpp of DeepEP adds them: heads, rows, metadata, ids, weights, scales."""
    terms = [4 * nodes_in_head, *(chunk * each for each in (row_bytes, 8, 128 * 8, 128 * 4, 128 * 4, more))]
    return -(-sum(slots * term for term in terms) // 128) * 128


@pytest.mark.parametrize("ranks,nodes,peers", [(2, 1, 2), (8, 1, 8), (16, 2, 8), (64, 8, 8)])
@pytest.mark.parametrize("chunk,row_bytes,sms", [(256, 14336, 20), (128, 7168, 24), (3, 100, 2)])
def test_queues_over_nvlink_and_rdma(ranks: int, nodes: int, peers: int, chunk: int, row_bytes: int, sms: int) -> None:
    size, channels = (chunk, row_bytes, ranks), sms // 2
    assert nvlink_bytes(*size, sms) == queue_bytes(channels * peers, 2 * nodes + 3, chunk, row_bytes, 0)
    both = queue_bytes(2 * channels * nodes, 2 * 8 + 2, chunk, row_bytes, 16) if nodes > 1 else 0
    assert rdma_bytes(*size, sms) == both
    assert nvlink_bytes(256, 14336, 8) == 335_709_824  # 20 multiprocessors: 10 x 8 x (20 + 256 x 16392), 0.31 GiB
