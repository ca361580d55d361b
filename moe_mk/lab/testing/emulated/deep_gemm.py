"""DeepGEMM's grouped GEMMs, imitated: layouts, alignments and refusals, of Hopper for FP8 blocks, of Blackwell for FP4.

Products are summed in f32, a group of terms at a time times both scales, as on the device. Rows that the library does
not write are left as they are. Read at DeepGEMM 2.6.1 (deepseek-ai/DeepGEMM, csrc/apis/gemm.hpp and layout.hpp) and
sgl-deep-gemm 0.1.5, whose names this has: the fork has no `m_grouped_fp8_gemm_nt_masked`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.kernels.reference import e2m1

GROUP = 128
SCALES_ALIGNED_TO = 4
"""f32 or int32 in 16 bytes: how long a column of scales is made."""
E4M3 = torch.float8_e4m3fn

Scaled = tuple[Tensor, Tensor]
Recipe = tuple[int, int] | tuple[int, int, int]


def architecture(group: int) -> int:
    """The major compute capability that is imitated: groups of 32 are Blackwell's."""
    return 9 if group == GROUP else 10


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows of one expert start at multiples of this."""
    return GROUP


def transform_sf_into_required_layout(
    sf: Tensor, mn: int, k: int, recipe: Recipe, num_groups: int | None = None, is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
) -> Tensor:  # fmt: skip
    """Scales as a kernel reads them: f32 in long columns (rows) or as they are (weights); on Blackwell packed.

    recipe: rows and columns that share a scale, or the rows of both sides and their columns.
    """
    assert not disable_ue8m0_cast
    assert (len(recipe) == 3) == (is_sfa is not None), "a recipe of both sides, or of one"
    rows = recipe[0] if is_sfa is not False else recipe[1]
    group = recipe[-1]
    _check_scales(sf, mn, k, rows, group, num_groups)
    if sf.dtype is torch.int32:
        assert rows == 1 and architecture(group) == 10, "Unknown SF transformation"
        assert sf.stride(-2) == 1 and sf.stride(-1) % SCALES_ALIGNED_TO == 0, "scales are not column-major"
        return sf
    if architecture(group) == 9:
        if rows == GROUP:
            assert sf.is_contiguous()
            return sf
        return _in_columns(sf)
    return _in_columns(_packed(sf if rows == 1 else sf.repeat_interleave(rows, -2)[..., :mn, :]))


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Scaled, b: Scaled, d: Tensor, grouped_layout: Tensor, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False, use_psum_layout: bool = False, ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:  # fmt: skip
    """d[r] = a[r] b[grouped_layout[r]]^T for rows of many experts one behind the other; rows of -1 are not written.

    An expert's rows start at a multiple of the alignment; the library reads one index a tile.
    """
    assert recipe is None and not disable_ue8m0_cast and not use_psum_layout and expected_m_for_psum_layout is None
    del compiled_dims, ensure_zero_padding
    (x, x_scales), m = a, a[0].shape[0]
    product = Product(x, b, (x_scales, None), (recipe_a, recipe_b))
    assert grouped_layout.dtype is torch.int32 and grouped_layout.shape == (m,) and grouped_layout.is_contiguous()
    assert d.dtype is torch.bfloat16 and d.shape == (m, product.n) and d.stride(-1) == 1 and m % GROUP == 0
    for start in range(0, m, GROUP):
        part = grouped_layout[start : start + GROUP]
        expert = int(part[0])
        assert bool(((part == expert) | (part == -1)).all()), "a tile of rows belongs to one expert"
        kept = torch.nonzero(part >= 0).flatten() + start
        if len(kept):
            d[kept] = product.of(x, product.rows, kept, expert).to(d.dtype)


m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Scaled, b: Scaled, d: Tensor, masked_m: Tensor, expected_m: int, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """d[e, r] = a[e, r] b[e]^T for r < masked_m[e]. expected_m: rows an expert, as a hint for the tile."""
    assert recipe is None and not disable_ue8m0_cast
    del compiled_dims
    (x, x_scales), (groups, m) = a, a[0].shape[:2]
    product = Product(x, b, (x_scales, groups), (recipe_a, recipe_b))
    assert masked_m.dtype is torch.int32 and masked_m.shape == (groups,) and expected_m > 0
    assert d.dtype is torch.bfloat16 and d.shape == (groups, m, product.n) and d.stride(-1) == 1
    assert m % 64 == 0, "blocks of fewer than 64 rows are computed wrongly (DeepGEMM issue 268)"
    for expert, count in enumerate(masked_m.tolist()):
        assert count <= m
        if count:
            kept = torch.arange(count, dtype=torch.int64, device=x.device)
            d[expert, :count] = product.of(x[expert], product.rows[expert], kept, expert).to(d.dtype)


fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked


class Product:
    """One call's operands, checked, with the scales that the kernel would read."""

    def __init__(
        self, x: Tensor, b: Scaled, scales: tuple[Tensor, int | None], recipes: tuple[Recipe | None, Recipe | None]
    ) -> None:
        w, w_scales = b
        (x_scales, groups), (recipe_a, recipe_b) = scales, recipes
        four = w.dtype is torch.int8
        assert x.dtype is E4M3 and (four or w.dtype is E4M3) and x.stride(-1) == w.stride(-1) == 1
        self.w, self.n, k = w, w.shape[1], x.shape[-1]
        assert k % GROUP == 0 and w.shape[2] * (2 if four else 1) == k, "the sides do not meet"
        assert (recipe_a is None) == (recipe_b is None)
        given: tuple[Recipe, bool | None, Recipe, bool | None]
        if recipe_a is not None and recipe_b is not None:
            given, self.group = (recipe_a, None, recipe_b, None), recipe_b[-1]
        else:
            default = (1, 128, 128) if w_scales.dtype is torch.float32 else (1, 1, 128)
            given, self.group = (default, True, default, False), GROUP
        assert not four or architecture(self.group) == 10, "FP4 is Blackwell's"
        self.rows = transform_sf_into_required_layout(x_scales, x.shape[-2], k, given[0], groups, given[1])
        self.columns = transform_sf_into_required_layout(w_scales, self.n, k, given[2], w.shape[0], given[3])

    def of(self, x: Tensor, x_scales: Tensor, rows: Tensor, expert: int) -> Tensor:
        """Chosen rows (m, K) times one expert's matrix, in f32."""
        group, w = self.group, self.w[expert]
        codes = x.view(torch.uint8)[rows].view(x.dtype).float().reshape(len(rows), -1, group)
        decoded = e2m1.decode(e2m1.unpack(w.view(torch.uint8))) if w.dtype is torch.int8 else w.float()
        factors, own = decoded.reshape(self.n, -1, group), _decoded(self.columns[expert], codes.shape[1])
        own = own if len(own) == self.n else own.repeat_interleave(GROUP, 0)[: self.n]
        mine = _decoded(x_scales, codes.shape[1])[rows]
        total = torch.zeros((len(rows), self.n), dtype=torch.float32, device=x.device)
        for part in range(codes.shape[1]):
            total += (codes[:, part] @ factors[:, part].T) * (mine[:, part, None] * own[None, :, part])
        return total


