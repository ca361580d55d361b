"""Rows as payloads of a library."""

import pytest
import torch

from moe_mk.prepare_finalize.deepep.common import payloads_of, rows_of
from moe_mk.quant import BF16
from moe_mk.quant.fp8_block import FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.microscaling import MXFP8
from moe_mk.quant.nvfp4 import NVFP4_TOKENS
from moe_mk.quant.tensor import QuantScheme

# Bytes of a DeepSeek-V3 row of 7168 values.
SCHEMES: list[tuple[QuantScheme, int]] = [
    (BF16, 14336),
    (FP8_1x128, 7392),
    (FP8_1x128_UE8M0, 7224),
    (MXFP8, 7392),
    (NVFP4_TOKENS, 4032),
]


@pytest.mark.row(77)
@pytest.mark.parametrize("scheme,row", SCHEMES, ids=[scheme.name for scheme, _ in SCHEMES])
def test_payloads_are_dense_rows_of_as_many_bytes_as_the_format_has(scheme: QuantScheme, row: int) -> None:
    x = scheme.quantize(torch.randn(3, 7168))
    payloads = payloads_of(x)
    assert sum(part.element_size() * part.shape[1] for part in payloads) == row
    assert all(part.dim() == 2 and len(part) == 3 and part.is_contiguous() for part in payloads)
    back = rows_of([part.clone() for part in payloads], x)
    assert torch.equal(back.dequantize(torch.float32), x.dequantize(torch.float32))
