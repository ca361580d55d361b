"""An expert as bytes: every tensor, scales too, cut anywhere, and a checksum that finds damage."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.quant.fp8 import FP8_128x128_UE8M0, weight_scheme
from moe_mk.quant.grouped import grouped
from moe_mk.quant.nvfp4 import NVFP4
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme
from moe_mk.rebalance.transfer import ReceivedExpert, checksum, read_bytes
from moe_mk.weights import SlotWeights
from moe_mk.weights.expert_weights import SlotBiases

SCHEMES = [BF16, weight_scheme((16, 8)), FP8_128x128_UE8M0, NVFP4, grouped(4, 32, zeros=True)]


def expert(scheme: QuantScheme, *, gated: bool = True, biased: bool = False, seed: int = 0) -> SlotWeights:
    draw = torch.Generator().manual_seed(seed)
    gate, up, down = (scheme.quantize(torch.randn(shape, generator=draw)) for shape in ((24, 40), (24, 40), (40, 24)))
    biases = SlotBiases(*(torch.randn(size, generator=draw) for size in (24, 24, 40))) if biased else None
    return SlotWeights(gate if gated else None, up, down, biases)


def test_size_by_hand() -> None:
    # 3 matrices of 960 e4m3 codes; blocks of 16 x 8 cut 24 x 40 into 2 x 5 and 40 x 24 into 3 x 3 f32 scales.
    assert expert(weight_scheme((16, 8))).num_bytes == 3 * 960 + (10 + 10 + 9) * 4


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize(("gated", "biased"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("chunk", [7, 960, 10_000])
def test_what_lands_is_equal_to_the_bit_and_owns_its_memory(
    scheme: QuantScheme, gated: bool, biased: bool, chunk: int
) -> None:
    sent = expert(scheme, gated=gated, biased=biased)
    size, incoming = sent.num_bytes, ReceivedExpert(expert(scheme, gated=gated, biased=biased, seed=1))
    for start in range(0, size, chunk):
        incoming.write(read_bytes(sent, start, min(start + chunk, size)))
    assert incoming.received == size
    for mine, theirs in zip(incoming.slot.tensors, sent.tensors, strict=True):
        assert mine.dtype == theirs.dtype and mine.data_ptr() != theirs.data_ptr()
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_slice_of_a_wider_matrix_travels_as_its_own_bytes() -> None:
    wide = BF16.quantize(torch.randn(4, 12))
    narrow = SlotWeights(None, BF16.quantize(torch.randn(4, 6)), wide)
    narrow = SlotWeights(None, narrow.up_IH, type(wide)(wide.values[:, 3:9], None, BF16))
    incoming = ReceivedExpert(narrow)
    incoming.write(read_bytes(narrow, 0, narrow.num_bytes))
    assert torch.equal(incoming.slot.down_HI.values, wide.values[:, 3:9])


@given(st.binary(max_size=70), st.integers(0, 69), st.integers(1, 255))
def test_a_checksum_changes_with_any_byte_and_with_the_length(data: bytes, at: int, by: int) -> None:
    row = torch.tensor(list(data), dtype=torch.uint8)
    assert checksum(torch.cat((row, torch.zeros(1, dtype=torch.uint8)))) != checksum(row)
    if at < len(row):
        damaged = row.clone()
        damaged[at] ^= by
        assert checksum(damaged) != checksum(row)
    row = torch.arange(32, dtype=torch.uint8)  # words that trade places
    assert checksum(torch.cat((row[8:16], row[:8], row[16:]))) != checksum(row)
