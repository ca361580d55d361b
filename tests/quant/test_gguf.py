"""Blocks of GGUF: by hand, by fixed digests, and bit for bit what the `gguf` package decodes."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.experts.held import requantised
from moe_mk.kernels.reference.ggml_blocks import BLOCK_TYPES
from moe_mk.lab.checkpoints.gguf_checkpoint import mxfp4_to_gguf
from moe_mk.lab.verify.dense import SIZES
from moe_mk.quant.gguf import GGUF, Gguf, mxfp4_of_gguf
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.microscaling import MXFP4
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.slices import narrow_columns, narrow_rows
from tests.support.draws import normal

ALL = pytest.mark.parametrize("scheme", GGUF.values(), ids=list(GGUF))


def random_blocks(scheme: Gguf, rows: int, blocks: int, seed: int) -> Tensor:
    """Any bytes, with finite factors: every code, every scale, subnormal and negative factors."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows, blocks, scheme.blocks.num_bytes), dtype=torch.uint8, generator=generator)
    for at in scheme.blocks.halves:
        raw[..., at + 1] &= 0xBF  # the upper exponent bit: below 2
    return raw.flatten(1)


def test_q4_0_by_hand() -> None:
    # d = 0.5; byte 0 is 0x9f: value 0 is (15 - 8) / 2, value 16 is (9 - 8) / 2; the others are code 8: zero.
    block = torch.tensor([[0x00, 0x38, 0x9F] + [0x88] * 15], dtype=torch.uint8)
    values = QuantTensor(block, None, GGUF["q4_0"]).dequantize(torch.float32)
    assert values[0, 0] == 3.5 and values[0, 16] == 0.5 and values.count_nonzero() == 2


def test_scales_of_one_and_of_zero_by_hand() -> None:
    # Integers up to 127 have d = 1 in Q8_0 and come back as they are; a group of zeros has d = 0.
    x = torch.cat((torch.arange(96, 128), torch.zeros(32)))[None].float()
    q = GGUF["q8_0"].quantize(x)
    assert GGUF["q8_0"].factors(q).tolist() == [[[1.0], [0.0]]] and torch.equal(q.dequantize(torch.float32), x)
    # The largest magnitude has the code -8 in Q4_0, so that its sign is that of -d.
    x = torch.arange(-8.0, 8.0).repeat(2)[None]
    q = GGUF["q4_0"].quantize(x)
    assert GGUF["q4_0"].factors(q).tolist() == [[[1.0]]] and torch.equal(q.dequantize(torch.float32), x)


def test_q4_k_by_hand() -> None:
    # d = 1, dmin = 2. Group 0: scale 3, minimum 1; group 5: scale 16 + 2 = 18, minimum 32 + 7 = 39.
    block = torch.zeros(144, dtype=torch.uint8)
    block[1], block[3] = 0x3C, 0x40
    block[4], block[8] = 3, 1
    block[5] |= 1 << 6  # scale 5: upper bits 01
    block[9] |= 2 << 6  # minimum 5: upper bits 10
    block[13] = 0x72
    block[16] = 0x0B  # value 0: 11
    block[16 + 64 + 31] = 0xD0  # group 5, its last value: 13
    values = QuantTensor(block[None], None, GGUF["q4_k"]).dequantize(torch.float32)[0]
    assert values[0] == 3 * 11 - 2 * 1 and values[1] == -2.0
    assert values[5 * 32 + 31] == 18 * 13 - 2 * 39 and values[5 * 32] == -78.0


def test_q6_k_by_hand() -> None:
    # d = 0.25, scale of group 9 (values 144 to 159, the second half's part 0, second 16) is -4; code 0b11_0101 = 53.
    block = torch.zeros(210, dtype=torch.uint8)
    block[209] = 0x34
    block[192 + 9] = 256 - 4
    block[64 + 16], block[128 + 32 + 16] = 0x05, 0x03
    values = QuantTensor(block[None], None, GGUF["q6_k"]).dequantize(torch.float32)[0]
    assert values[144] == 0.25 * -4 * (53 - 32) and values[145] == 0.25 * -4 * -32 and values[0] == 0


