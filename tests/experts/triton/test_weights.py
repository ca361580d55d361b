"""Weights in the order the Triton kernels read: by hand, and back bit for bit."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.experts.triton.paged import host_records
from moe_mk.experts.triton.weights import _behind, kernel_format_of, pack_weights
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS
from moe_mk.lab.testing.experts import random_experts
from moe_mk.quant import BF16, FP8_1x128, QuantScheme
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.int8 import INT8_CHANNEL, INT8_TOKEN
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import NVFP4
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, SlotWeights, slot_biases
from moe_mk.weights.layer_weights import as_mapped
from tests.support.mxfp4 import packed, wide_matrix

CPU = torch.device("cpu")
INTEGERS = [GROUPED[name] for name in ("int4_g32", "int4_g128_zp", "int4_row", "int8_g64_zp", "int8_g128")]


def test_the_two_codes_of_a_byte_are_half_a_step_apart() -> None:
    # One row of 130 columns: code 1 at column 3, 2 at 67 = 3 + 64, 3 at 128, the first of a second step.
    codes = torch.zeros((1, 130), dtype=torch.uint8)
    codes[0, 3], codes[0, 67], codes[0, 128] = 1, 2, 3
    scales = torch.arange(5, dtype=torch.uint8).view(1, 5).view(torch.float8_e8m0fnu)  # of 32 columns each
    q = QuantTensor(e2m1.pack(codes), scales, MXFP4)
    made = pack_weights(MappedExpertWeights((SlotWeights(None, q, q),), MXFP4), KERNEL_FORMATS["w_mxfp4"], CPU).w13
    assert made.values.shape == (1, 1, 128)
    assert made.values.nonzero().tolist() == [[0, 0, 3], [0, 0, 64]]
    assert made.values[0, 0, 3] == 1 | 2 << 4 and made.values[0, 0, 64] == 3
    # Four scales a step, one step behind the other; what is missing is zero.
    assert made.scales is not None and made.scales[0, :, 0].tolist() == [[0, 1, 2, 3], [4, 0, 0, 0]]


@pytest.mark.row(110)
@pytest.mark.parametrize("mapped", [False, True], ids=["stack", "mapped"])
@pytest.mark.parametrize(
    "scheme,compute",
    [
        (INT8_CHANNEL, INT8_TOKEN), (MXFP4, FP8_1x128),
        *((scheme, BF16) for scheme in (MXFP8, MXFP4, NVFP4, *INTEGERS)),
    ],
    ids=str,
)  # fmt: skip
def test_every_form_can_be_undone(scheme: QuantScheme, compute: QuantScheme, mapped: bool) -> None:
    stack = random_experts(scheme, 2, 144, 128, CPU)
    made = pack_weights(as_mapped(stack) if mapped else stack, kernel_format_of(scheme, compute), CPU)
    assert made.num_slots == 2 and made.scheme == scheme and made.layout == "triton"
    assert made.num_bytes >= stack.num_bytes - 64
    for index in range(2):
        for q, stored in zip(_matrices(made.slot(index)), _matrices(stack.slot(index)), strict=True):
            assert q.scheme == stored.scheme and q.shape == stored.shape
            assert torch.equal(q.dequantize(torch.float32), stored.dequantize(torch.float32))
            assert torch.equal(q.values.view(torch.uint8), stored.values.view(torch.uint8))
            assert (q.zeros is None) == (stored.zeros is None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_of_integers_keep_every_bit_or_are_refused(dtype: torch.dtype) -> None:
    q = GROUPED["int4_g32_zp"].quantize(torch.randn((16, 64), generator=torch.Generator().manual_seed(3)))
    scales = torch.rand((16, 2), generator=torch.Generator().manual_seed(4)).to(dtype)
    stored = replace(q, scales=scales)
    weights = MappedExpertWeights((SlotWeights(None, stored, stored),), q.scheme)
    if dtype is torch.float32:
        with pytest.raises(UnsupportedError, match="float32; with zero points"):
            pack_weights(weights, kernel_format_of(q.scheme, BF16), CPU)
        return
    found = pack_weights(weights, kernel_format_of(q.scheme, BF16), CPU).slot(0).up_IH
    assert found.scales is not None and found.zeros is not None and stored.zeros is not None
    assert torch.equal(found.scales, scales) and torch.equal(found.zeros, stored.zeros)


def _matrices(slot: SlotWeights) -> list[QuantTensor]:
    return [q for q in (slot.gate_IH, slot.up_IH, slot.down_HI) if q is not None]


def test_gate_and_up_may_have_global_scales_of_their_own() -> None:
    draw = torch.Generator().manual_seed(0)
    gate, up, down = (NVFP4.quantize(torch.randn((128, 128), generator=draw) * gain) for gain in (1.0, 3.0, 1.0))
    made = pack_weights(MappedExpertWeights((SlotWeights(gate, up, down),), NVFP4), KERNEL_FORMATS["w_nvfp4"], CPU)
    assert made.w13.rows is not None and made.w13.rows.shape == (1, 256)
    assert gate.global_scale is not None and up.global_scale is not None
    assert made.w13.rows[0, ::128].tolist() == [float(gate.global_scale), float(up.global_scale)]
    for q, stored in zip(_matrices(made.slot(0)), (gate, up, down), strict=True):
        assert torch.equal(q.dequantize(torch.float32), stored.dequantize(torch.float32))


def test_experts_without_a_gate_stay_without() -> None:
    stack = random_experts(MXFP4, 1, 128, 128, CPU)
    half = stack.slot(0)
    assert half.gate_IH is not None
    single = ExpertWeights(_stacked(half.gate_IH), _stacked(half.down_HI), gated=False)
    slot = pack_weights(single, KERNEL_FORMATS["w_mxfp4"], CPU).slot(0)
    assert slot.gate_IH is None and torch.equal(slot.up_IH.values, half.gate_IH.values)


def test_a_matrix_goes_into_the_spare_slot_if_it_is_one_of_the_same_kind() -> None:
    memory = torch.zeros((3, 2, 4), dtype=torch.float32)
    stack, one = memory[:2], torch.ones((1, 2, 4), dtype=torch.float32)
    for other in (one.repeat(2, 1, 1), one[:0], one[:, :1], one[..., :3], one.double()):
        assert _behind(stack, other) is None and not memory.any()
    made = _behind(stack, one)
    assert made is not None and made.data_ptr() == memory.data_ptr() and torch.equal(made, memory)
    assert memory[:2].count_nonzero() == 0 and memory[2].all()


def test_biases_of_a_slot_are_a_gate_and_an_up_half() -> None:
    b13, b2 = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.25])
    both, alone = (slot_biases(b13, b2, gated=gated) for gated in (True, False))
    assert both is not None and both.gate_I is not None and alone is not None and alone.gate_I is None
    assert (both.gate_I.tolist(), both.up_I.tolist(), both.down_H.tolist()) == ([1, 2], [3, 4], [0.25])
    assert alone.up_I.tolist() == [1, 2, 3, 4] and slot_biases(b13, None, gated=True) is None
    both.down_H.zero_()
    alone.up_I.zero_()
    assert b13.all() and b2.all(), "a copy"


def test_pinned_memory_is_locked_until_its_tensor_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda start, size, flags: calls.append(("lock", start)) or int(size > 2 * 4096),
        cudaHostUnregister=lambda start: calls.append(("release", start)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with torch.inference_mode():  # where a view does not keep the tensor that it is of
        records = host_records(2, 4096, torch.device("cuda"))
        view, start = records[1], records.data_ptr()
    assert calls == [("lock", start)] and start % 4096 == 0
    del records
    assert calls[1:] == [("release", start)] and view.sum() == 0
    with pytest.raises(MemoryError, match="12288 bytes of host memory cannot be locked for cuda: CUDA error 1"):
        host_records(3, 4096, torch.device("cuda"))


def test_eight_codes_of_mxfp4_for_fp8_are_one_word() -> None:
    # One row: codes 1 and -2 (code 12) at columns 4 and 70 = 64 + 6, the second word of both halves.
    codes = torch.zeros((1, 128), dtype=torch.uint8)
    codes[0, 4], codes[0, 70] = 1, 12
    # Scales 2^-7, 2^-9, 2^-8 and 2^-3, of which the last, of zeros, counts for nothing: the largest has shift 11.
    scales = torch.tensor([[120, 118, 119, 124]], dtype=torch.uint8)
    made = packed(*[QuantTensor(e2m1.pack(codes), scales.view(torch.float8_e8m0fnu), MXFP4)] * 2, CPU).w2
    word = made.values[0].view(torch.int32)[0, 1].item() & 0xFFFFFFFF
    # The half-bytes are columns 4 to 7 and 68 to 71, least significant first; the sign of column 70 is bit 3 + 8 * 2.
    assert word == 1 | 4 << 24 | 1 << 19 and made.values.view(torch.int32).count_nonzero() == 1
    assert made.scales is not None and made.scales.tolist() == [[[[11, 9, 10, 15]]]]
    # 0.5 is 0.5 x 2^(11 - 5) in FP8; 2^-13 times 2^6 is the scale of its group, 2^-7.
    assert made.blocks is not None and made.blocks.tolist() == [[[2.0**-13]]]


@pytest.mark.parametrize("spread", [0, 1, 11])
@pytest.mark.parametrize("base", [1, 120, 242])
def test_shifts_are_within_a_byte_and_give_every_scale_back(spread: int, base: int) -> None:
    q = wide_matrix(200, 208, spread=spread, base=base)
    made = packed(q, q, CPU)
    assert made.format.name == "mxfp4" and made.w2.scales is not None and made.w2.blocks is not None
    for found in _matrices(made.slot(0)):
        assert torch.equal(found.values, q.values) and found.scales is not None and q.scales is not None
        assert torch.equal(found.scales.view(torch.uint8), q.scales.view(torch.uint8))
    # Two blocks of rows, the second one of 72; two of columns.
    assert made.w2.blocks.shape == (1, 2, 2)
    assert torch.equal(made.w2.blocks, torch.full((1, 2, 2), 2.0 ** (base + spread - 11 - 122)))


def _with_scale(q: QuantTensor, row: int, group: int, scale: int, codes: int = 0x21) -> QuantTensor:
    values, scales = q.values.clone(), q.scales.clone().view(torch.uint8)  # type: ignore[union-attr]
    values[row, 16 * group : 16 * group + 16], scales[row, group] = codes, scale
    return replace(q, values=values, scales=scales.view(torch.float8_e8m0fnu))


@pytest.mark.parametrize(
    "scale,codes,format",
    [
        (100, 0x21, "mxfp4"), (111, 0x21, "mxfp4"),
        (99, 0x21, "w_mxfp4"), (112, 0x21, "w_mxfp4"),  # 12 binades from the other end of the block
        (99, 0x80, "mxfp4"), (112, 0x00, "mxfp4"),  # zeros
        (0xFF, 0x21, "w_mxfp4"), (0xFF, 0x00, "w_mxfp4"),  # NaN, of zeros too
    ],
)  # fmt: skip
def test_what_fp8_cannot_represent_is_packed_to_be_decoded(scale: int, codes: int, format: str) -> None:
    q = wide_matrix(256, 256, spread=11, base=100)
    other = _with_scale(q, 130, 6, scale, codes)
    for above, down in ((other, q), (q, other)):
        made = packed(above, down, CPU, spare=1)
        assert made.format.name == format and made.spare == 1
        for found, stored in zip(_matrices(made.slot(0)), (above, down), strict=True):
            assert torch.equal(found.values, stored.values) and found.scales is not None and stored.scales is not None
            assert torch.equal(found.scales.view(torch.uint8), stored.scales.view(torch.uint8))


def test_blocks_of_zeros_have_any_scale() -> None:
    q = wide_matrix(128, 256)
    made = packed(replace(q, values=torch.zeros_like(q.values)), q, CPU)
    found = made.slot(0).up_IH.scales
    assert made.format.name == "mxfp4" and found is not None and q.scales is not None
    assert torch.equal(found.view(torch.uint8), q.scales.view(torch.uint8))


def _stacked(q: QuantTensor) -> QuantTensor:
    assert q.scales is not None
    return QuantTensor(q.values[None], q.scales[None], q.scheme)
