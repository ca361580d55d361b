"""Packing is a permutation that can be undone, at 1.0x the bytes; damaged and misplaced weights are refused."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.errors import ShapeError, WeightError
from moe_mk.kernels.native.layout import Format, MatrixLayout
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.packed import (
    PackedMatrix,
    allocate,
    pack_slot,
    unpack_output_scales,
    unpack_scales,
    unpack_slot,
)
from tests.kernels.native.layers import Storage, spaced

FP8 = torch.float8_e4m3fn


def codes(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """e4m3 values of every code but the NaNs."""
    g = torch.Generator("cpu").manual_seed(seed)
    magnitude = torch.randint(0, 127, (outputs, inputs), dtype=torch.uint8, generator=g)
    return (magnitude | torch.randint(0, 2, magnitude.shape, dtype=torch.uint8, generator=g) << 7).view(FP8)


def grid(outputs: int, inputs: int) -> torch.Tensor:
    rows, columns = -(-outputs // 128), -(-inputs // 128)
    return torch.arange(1, rows * columns + 1, dtype=torch.float32).view(rows, columns)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_plain_fp8_tile_lies_as_drawn(native: Native) -> None:
    # One pair, one step. Weight [n, k] = code 4 n + k % 4 for n < 16, k < 4: the first group of 64 B of tile 0 holds
    # l = n // 4 (16 B each), then h = the k pair (8 B each), then n % 4 and the parity of k:
    #   l = 0: k 0, 1 of n 0..3, then k 2, 3 of n 0..3.
    w = torch.zeros(32, 32, dtype=torch.uint8)
    for n in range(16):
        for k in range(4):
            w[n, k] = 4 * n + k
    packed = allocate(native, MatrixLayout(32, 32, False, Format.FP8), 1)
    pack_slot(native, packed, 0, (w.view(FP8),), (grid(32, 32),))
    assert packed.values_LB[0, :16].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    assert packed.values_LB[0, 16:20].tolist() == [16, 17, 20, 21]
    assert packed.values_LB[0, 64:128].eq(0).all()  # tile 1: outputs 16..31


@pytest.mark.row(110)
@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 150),
    gated=st.booleans(),
    storage=st.sampled_from(list(Storage)),
    threads=st.integers(1, 3),
)
def test_unpacking_gives_every_bit_back(
    native: Native, outputs: int, inputs: int, gated: bool, storage: Storage, threads: int
) -> None:
    inputs += inputs % 2 if storage.format.bits == 4 else 0
    layout = MatrixLayout(outputs, inputs, gated, storage.format, by_output=storage.by_output)
    packed = allocate(native, layout, 2)
    sources, scales, above = drawn(layout)
    pack_slot(native, packed, 1, sources, scales, above=above, threads=threads)
    packed.copy_slot(1, 0)  # an expert moves in packed form
    for slot in range(2):
        back = unpack_slot(native, packed, slot, threads=threads)
        assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(back, sources, strict=True))
        assert storage.format.bits == 4 or packed.values_LB[slot].sum() == sum(bytes_of(each).sum() for each in sources)
        groups = unpack_scales(packed, slot) if storage.format.group else ()
        assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(groups, scales if groups else (), strict=True))
        for mine, theirs in zip(unpack_output_scales(packed, slot), above or scales, strict=False):
            assert torch.equal(mine, theirs.expand(outputs, 1))


def test_a_slot_is_copied_with_everything_that_a_matrix_has_of_it() -> None:
    names = [each.name for each in fields(PackedMatrix) if each.name not in ("layout", "row_of_L")]
    held = {name: torch.arange(12, dtype=torch.uint8).view(3, 4) + at for at, name in enumerate(names)}
    packed = PackedMatrix(MatrixLayout(16, 32, False, Format.BF16), **held)
    packed.copy_slot(2, 0)
    for at, name in enumerate(names):
        expected = torch.tensor([[8, 9, 10, 11], [4, 5, 6, 7], [8, 9, 10, 11]]) + at
        assert torch.equal(getattr(packed, name), expected), name


def drawn(layout: MatrixLayout) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Random codes, scales, and scales above them, one a source; no NaN among them."""
    g = torch.Generator("cpu").manual_seed(layout.num_outputs * 1000 + layout.num_inputs)
    halves = range(2 if layout.gated else 1)
    groups = -(-layout.num_inputs // (layout.format.group or 1))

    def octets(*shape: int, below: int = 256) -> torch.Tensor:
        return torch.randint(0, below, shape, dtype=torch.uint8, generator=g)

    sources = tuple(codes(layout.num_outputs, layout.num_inputs, seed) for seed in halves)
    if layout.format is Format.BF16:
        sources = tuple(s.float().bfloat16() for s in sources)
    elif layout.format.dtype is not FP8:
        sources = tuple(octets(*layout.source_shape).view(layout.format.dtype) for _ in halves)
    if layout.format.group:
        most = 255 if layout.format.scale_dtype is torch.float8_e8m0fnu else 127
        scales = tuple(octets(layout.num_outputs, groups, below=most).view(layout.format.scale_dtype) for _ in halves)
    elif layout.format is Format.BF16:
        scales = ()
    elif layout.by_output:
        scales = tuple(torch.rand(layout.num_outputs, 1, generator=g) for _ in halves)
    else:
        scales = tuple(grid(layout.num_outputs, layout.num_inputs) for _ in halves)
    above = tuple(torch.rand(1, 1, generator=g) for _ in halves) if layout.format is Format.NVFP4 else ()
    return sources, scales, above


def test_a_four_bit_tile_lies_as_drawn(native: Native) -> None:
    # One pair, one step. Output 0 holds the codes k % 16 for k = 0, 1, ... 31, two a byte, the even k low:
    #   bytes 10 32 54 76 98 ba dc fe, twice. Its first word is line 0, k 0..7, even k first: codes 0 2 4 6 from the
    #   lowest four bits on -> 20 64; odd k: 1 3 5 7 -> 31 75. Line 1 (k 8..15), 128 B on: 8 a c e -> a8 ec; then b9 fd.
    w = torch.zeros(32, 16, dtype=torch.uint8)
    w[0] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2)
    packed = allocate(native, MatrixLayout(32, 32, False, Format.MXFP4), 1)
    pack_slot(native, packed, 0, (w,), (torch.ones(32, 1).to(torch.float8_e8m0fnu),))
    assert packed.values_LB[0, :4].tolist() == [0x20, 0x64, 0x31, 0x75]
    assert packed.values_LB[0, 128:132].tolist() == [0xA8, 0xEC, 0xB9, 0xFD]
    assert packed.values_LB[0, 256:260].tolist() == [0x20, 0x64, 0x31, 0x75]
    assert int((packed.values_LB != 0).sum()) == 16 and packed.values_LB.numel() == 512


