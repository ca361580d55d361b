"""Scales in tiles by hand, and that these can be undone bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.quant.layouts import swizzled, unswizzled


def octets(rows: int, groups: int) -> torch.Tensor:
    return (torch.arange(rows * groups, dtype=torch.int64) % 255).to(torch.uint8).reshape(rows, groups)


def test_swizzled_by_hand() -> None:
    # Row 33 of a tile is stripe row 1, quarter 1: 16 * 1 + 4 * 1; column 2 is 2 bytes on. Column 5 is in the next tile.
    scales = octets(40, 6)
    data = swizzled(scales.view(torch.float8_e8m0fnu))
    assert data.numel() == 2 * 512
    assert data[16 + 4 + 2] == scales[33, 2] and data[512 + 16 + 4 + 1] == scales[33, 5]


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 200), groups=st.integers(1, 20), dense=st.booleans())
def test_tiles_can_be_undone(rows: int, groups: int, *, dense: bool) -> None:
    scales = octets(rows, groups)
    back = unswizzled(swizzled(scales if dense else scales.repeat(1, 2)[:, groups:]), rows, groups)
    assert back.is_contiguous() and torch.equal(back, scales)


def test_what_tiles_do_not_hold_is_refused() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(UnsupportedError, match=rf"(?s)swizzling {dtype} scales.*one byte"):
            swizzled(torch.ones(2, 2, dtype=dtype))
    with pytest.raises(ShapeError, match=r"shape \(2, 2, 2\); tiles are of \(rows, groups\)"):
        swizzled(torch.ones(2, 2, 2))