DIGESTS = {
    "q4_0": "423c53b41b5d06af", "q4_1": "0f940a9ec703fe0d", "q5_0": "71822fcb54b83a60", "q5_1": "7285883cae90a0cd",
    "q8_0": "636128efacfdc7f1", "iq4_nl": "b240edb7b37a27a8", "q2_k": "8567fb519e9fb9bf", "q3_k": "c852143ef6a3bd25",
    "q4_k": "c94219c0dba1a3f0", "q5_k": "e13597ae4bb4746b", "q6_k": "3ccb2dbd483e5ed4", "iq4_xs": "1cf9b786c9be3de9",
}  # fmt: skip
"""Of the f32 values of 4 x 8 random blocks, as the `gguf` package 0.19.0 decodes them."""


@pytest.mark.row(169)
@ALL
def test_values_have_the_digest_of_the_gguf_package(scheme: Gguf) -> None:
    values = QuantTensor(random_blocks(scheme, 4, 8, 1), None, scheme).dequantize(torch.float32)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == DIGESTS[scheme.name]


@ALL
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 4), blocks=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_the_gguf_package_decodes_the_same_bits(scheme: Gguf, rows: int, blocks: int, seed: int) -> None:
    gguf = pytest.importorskip("gguf")
    raw = random_blocks(scheme, rows, blocks, seed)
    theirs = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType(scheme.blocks.number))
    ours = QuantTensor(raw, None, scheme).dequantize(torch.float32)
    assert torch.equal(ours.view(torch.int32), torch.from_numpy(theirs).view(torch.int32))


@pytest.mark.parametrize("scheme", [s for s in GGUF.values() if s.blocks.held not in ("", "bf16")], ids=str)
def test_the_type_that_native_kernels_hold_has_the_same_bits(scheme: Gguf) -> None:
    q = QuantTensor(torch.stack([random_blocks(scheme, 3, 2, seed) for seed in (5, 6)]), None, scheme)
    found = requantised(q, scheme_of_kind(scheme.blocks.held))
    assert found.scheme.name == scheme.blocks.held and found.shape == q.shape
    assert torch.equal(*(each.dequantize(torch.float32).view(torch.int32) for each in (q, found)))


@ALL
def test_a_stack_has_the_parts_of_its_matrices(scheme: Gguf) -> None:
    raw = torch.stack([random_blocks(scheme, 3, 2, seed) for seed in (5, 6)])
    stack, each = QuantTensor(raw, None, scheme), [QuantTensor(rows, None, scheme) for rows in raw]
    assert torch.equal(scheme.factors(stack), torch.stack([scheme.factors(q) for q in each]))
    assert scheme.split(stack)[0].dtype is torch.int8 and scheme.split(stack)[0].shape == stack.shape
    for whole, *parts in zip(scheme.split(stack), *map(scheme.split, each), strict=True):
        assert (whole is None and parts == [None, None]) or torch.equal(whole, torch.stack(parts))


@ALL
@pytest.mark.parametrize("size", [0.0, 0.02, 300.0])
def test_quantising_stays_within_the_step_that_every_group_needs(scheme: Gguf, size: float) -> None:
    x = (normal(3, 4, 512) + torch.tensor([1.0, 5.0, -5.0])[:, None, None]) * size  # groups of both signs and of one
    q = scheme.quantize(x)
    _, scales, minima = scheme.split(q)
    error, groups = (each.unflatten(-1, (-1, scheme.group)) for each in (q.dequantize(torch.float32) - x, x))
    low, high = groups.aminmax(dim=-1)
    low = -torch.maximum(-low, high) if minima is None else low.clamp_max(0.0 if scheme.blocks.scales else torch.inf)
    needed = ((-low if minima is None else high) - low) / (2**scheme.blocks.bits - 1)
    # Scales and minima of six bits are off by up to 1/126 of the largest of their block.
    loose = 0.0 if scheme.blocks.values == 32 else x.abs().amax(dim=-1, keepdim=True) * 0.03
    assert bool((scales.abs() <= needed * 1.01 + loose).all())
    limit = scales.abs() * (1.05 if scheme.blocks.is_linear else 14.0) + loose + 1e-7
    assert bool((error.abs().amax(dim=-1) <= limit).all())
    if minima is None and size:
        again = scheme.quantize(q.dequantize(torch.float32))
        assert float((again.dequantize(torch.float32) - q.dequantize(torch.float32)).norm() / x.norm()) < 0.02


