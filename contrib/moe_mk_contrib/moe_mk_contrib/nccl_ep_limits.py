"""What NCCL EP can be asked for, as data: limits of its kernels and the bytes of its groups.

Pure functions, so that a plan can be made where no library is.
Source: nccl-extensions 0.1.0 (libnccl_ep 0.2.0, github.com/NVIDIA/nccl-extensions): nccl_ep.cc, common.hpp,
device/ht_ep_configs.cuh, as read in November 2026.
"""

from __future__ import annotations

from moe_mk.external.deepep_limits import up_to

ROW_ALIGNMENT = 16
"""Bytes that the physical rows of values and of scales are multiples of."""
LOW_LATENCY_HIDDEN = 128
"""Values that rows of the low-latency combine are a multiple of."""
WARPS, MAX_WARP_GROUPS, CONTROL_WARPS = 32, 14, 1
"""Warps of a low-latency block, the groups that they split into at most, and those that forward no row."""
HT_SMS, HT_TOKENS = 16, 8192
"""Multiprocessors of the high-throughput kernels by default, and the tokens a rank may dispatch at most."""
WORKSPACE_BYTES = 32 << 20
"""Of every group."""
HT_CHUNK = 64
"""Tokens of a chunk between nodes."""
HEADER_ALIGNMENT, BUFFER_ALIGNMENT, REGION, GIN_REGION = 16, 128, 256, 4096


def warp_groups(num_experts: int, sms: int) -> int:
    """Groups that the warps of a low-latency block split into, one for each expert that the block serves."""
    return -(-num_experts // sms)


def least_low_latency_sms(num_experts: int) -> int:
    """Multiprocessors that the low-latency kernels need."""
    return -(-num_experts // MAX_WARP_GROUPS)


def most_low_latency_top_k(num_experts: int, sms: int) -> int:
    """Experts of a token at most: a warp forwards to each of them, and one controls."""
    groups = warp_groups(num_experts, sms)
    return groups * (WARPS // groups) - CONTROL_WARPS


def low_latency_bytes(max_tokens: int, row_bytes: int, ranks: int, num_experts: int, top_k: int) -> int:
    """Bytes of the RDMA buffer of one expert-major group: two banks, each for a dispatch or a combine, and flags."""
    dispatch = up_to(4 + 2 * top_k, HEADER_ALIGNMENT) + row_bytes
    combine = row_bytes // 2 // 128 * 4 + row_bytes
    bank = max(max_tokens * dispatch * (1 + ranks), max_tokens * combine * (num_experts + top_k))
    return up_to(2 * (bank + up_to(4 * num_experts, BUFFER_ALIGNMENT)), BUFFER_ALIGNMENT)


def high_throughput_bytes(max_tokens: int, row_bytes: int, ranks: int, nodes: int, num_experts: int) -> int:
    """Bytes of the buffers of one group: rows of every rank in and out, their scales and dense weights, routing maps.

    Between nodes there are also regions in which rows wait to cross and are summed.
    """
    room, per_node = ranks * max_tokens, ranks // nodes
    near_experts = num_experts // ranks * per_node
    rows, weights = up_to(room * row_bytes, REGION), up_to(room * near_experts * 4, REGION)
    map_bytes = ranks * max_tokens * -(-near_experts // 8) * nodes
    total = WORKSPACE_BYTES + 3 * rows + 2 * weights + map_bytes
    if nodes == 1:
        return total
    crossing, aligned = nodes - 1, up_to(max_tokens, HT_CHUNK) * (nodes - 1)
    gin = [aligned * row_bytes] * 2 + [aligned * near_experts * 4] * 2
    gin += [crossing * (up_to(max_tokens, HT_CHUNK) // HT_CHUNK) * 8] * 2 + [nodes * 8] * 2
    gin += [max_tokens * row_bytes, max_tokens * num_experts * 4]
    gin += [crossing * max_tokens * (row_bytes + near_experts * 4)] * 2
    return total + sum(up_to(part, GIN_REGION) for part in gin)
