"""Formats compute where their tensors are: on a device without memory, tensors of another device are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_mk.kernels.reference.activation import activation
from moe_mk.kernels.reference.topk import grouped_topk
from moe_mk.lab.checkpoints.gguf_checkpoint import mxfp4_to_gguf
from moe_mk.quant import SCHEMES, BlockedScheme
from moe_mk.quant.gguf import GGUF, mxfp4_of_gguf
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.layouts import swizzled, unswizzled
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import decode_rows, encode_rows

META = torch.device("meta")
BYTES = torch.float8_e8m0fnu


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), *GGUF.values(), *GROUPED.values()], ids=lambda each: each.name)
def test_a_format_is_made_and_read_on_its_device(scheme: QuantScheme) -> None:
    made = scheme.quantize(empty(256, 512))
    assert made.dequantize(torch.bfloat16).device == META
    assert all(part is None or part.device == META for part in (made.values, made.scales, made.global_scale))
    if isinstance(scheme, BlockedScheme) and scheme.block[0] == 1 and made.zeros is None:
        travelled = encode_rows(made)
        assert travelled.device == META
        assert decode_rows(travelled, scheme, 512).dequantize(torch.float32).device == META


FUNCTIONS: dict[str, Callable[[], object]] = {
    "grouped_topk": lambda: grouped_topk(empty(8, 16), 2, 4, 2, "sigmoid", empty(16), True, 1.0, torch.float32),
    "activation": lambda: activation("swiglu_oai", empty(8, 16), empty(8, 16), alpha=1.7, limit=7.0),
    "mxfp4 of gguf": lambda: mxfp4_to_gguf(mxfp4_of_gguf(empty(8, 34, dtype=torch.uint8))),
    "scales": lambda: unswizzled(swizzled(empty(5, 6, dtype=BYTES)), 5, 6),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_computes_where_its_tensors_are(name: str) -> None:
    made = FUNCTIONS[name]()
    assert all(each.device == META for each in (made if isinstance(made, tuple) else (made,)))