@ALL
def test_values_below_the_smallest_factors_are_off_by_no_more_than_the_largest(scheme: Gguf) -> None:
    # A factor is an f16, which below 2^-14 has fewer bits: it may be half or twice what it should be; codes saturate.
    for exponent in range(-34, -8):
        x = normal(4, 512, seed=exponent + 99) * 2.0**exponent
        off = (scheme.quantize(x).dequantize(torch.float32) - x).abs().view(4, 2, 256).amax(-1)
        assert (off <= x.abs().view(4, 2, 256).amax(-1) * (1.0 + 2.0 * scheme.blocks.has_minima)).all()


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_the_gguf_package_quantises_to_nearly_the_same(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    x = normal(16, 512)
    theirs = gguf.quantize(x.numpy(), gguf.GGMLQuantizationType(GGUF[name].blocks.number))
    assert (torch.from_numpy(theirs) == GGUF[name].quantize(x).values).float().mean() > 0.97


@ALL
def test_slices_are_made_of_whole_blocks(scheme: Gguf) -> None:
    q = scheme.quantize(normal(6, 1024))
    whole, side = q.dequantize(torch.float32), scheme.blocks.values
    assert torch.equal(narrow_columns(q, 512, 256).dequantize(torch.float32), whole[:, 512:768])
    assert torch.equal(narrow_rows(q, 1, 2).dequantize(torch.float32), whole[1:3])
    with pytest.raises(ShapeError, match=f"0 to 528 of 1024 would cut a group of {side} columns of {scheme.name}"):
        narrow_columns(q, 0, 528)


@ALL
def test_partial_blocks_are_refused(scheme: Gguf) -> None:
    with pytest.raises(ShapeError, match=f"{scheme.name} has blocks of {scheme.blocks.values} values"):
        scheme.quantize(normal(2, 48))
    with pytest.raises(ShapeError, match="a row of 33 B is no whole number"):
        _ = QuantTensor(torch.zeros(2, 33, dtype=torch.uint8), None, scheme).shape


def test_mxfp4_of_gguf_is_our_mxfp4_exactly() -> None:
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (5, 4, 17), dtype=torch.uint8, generator=generator)
    raw[..., 0].clamp_(1, 254)
    q = mxfp4_of_gguf(raw.flatten(1))
    assert q.scheme == MXFP4 and q.shape == (5, 128)
    assert torch.equal(mxfp4_to_gguf(q), raw.flatten(1))
    gguf = pytest.importorskip("gguf")
    theirs = torch.from_numpy(gguf.dequantize(raw.flatten(1).numpy(), gguf.GGMLQuantizationType.MXFP4))
    assert torch.equal(q.dequantize(torch.float32), theirs)


def test_mxfp4_blocks_by_hand() -> None:
    # Scale 2^1; byte 0 is 0x2f: value 0 is code 15 (-6), value 16 is code 2 (1).
    raw = torch.tensor([[128, 0x2F] + [0] * 15], dtype=torch.uint8)
    values = mxfp4_of_gguf(raw).dequantize(torch.float32)[0]
    assert values[0] == -12.0 and values[16] == 2.0 and values.count_nonzero() == 2


def test_every_type_has_the_size_of_its_enumeration() -> None:
    assert {name: (t.values, t.num_bytes) for name, t in BLOCK_TYPES.items()} == SIZES
    gguf = pytest.importorskip("gguf")
    for name, block in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(block.number)
        assert kind.name.lower() == name and gguf.GGML_QUANT_SIZES[kind] == SIZES[name]
