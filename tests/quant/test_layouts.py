"""Scale layouts by hand, and that every one can be undone bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.quant.layouts import ScaleLayout, lay_out

POWERS = torch.float8_e8m0fnu
DTYPES = (POWERS, torch.bfloat16, torch.float16, torch.float32)


def powers(rows: int, groups: int) -> torch.Tensor:
    octets = torch.arange(rows * groups, dtype=torch.int64) % 255
    return octets.to(torch.uint8).reshape(rows, groups).view(torch.float8_e8m0fnu)


def test_column_major_and_tma_aligned_by_hand() -> None:
    # 5 rows of f32: 16 bytes are 4 of them, so that a column takes 8.
    scales = torch.arange(15, dtype=torch.float32).reshape(5, 3)
    columns, aligned = lay_out(scales, ScaleLayout.COLUMN_MAJOR).data, lay_out(scales, ScaleLayout.TMA_ALIGNED).data
    assert columns.stride() == (1, 5) and aligned.stride() == (1, 8)
    assert torch.equal(columns, scales) and torch.equal(aligned, scales)


def test_packed_by_hand() -> None:
    # 3 rows of 5 exponents: 2 words a row, the first group in the lowest byte; a column of words takes 4 rows.
    laid = lay_out(powers(3, 5), ScaleLayout.PACKED)
    assert laid.data.dtype == torch.int32 and laid.data.shape == (3, 2) and laid.data.stride() == (1, 4)
    assert laid.data[0].tolist() == [0 | 1 << 8 | 2 << 16 | 3 << 24, 4]
    assert laid.data[1].tolist() == [5 | 6 << 8 | 7 << 16 | 8 << 24, 9]


def test_swizzled_by_hand() -> None:
    # Row 33 of a tile is stripe row 1, quarter 1: 16 * 1 + 4 * 1; column 2 is 2 bytes on. Column 5 is in the next tile.
    laid = lay_out(powers(40, 6), ScaleLayout.SWIZZLED)
    octets = powers(40, 6).view(torch.uint8)
    assert laid.data.numel() == 2 * 512
    assert laid.data[16 + 4 + 2] == octets[33, 2] and laid.data[512 + 16 + 4 + 1] == octets[33, 5]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 200),
    groups=st.integers(1, 20),
    layout=st.sampled_from(ScaleLayout),
    dtype=st.sampled_from(DTYPES),
    dense=st.booleans(),
)
def test_every_layout_can_be_undone(
    rows: int, groups: int, layout: ScaleLayout, dtype: torch.dtype, *, dense: bool
) -> None:
    wide = torch.rand((rows, groups), generator=torch.Generator().manual_seed(rows), dtype=torch.float32).to(dtype)
    one_byte = dtype is POWERS or layout in (ScaleLayout.PACKED, ScaleLayout.SWIZZLED)
    scales = powers(rows, groups) if one_byte else wide
    given = scales if dense else scales.view(torch.uint8).repeat(1, 2).view(scales.dtype)[:, groups:]
    laid = lay_out(given, layout)
    back = laid.row_major()
    assert back.dtype == scales.dtype and back.shape == scales.shape and back.is_contiguous()
    assert layout is not ScaleLayout.ROW_MAJOR or laid.data.is_contiguous()
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_what_a_layout_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)packing torch\.float32 scales.*only powers of two"):
        lay_out(torch.ones(2, 2), ScaleLayout.PACKED)
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(UnsupportedError, match=rf"(?s)swizzling {dtype} scales.*one byte"):
            lay_out(torch.ones(2, 2, dtype=dtype), ScaleLayout.SWIZZLED)
    with pytest.raises(ShapeError, match=r"shape \(2, 2, 2\); a layout is of \(rows, groups\)"):
        lay_out(torch.ones(2, 2, 2), ScaleLayout.ROW_MAJOR)
