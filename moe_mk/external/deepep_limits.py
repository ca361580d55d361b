"""Limits of the DeepEP family of libraries, as data: shapes for which kernels are built, and buffer sizes.

Pure functions, so that a plan can be made where no library is. At run time a library's own size hint is used.
Source: deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP), nixl_ep (ai-dynamo/nixl) and UCCL-EP (uccl-project/uccl), as read
in July 2026.
"""

from __future__ import annotations

from collections.abc import Mapping

LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Row lengths that low-latency kernels are compiled for."""
LOW_LATENCY_TOP_K = 11
NIXL_HIDDEN, NIXL_TOP_K = tuple(sorted((*LOW_LATENCY_HIDDEN, 3584))), 16
LOW_LATENCY_IN_FLIGHT = 2
"""Two buffers take turns with every dispatch and combine, so a third operation would overwrite the first."""
QP_DEPTH = 1024
"""Work requests a queue pair holds unless its depth is raised; 2 (M + 1) must fit."""
NVLINK_PEERS = 8
"""Ranks of a node at most; more ranks come in whole nodes of as many."""
SCALE_GROUP = 128
"""Channels under one scale."""

HIGH_THROUGHPUT_CHUNKS: Mapping[int, tuple[tuple[int, int, int, int], tuple[int, int, int, int]]] = {
    2: ((24, 256, 6, 128), (10, 256, 6, 128)),
    4: ((6, 256, 6, 128), (9, 256, 6, 128)),
    8: ((6, 256, 6, 128), (4, 256, 6, 128)),
    16: ((36, 288, 20, 128), (4, 288, 12, 128)),
    24: ((32, 288, 8, 128), (1, 288, 8, 128)),
    32: ((32, 288, 8, 128), (1, 288, 8, 128)),
    48: ((32, 288, 8, 128), (1, 288, 8, 128)),
    64: ((32, 288, 8, 128), (1, 288, 8, 128)),
    96: ((20, 480, 12, 128), (1, 480, 8, 128)),
    128: ((20, 560, 12, 128), (1, 560, 8, 128)),
    144: ((32, 720, 12, 128), (2, 720, 8, 128)),
    160: ((28, 720, 12, 128), (2, 720, 8, 128)),
}
"""Ranks that high-throughput kernels are tuned for -> tokens of (NVLink send, receive, RDMA send, receive) chunks of
dispatch and of combine. Other numbers of ranks are refused."""
NUM_SMS = 20
"""Multiprocessors of high-throughput kernels by default; half as many channels."""
QPS_PER_RANK = 24
"""Queue pairs of a V1 buffer by default; kernels between nodes want one for each of their multiprocessors."""
HIGH_THROUGHPUT_ROW_BYTES = 512
"""Rows are padded to a multiple of this."""


def low_latency_bytes(max_tokens: int, hidden: int, num_experts: int) -> int:
    """Bytes of the RDMA buffer of low-latency kernels. Grows with experts x tokens, whatever the number of ranks.

    Two buffers, each with the rows to send and a slot for every token at every expert, and counts.
    """
    scales = 4 * hidden // SCALE_GROUP
    dispatch, combine = 16 + max(2 * hidden, hidden + scales), scales + 2 * hidden
    send = max(max_tokens * dispatch, num_experts * max_tokens * combine)
    receive = num_experts * max_tokens * max(dispatch, combine)
    return up_to(2 * (send + receive + up_to(4 * num_experts, 128)), 128)


def low_latency_tokens(max_tokens: int, ranks: int) -> int:
    """M: the tokens a rank may bring, raised until ranks x M divides by 4 as the kernels want."""
    while ranks * max_tokens % 4:
        max_tokens += 1
    return max_tokens


def most_low_latency_tokens(qp_depth: int = QP_DEPTH) -> int:
    """The largest M that a queue pair of some depth allows."""
    return qp_depth // 2 - 1


def nvlink_bytes(chunk: int, row_bytes: int, ranks: int, num_sms: int = NUM_SMS) -> int:
    """Bytes of the NVLink buffer of high-throughput kernels: a bounded queue, which does not grow with tokens.

    chunk: tokens that a queue of one channel and peer holds.
    """
    peers, nodes, channels = min(ranks, NVLINK_PEERS), max(ranks // NVLINK_PEERS, 1), num_sms // 2
    row = row_bytes + 8 + 128 * 8 + 128 * 4 + 128 * 4
    return up_to(channels * peers * ((2 * nodes + 3) * 4 + chunk * row), 128)


def rdma_bytes(chunk: int, row_bytes: int, ranks: int, num_sms: int = NUM_SMS) -> int:
    """Bytes of the RDMA buffer of high-throughput kernels: queues to and from every node; none inside one node."""
    if ranks <= NVLINK_PEERS:
        return 0
    nodes, channels = ranks // NVLINK_PEERS, num_sms // 2
    row = row_bytes + 8 + 128 * 8 + 128 * 4 + 128 * 4 + 16
    return up_to(2 * channels * nodes * ((NVLINK_PEERS * 2 + 2) * 4 + chunk * row), 128)


def up_to(number: int, multiple: int) -> int:
    """Round a number up to the next multiple."""
    return -(-number // multiple) * multiple
