"""Rows as one buffer of bytes, and back bit for bit."""

import pytest
import torch

from moe_mk.lab.testing.bits import bits_of
from moe_mk.prepare_finalize.packing import pack, packed_row_bytes, unpack
from moe_mk.quant.fp8 import FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.plain import BF16, FP16, FP32
from moe_mk.quant.tensor import QuantScheme


@pytest.mark.row(99)
@pytest.mark.parametrize(
    "wire,expected",
    # 7168 bf16 values; 7168 FP8 values and 56 scales of 4 B or 1 B. Each of 8 choices adds an id and a weight of 4 B.
    [(BF16, 14336 + 64), (FP8_1x128, 7392 + 64), (FP8_1x128_UE8M0, 7224 + 64), (FP32, 28672 + 64)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_row_of_deepseek_v3_takes_the_bytes_it_should(wire: QuantScheme, expected: int) -> None:
    assert packed_row_bytes(wire, 7168, 8) == expected
    x = wire.quantize(torch.randn(3, 7168))
    ids, weights = torch.zeros(3, 8, dtype=torch.int32), torch.zeros(3, 8)
    assert pack(x, ids, weights).shape == (3, expected)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("hidden", [8, 128, 200])
@pytest.mark.parametrize("wire", [BF16, FP16, FP32, FP8_1x128, FP8_1x128_UE8M0], ids=lambda scheme: scheme.name)
def test_what_is_packed_is_unpacked_bit_for_bit(wire: QuantScheme, hidden: int, rows: int) -> None:
    x = wire.quantize(torch.randn(rows, hidden))
    ids = torch.randint(-1, 2**31 - 1, (rows, 3), dtype=torch.int32)
    weights = torch.randn(rows, 3)
    back, back_ids, back_weights = unpack(pack(x, ids, weights), wire, hidden, 3)
    assert torch.equal(back.values.view(torch.uint8), x.values.view(torch.uint8)) and back.scheme == wire
    assert (back.scales is None) == (x.scales is None)
    if x.scales is not None and back.scales is not None:
        assert bits_of(back.scales) == bits_of(x.scales)
    assert torch.equal(back_ids, ids) and torch.equal(back_weights, weights)