def _check_scales(sf: Tensor, mn: int, k: int, rows: int, group: int, num_groups: int | None) -> None:
    assert sf.dtype in (torch.float32, torch.int32) and sf.dim() == 2 + (num_groups is not None)
    assert num_groups is None or sf.shape[0] == num_groups
    held = group * (1 if sf.dtype is torch.float32 else 4)
    assert sf.shape[-2] == -(-mn // rows) and sf.shape[-1] == -(-k // held), f"scales {tuple(sf.shape)}"


def _in_columns(sf: Tensor) -> Tensor:
    """Neighbouring rows side by side, each column as long as boxes need; the padding between is poison."""
    *leading, m, k = sf.shape
    long = -(-m // SCALES_ALIGNED_TO) * SCALES_ALIGNED_TO
    poison = torch.nan if sf.dtype is torch.float32 else -1
    made = torch.full((*leading, k, long), poison, dtype=sf.dtype, device=sf.device).transpose(-1, -2)
    made[..., :m, :].copy_(sf)
    return made[..., :m, :]


def _packed(sf: Tensor) -> Tensor:
    """The exponents of four f32 scales in one int32; mantissas are dropped."""
    octets = (sf.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    spare = -octets.shape[-1] % 4
    return torch.nn.functional.pad(octets, (0, spare)).contiguous().view(torch.int32)


def _decoded(scales: Tensor, groups: int) -> Tensor:
    """(rows, groups) in f32."""
    if scales.dtype is torch.float32:
        return scales
    octets = torch.empty(scales.shape, dtype=torch.int32, device=scales.device).copy_(scales).view(torch.uint8)
    return (octets[:, :groups].to(torch.int32) << 23).view(torch.float32)