def test_an_int8_tile_lies_as_drawn(native: Native) -> None:
    # Four k of an output in a word: output 3 holds k + 1, so that its first words are 1 2 3 4, and 128 B on 5 6 7 8.
    w = torch.zeros(32, 32, dtype=torch.int8)
    w[3] = torch.arange(1, 33)
    packed = allocate(native, MatrixLayout(32, 32, False, Format.INT8, by_output=True), 1)
    pack_slot(native, packed, 0, (w,), (torch.ones(32, 1),))
    assert packed.output_scales_LX is not None and packed.num_bytes == 32 * 32 + 4 * 32
    assert packed.values_LB[0, 12:16].tolist() == [1, 2, 3, 4]
    assert packed.values_LB[0, 140:144].tolist() == [5, 6, 7, 8]


def test_scales_of_groups_lie_beside_each_other_for_32_outputs(native: Native) -> None:
    # Gated, 20 outputs, 48 inputs under scales for 32: two groups; gate's codes are 100 + output, up's 10 + output.
    packed = allocate(native, MatrixLayout(20, 48, True, Format.MXFP8), 1)
    gate, up = (torch.arange(20, dtype=torch.uint8)[:, None] + first + torch.tensor([[0, 50]]) for first in (100, 10))
    given = tuple(t.to(torch.uint8).view(torch.float8_e8m0fnu) for t in (gate, up))
    pack_slot(native, packed, 0, (codes(20, 48), codes(20, 48)), given)
    pairs = packed.scales_LX[0].view(2, 2, 32).tolist()
    assert pairs[0][0] == [*range(100, 116), *range(10, 26)]  # outputs 0..15, first 32 inputs
    assert pairs[0][1] == [*range(150, 166), *range(60, 76)]  # the other 16
    assert pairs[1][0] == [*range(116, 120), *[127] * 12, *range(26, 30), *[127] * 12]  # 1.0 beyond the matrix


@pytest.mark.parametrize(("storage", "code"), [(Format.MXFP4, 0xFF), (Format.MXFP8, 0xFF), (Format.NVFP4, 0xFF)])
def test_a_nan_scale_is_refused_by_name(native: Native, storage: Format, code: int) -> None:
    layout = MatrixLayout(64, 64, False, storage)
    packed = allocate(native, layout, 1)
    sources, scales, above = drawn(layout)
    scales[0].view(torch.uint8)[5, 1] = code
    with pytest.raises(WeightError, match=rf"layers.3.down_proj: 1 of its {storage.name} scales are NaN.*damaged"):
        pack_slot(native, packed, 0, sources, scales, above=above, name="layers.3.down_proj")


@pytest.mark.row(96)
def test_whole_blocks_take_exactly_the_bytes_of_the_checkpoint(native: Native) -> None:
    gated = allocate(native, MatrixLayout(256, 384, True, Format.FP8), 3)
    assert gated.values_LB.numel() == 3 * 2 * 256 * 384
    plain = allocate(native, MatrixLayout(384, 256, False, Format.BF16), 3)
    assert plain.values_LB.numel() == 3 * 384 * 256 * 2
    # One f32 per 16 outputs x 128 inputs: 0.2 %.
    assert gated.num_bytes - gated.values_LB.numel() == gated.values_LB.numel() // (16 * 128) * 4


