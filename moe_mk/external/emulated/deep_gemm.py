"""DeepGEMM's grouped FP8 GEMMs for Hopper, imitated: layouts, alignments and refusals of sgl-deep-gemm 0.1.5.

Products are summed in f32, 128 terms at a time times both scales, as on the device. Rows that the library does not
write are left as they are. Source: deepseek-ai/DeepGEMM, csrc/apis/gemm.hpp and layout.hpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
SCALES_ALIGNED_TO = 4
"""f32 in 16 bytes: how long a column of activation scales is made."""

Scaled = tuple[Tensor, Tensor]


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows of one expert start at multiples of this."""
    return GROUP


def get_mn_major_tma_aligned_tensor(x: Tensor) -> Tensor:
    """Scales (..., m, k) in f32 with neighbouring rows side by side, each column as long as boxes need."""
    assert x.dtype is torch.float32 and x.dim() in (2, 3)
    *leading, m, k = x.shape
    aligned = -(-m // SCALES_ALIGNED_TO) * SCALES_ALIGNED_TO
    made = torch.full((*leading, k, aligned), torch.nan, dtype=torch.float32, device=x.device).transpose(-1, -2)
    made[..., :m, :].copy_(x)
    return made[..., :m, :]


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    m_indices: Tensor,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """d[r] = a[r] b[m_indices[r]]^T for rows of many experts one behind the other; rows of -1 are not written.

    An expert's rows start at a multiple of the alignment; the library reads one index a tile.
    """
    del recipe, compiled_dims, disable_ue8m0_cast
    (x, x_scales), (m, k) = a, a[0].shape
    _check(x, x_scales, b, d, k)
    assert m_indices.dtype is torch.int32 and m_indices.shape == (m,) and d.shape[0] == m and m % GROUP == 0
    for start in range(0, m, GROUP):
        part = m_indices[start : start + GROUP]
        expert = int(part[0])
        assert bool(((part == expert) | (part == -1)).all()), "a tile of rows belongs to one expert"
        kept = torch.nonzero(part >= 0).flatten() + start
        if len(kept):
            d[kept] = _product(x, x_scales, b, kept, expert).to(d.dtype)


def m_grouped_fp8_gemm_nt_masked(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """d[e, r] = a[e, r] b[e]^T for r < masked_m[e]. expected_m: rows an expert, as a hint for the tile."""
    del recipe, compiled_dims, disable_ue8m0_cast
    (x, x_scales), (groups, m, k) = a, a[0].shape
    assert masked_m.dtype is torch.int32 and masked_m.shape == (groups,) and expected_m > 0
    assert m % 64 == 0, "blocks of fewer than 64 rows are computed wrongly (DeepGEMM issue 268)"
    for expert, count in enumerate(masked_m.tolist()):
        _check(x[expert], x_scales[expert], b, d[expert], k)
        assert count <= m
        if count:
            kept = torch.arange(count, dtype=torch.int64, device=x.device)
            d[expert, :count] = _product(x[expert], x_scales[expert], b, kept, expert).to(d.dtype)


def _check(x: Tensor, x_scales: Tensor, b: Scaled, d: Tensor, k: int) -> None:
    """What the library refuses."""
    (w, w_scales), n = b, b[0].shape[1]
    assert x.dtype is w.dtype is torch.float8_e4m3fn and d.dtype is torch.bfloat16
    assert k % GROUP == 0 and w.shape[2] == k and d.shape[-1] == n
    assert x.stride(-1) == w.stride(-1) == d.stride(-1) == 1
    assert x_scales.dtype is w_scales.dtype is torch.float32
    assert x_scales.shape == (x.shape[0], k // GROUP) and w_scales.shape == (w.shape[0], -(-n // GROUP), k // GROUP)
    assert x_scales.stride(-2) == 1 and x_scales.stride(-1) % SCALES_ALIGNED_TO == 0, "scales are not column-major"


def _product(x: Tensor, x_scales: Tensor, b: Scaled, rows: Tensor, expert: int) -> Tensor:
    codes = x.view(torch.uint8)[rows].view(x.dtype).float().reshape(len(rows), -1, GROUP)
    w, w_scales = b[0][expert].float().reshape(b[0].shape[1], -1, GROUP), b[1][expert].repeat_interleave(GROUP, 0)
    total = torch.zeros((len(rows), w.shape[0]), dtype=torch.float32, device=x.device)
    for block in range(codes.shape[1]):
        scales = x_scales[rows, block, None] * w_scales[None, : w.shape[0], block]
        total += (codes[:, block] @ w[:, block].T) * scales
    return total
