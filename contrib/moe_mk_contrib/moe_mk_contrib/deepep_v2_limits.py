"""Limits of DeepEP V2's elastic kernels, as data: shapes, multiprocessors and buffer sizes.

Pure functions, so that a plan can be made where no library is. At run time the library's own size hint is used.
Source: deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP), as read in July 2026.
"""

from __future__ import annotations

from math import ceil

from moe_mk.external.deepep_limits import SCALE_GROUP, up_to

LEAST_SMS, SM_READ_GBS, SM_WRITE_GBS = 4, 200.0, 50.0
"""What V2 takes at least, and what it reckons that one multiprocessor reads and writes, GB/s."""
ELASTIC_RANKS, ELASTIC_EXPERTS, ELASTIC_EXPERTS_PER_RANK, ELASTIC_TOP_K = 1024, 2048, 256, 32


def elastic_sms(
    visited_ranks: float, visited_nodes: float, ranks: int, ranks_per_node: int, near_gbs: float, far_gbs: float
) -> int:
    """Multiprocessors that V2 gives its kernels by itself: so many that copies keep up with the link that binds.

    ranks: 2 or more. visited_ranks, visited_nodes: distinct ones that a token is sent to under a balanced gate, its own
    included. near_gbs, far_gbs: of one rank over NVLink and over RDMA. Traffic is counted in rows that arrive at ranks.
    A quarter is added, the sum is even and at least 4; the library also keeps to what the device has. It is not made
    for routing that is limited to groups. Source: ElasticBuffer.get_theoretical_num_sms of deep_ep 2.1.0.
    """
    token, nodes, in_node = 1 / visited_ranks, -(-ranks // ranks_per_node), min(ranks, ranks_per_node)
    read, written, near = token, 1.0, 1 - 1 / in_node
    busy_s = near / near_gbs
    if nodes > 1:
        crossing = token * visited_nodes
        read += crossing
        written += token + crossing / nodes
        busy_s = max(busy_s, crossing * (1 - 1 / nodes) / far_gbs)
    enough = max(read / SM_READ_GBS, written / SM_WRITE_GBS) / busy_s
    return up_to(max(LEAST_SMS, ceil(1.25 * enough)), 2)


def elastic_bytes(max_tokens: int, hidden: int, top_k: int, ranks: int, *, fp8: bool, ranks_per_node: int) -> int:
    """Bytes of an elastic buffer (V2): rows of every rank, or of every node and then of every rank of one."""
    meta = up_to(8 * top_k + 4 * (top_k + 1), 32)
    plain = up_to(2 * hidden, 32) + meta
    row = up_to(hidden, 32) + up_to(4 * (hidden // SCALE_GROUP), 32) + meta if fp8 else plain
    if ranks <= ranks_per_node:
        dispatch = (ranks + 1) * max_tokens * row
    else:
        nodes = ranks // ranks_per_node
        dispatch = row * (ranks_per_node * nodes * max_tokens + max_tokens + nodes * (max_tokens + 1024))
    return up_to(max(dispatch, min(ranks, top_k) * max_tokens * plain), 2 << 20)
