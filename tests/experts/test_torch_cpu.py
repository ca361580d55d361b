"""FP8 decoded by integer operations: every code, every scale, ragged edges."""

from __future__ import annotations

import pytest
import torch

from moe_mk.experts.torch_cpu import decoded_block_rows
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.tensor import QuantTensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 0.0123, 3.7e5])
def test_every_code_is_decoded_as_torch_decodes_it(scale: float, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    codes[0x7F], codes[0xFF] = 0, 0x80  # NaN codes do not reach a backend: loading refuses them
    values = codes.view(torch.float8_e4m3fn).view(16, 16)
    q = QuantTensor(values, torch.full((1, 1), scale), Fp8Block("b", 16, 16))
    expected = (values.to(torch.float32) * scale).to(dtype)
    got = torch.cat(list(decoded_block_rows(q, dtype)))
    assert torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit())


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("rows,columns", [(16, 16), (17, 15), (40, 33), (1, 1)])
def test_ragged_blocks_take_the_scales_of_their_place(rows: int, columns: int, ue8m0: bool) -> None:
    scheme = Fp8Block("b", 16, 8, ue8m0)
    q = scheme.quantize(torch.randn(rows, columns) * torch.logspace(-3, 3, columns))
    got = torch.cat(list(decoded_block_rows(q, torch.float32)))
    assert torch.equal(got, q.dequantize(torch.float32))