def test_packed_memory_starts_on_a_huge_page(native: Native) -> None:
    packed = allocate(native, MatrixLayout(64, 64, True, Format.FP8), 2)
    assert packed.values_LB.data_ptr() % (2 << 20) == 0


@pytest.mark.parametrize("storage", [Storage.BF16, Storage.FP8, Storage.INT8, Storage.MXFP4, Storage.NVFP4])
def test_strides_of_every_source_are_read(native: Native, storage: Storage) -> None:
    # Gate and up apart in memory in different ways, and their scales: the packed bytes are those of dense sources.
    layout = MatrixLayout(48, 256, True, storage.format, by_output=storage.by_output)
    halves = [storage.scheme.quantize(torch.randn(48, 256)) for _ in range(2)]
    values = [q.values for q in halves]
    scales = [q.scales for q in halves if q.scales is not None]
    above = tuple(q.global_scale for q in halves if q.global_scale is not None)
    packed = [allocate(native, layout, 1) for _ in range(5)]
    pack_slot(native, packed[0], 0, tuple(values), tuple(scales), above=above)
    for made, (gate, up) in zip(packed[1:], ((True, True), (True, False), (False, None), (None, True)), strict=True):
        sources, grids = (
            tuple(
                each if columns is None else spaced(each.view(torch.uint8), columns=columns).view(each.dtype)
                if each.element_size() == 1 else spaced(each, columns=columns)
                for each, columns in zip(parts, (gate, up), strict=bool(parts))
            )
            for parts in (values, scales)
        )  # fmt: skip
        pack_slot(native, made, 0, sources, grids, above=above)
        assert torch.equal(made.values_LB, packed[0].values_LB)
        for name in ("scales_LX", "output_scales_LX"):
            one, other = getattr(made, name), getattr(packed[0], name)
            assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_is_refused_by_name(native: Native, code: int) -> None:
    w = codes(64, 64)
    w.view(torch.uint8)[17, 33] = code
    packed = allocate(native, MatrixLayout(64, 64, False, Format.FP8), 1)
    with pytest.raises(WeightError, match=r"layers.3.down_proj: 1 of its FP8 codes are NaN .*damaged"):
        pack_slot(native, packed, 0, (w,), (grid(64, 64),), name="layers.3.down_proj")


def test_scales_follow_their_blocks(native: Native) -> None:
    # 160 outputs x 288 inputs: grid 2 x 3 = [[1, 2, 3], [4, 5, 6]]; tiles 0..7 lie in block row 0, tiles 8, 9 in row 1.
    packed = allocate(native, MatrixLayout(160, 288, False, Format.FP8), 1)
    pack_slot(native, packed, 0, (codes(160, 288),), (grid(160, 288),))
    (spread,) = unpack_scales(packed, 0)
    assert spread[:8].tolist() == [[1, 2, 3]] * 8
    assert spread[8:].tolist() == [[4, 5, 6]] * 2


@pytest.mark.parametrize(
    ("sources", "scales", "words"),
    [
        ((codes(64, 32),), (grid(64, 32),), r"is \(64, 32\) .*expected \(64, 64\)"),
        ((codes(64, 64).float().bfloat16(),), (grid(64, 64),), r"torch.bfloat16, expected .*float8_e4m3fn"),
        ((codes(64, 64),) * 2, (grid(64, 64),), r"2 source tensors for a plain"),
        ((codes(64, 64),), (), r"block scales are none; expected 1 of \(1, 1\)"),
        ((codes(64, 64),), (grid(64, 256),), r"block scales are \(1, 2\).*expected 1 of \(1, 1\)"),
    ],
)
def test_wrong_shapes_are_reported(
    native: Native, sources: tuple[torch.Tensor, ...], scales: tuple[torch.Tensor, ...], words: str
) -> None:
    packed = allocate(native, MatrixLayout(64, 64, False, Format.FP8), 1)
    with pytest.raises(ShapeError, match=words):
        pack_slot(native, packed, 0, sources, scales)


def test_wrong_scales_of_groups_and_outputs_are_reported(native: Native) -> None:
    layout = MatrixLayout(64, 64, False, Format.NVFP4)
    sources, scales, above = drawn(layout)
    packed = allocate(native, layout, 1)
    with pytest.raises(ShapeError, match=r"group scales are \(64, 2\) .*expected 1 of \(64, 4\) torch.float8_e4m3fn"):
        pack_slot(native, packed, 0, sources, (scales[0][:, :2],), above=above)
    with pytest.raises(ShapeError, match=r"scales of outputs are none; expected 1 of \(64, 1\) or \(1, 1\)"):
        pack_slot(native, packed, 0, sources, scales)
    odd = allocate(native, MatrixLayout(64, 63, False, Format.MXFP4), 1)
    with pytest.raises(ShapeError, match="63 inputs of four bits do not fill whole bytes"):
        pack_slot(native, odd, 0, sources, scales)
