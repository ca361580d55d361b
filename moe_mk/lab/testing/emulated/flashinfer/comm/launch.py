"""Checks of the launchers of one-sided all-to-all, and the rank of an expert id."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

MAX_TOP_K, MAX_PAYLOADS, MAX_RANKS = 22, 6, 64
TOP_KS = frozenset({1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22})
MOE_A2A_RANK_MASK_WORDS = 1
ALIGNMENT = 128
ILLEGAL = "CUDA error: an illegal memory access was encountered"


class SfLayout(Enum):
    """Where the scales of a quantised result lie."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


def check_dispatch(
    ids_TK: Tensor, payloads: Sequence[Tensor], top_k: int, num_experts: int, ep_size: int, most: int
) -> None:
    """Assert the conditions of the launcher of dispatch."""
    check(ids_TK.dtype == torch.int32 and ids_TK.is_contiguous(), "token_selected_experts must be contiguous int32")
    check(ids_TK.dim() == 2 and ids_TK.size(1) == top_k, "token_selected_experts shape mismatch")
    check(top_k in TOP_KS, f"Unsupported top_k {top_k}")
    check(0 < len(payloads) <= MAX_PAYLOADS, f"Too many payloads: {len(payloads)} > {MAX_PAYLOADS}")
    check(0 < ep_size <= MAX_RANKS, f"epSize must be in the range (0, {MAX_RANKS}]")
    check(most > 0 and num_experts >= ep_size, "num_experts must be >= ep_size, and runtime_max_tokens_per_rank > 0")
    total = 0
    for number, payload in enumerate(payloads):
        check(payload.dim() == 2 and payload.is_contiguous(), f"payload {number} must be 2D and contiguous")
        check(payload.size(0) == len(ids_TK), f"payload {number} first dimension must match local_num_tokens")
        total += ep_size * most * payload.size(1) * payload.element_size()
        check(
            total % payload.element_size() == 0,
            f"Misaligned payload buffer {number} with element size {payload.element_size()}. Consider reordering "
            "payloads by largest to smallest element size",
        )
    check(len(ids_TK) <= most, f"{ILLEGAL} ({len(ids_TK)} tokens in windows of {most})")


def rank_of(ids_TK: Tensor, num_experts: int, ep_size: int) -> Tensor:
    """Integer division as C has it: towards zero. The first ranks hold one expert more where they do not divide."""
    base, extra = divmod(num_experts, ep_size)
    fuller = extra * (base + 1)
    in_fuller = torch.div(ids_TK, base + 1, rounding_mode="trunc")
    behind = extra + torch.div(ids_TK - fuller, base, rounding_mode="trunc")
    rank_TK = torch.where(ids_TK < fuller, in_fuller, behind)
    check(bool(((rank_TK >= 0) & (rank_TK < ep_size)).all()), ILLEGAL)
    return rank_TK


def alive_ranks(enabled: bool, mask: Tensor | None, ep_rank: int, ep_size: int) -> list[bool]:
    """The bits of an active-rank mask, by rank; all ranks where masks are not enabled."""
    if not enabled:
        check(mask is None, "active_rank_mask requires enable_rank_mask=True")
        return [True] * ep_size
    check(mask is not None, "active_rank_mask must be defined when enable_rank_mask=True")
    assert mask is not None
    check(mask.device.type == "cpu" and mask.dtype == torch.uint64, "active_rank_mask must be a CPU uint64 tensor")
    check(mask.dim() == 1 and len(mask) == MOE_A2A_RANK_MASK_WORDS, "active_rank_mask must have exactly 1 element")
    bits = int(mask.item())
    check(bool(bits >> ep_rank & 1), f"active_rank_mask must mark the local ep_rank ({ep_rank}) as active")
    return [bool(bits >> rank & 1) for rank in range(ep_size)]


def check_backend(backend: str) -> None:
    """Which kernels serve; both have one protocol."""
    if backend not in ("trtllm", "cake"):
        raise ValueError(f"Unknown MoE all-to-all backend {backend!r}; expected 'trtllm' or 'cake'")


def check(holds: bool, message: str) -> None:
    """Fail as an assertion of the C++ side does."""
    if not holds:
        raise RuntimeError(message)


def aligned(num_bytes: int) -> int:
    """Up to the next line of 128 bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
