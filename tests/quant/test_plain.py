"""Numbers without scales."""

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.quant import BF16, FP16, FP32, Plain, plain


@pytest.mark.parametrize("scheme", [BF16, FP16, FP32], ids=lambda s: s.name)
def test_values_are_cast_and_counted(scheme: Plain) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    q = scheme.quantize(x)
    assert q.values.dtype == scheme.dtype and q.scales is None and q.scheme.block is None
    assert torch.equal(q.dequantize(torch.float32), x.to(scheme.dtype).float())
    assert q.num_bytes == scheme.num_bytes(3, 5) == 15 * scheme.dtype.itemsize
    assert plain(scheme.dtype) is scheme
    assert scheme.quantize(q.values).dequantize(scheme.dtype).data_ptr() == q.values.data_ptr(), "no copy is made"


def test_other_dtypes_are_refused_with_those_that_work() -> None:
    with pytest.raises(UnsupportedError, match=r"no layer computes in torch.float64\n.*torch.bfloat16, torch.float16"):
        plain(torch.float64)
