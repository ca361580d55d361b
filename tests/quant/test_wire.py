"""Rows as bytes: sizes of DeepSeek-V3 rows to the byte, and back bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.flight import interleave
from moe_mk.quant import BF16, SCHEMES, FP8_1x128, FP8_1x128_UE8M0, Plain, QuantScheme
from moe_mk.quant.wire import as_bytes, decode_rows, encode_rows, from_bytes, row_bytes

ROWS = [s for s in SCHEMES.values() if isinstance(s, Plain) or (s.rows == 1 and s.name != "nvfp4")]  # type: ignore[attr-defined]


@pytest.mark.row(99)
def test_fp8_dispatch_sends_half_the_bytes() -> None:
    # Two ranks, three rows to the other one: the counters must show 3 rows of each size, nothing else.
    rows = torch.randn(5, 7168, generator=torch.Generator().manual_seed(0)).bfloat16()
    sent = {}
    for scheme in (BF16, FP8_1x128, FP8_1x128_UE8M0):
        comms = LockstepWorld(2).communicators()
        encoded = encode_rows(scheme.quantize(rows))
        interleave([comm.all_to_all(encoded, *splits(comm), "dispatch") for comm in comms])
        sent[scheme.name] = [comm.traffic.bytes_by_phase["dispatch"] for comm in comms]
    assert sent == {"bf16": [3 * 14_336, 2 * 14_336], "fp8_1x128": [3 * 7_392, 2 * 7_392],
                    "fp8_1x128_ue8m0": [3 * 7_224, 2 * 7_224]}  # fmt: skip
    assert round(sent["fp8_1x128"][0] / sent["bf16"][0], 4) == 0.5156
    assert round(sent["fp8_1x128_ue8m0"][0] / sent["bf16"][0], 4) == 0.5039


def splits(comm: Communicator) -> tuple[list[int], list[int]]:
    return [2, 3], [[2, 2], [3, 3]][comm.rank]


def test_a_row_is_its_values_then_its_scales() -> None:
    # 448 is the byte 0x7E; its scale 1.0 is 0x3F800000 in f32 (little endian) and 127 in UE8M0.
    row = torch.tensor([[448.0, -448.0]])
    assert encode_rows(FP8_1x128.quantize(row)).tolist() == [[0x7E, 0xFE, 0, 0, 0x80, 0x3F]]
    assert encode_rows(FP8_1x128_UE8M0.quantize(row)).tolist() == [[0x7E, 0xFE, 127]]
    assert encode_rows(BF16.quantize(row)).tolist() == [[0xE0, 0x43, 0xE0, 0xC3]]


@given(st.sampled_from(ROWS), st.integers(0, 4), st.integers(1, 300), st.integers(0, 5))
def test_encoding_and_decoding_is_the_identity(scheme: QuantScheme, rows: int, hidden: int, tail: int) -> None:
    hidden *= 16 if scheme.family in ("nvfp4", "mxfp4", "mxfp8") else 1
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(hidden))
    sent = scheme.quantize(x)
    encoded = encode_rows(sent)
    assert encoded.shape == (rows, row_bytes(scheme, hidden)) and encoded.dtype == torch.uint8
    # Rows often lie in wider ones, at an offset that is no multiple of their element size.
    packed = torch.cat((torch.zeros(rows, tail, dtype=torch.uint8), encoded), dim=1)
    received = decode_rows(packed[:, tail:], scheme, hidden)
    assert received.scheme == scheme and received.shape == sent.shape
    assert torch.equal(as_bytes(received.values), as_bytes(sent.values))
    if sent.scales is not None:
        assert received.scales is not None and received.scales.dtype == sent.scales.dtype
        assert torch.equal(as_bytes(received.scales), as_bytes(sent.scales))


def test_one_column_may_have_any_stride() -> None:
    # What an idle rank has: no rows, and for hidden sizes up to 128 a single scale each, with a stride of 0.
    none = torch.empty_strided((0, 1), (1, 0), dtype=torch.float32)
    assert as_bytes(none).shape == (0, 4)
    column = torch.arange(6, dtype=torch.float32).view(2, 3).T[:, :1]
    assert torch.equal(from_bytes(as_bytes(column), torch.float32), column)
