"""Weights in groups and in ggml blocks: packing gives every bit back, products equal f64 on every instruction set."""

import copy
import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.errors import ShapeError, WeightError
from moe_mk.experts.cpu_native.weights import pack_matrix, storage_of
from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding, Tuning
from moe_mk.kernels.native.layout import BlockType, Format, MatrixLayout, PartScales
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix, allocate, pack_slot, unpack_scales, unpack_slot, unpack_zeros
from moe_mk.kernels.native.prepared import experts_rows
from moe_mk.quant.gguf import GGUF, Gguf
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from tests.kernels.native.conftest import IsaHere
from tests.kernels.native.layers import Layer, batch, error
from tests.support.tiers import quick_where

SCHEMES: list[QuantScheme] = [*GROUPED.values(), *(scheme for scheme in GGUF.values() if not scheme.blocks.held)]
QUICK = (
    "int4_g32", "int4_g128_zp", "int4_row", "int4_g64_affine", "int8_g64_zp", "int8_g32_affine", "q4_1", "q5_1", "q4_k",
    "q5_k", "q6_k", "q8_0",
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class PartsLayer(Layer):
    """A layer whose weights are in groups or in blocks of ggml."""

    scheme: QuantScheme = GROUPED["int4_g32"]
    dtype: torch.dtype = torch.bfloat16
    """Of scales of groups."""

    def __post_init__(self) -> None:
        g = torch.Generator("cpu").manual_seed(self.seed)
        shapes = {"gate": (self.inter, self.hidden), "up": (self.inter, self.hidden), "down": (self.hidden, self.inter)}
        self.tensors = {}
        for name, (rows, columns) in shapes.items():
            w = torch.randn(self.slots, rows, columns, generator=g) * columns**-0.5
            # A mean other than 0 makes zero points and minima matter.
            q = self.scheme.quantize(w + 0.7 * columns**-0.5 * torch.randn(self.slots, rows, 1, generator=g))
            scales = None if q.scales is None else q.scales.to(self.dtype)
            zeros = q.zeros.to(self.dtype) if q.zeros is not None and q.zeros.is_floating_point() else q.zeros
            self.tensors[name] = QuantTensor(q.values, scales, self.scheme, None, zeros)
            self.parts[name + "_bias"] = torch.randn(self.slots, rows, generator=g) * 0.3

    def layouts(self) -> tuple[MatrixLayout, MatrixLayout]:
        storage = storage_of(self.scheme)
        assert storage is not None
        return (
            storage.layout(self.inter, self.hidden, gated=self.gated, scale_dtype=self.dtype),
            storage.layout(self.hidden, self.inter, gated=False, scale_dtype=self.dtype),
        )

    def pack(self, native: Native) -> tuple[PackedMatrix, PackedMatrix]:
        w13, w2 = (allocate(native, layout, self.slots) for layout in self.layouts())
        for slot in range(self.slots):
            pack_matrix(w13, slot, [self.tensors[n][slot] for n in ("gate", "up")[: 1 + self.gated]], "w13")
            pack_matrix(w2, slot, [self.tensors["down"][slot]], "w2")
        return w13, w2

    def weight(self, name: str, slot: int) -> Tensor:
        return self.tensors[name][slot].dequantize(torch.float32).double()


def quick_schemes() -> list[object]:
    return quick_where(lambda scheme: scheme.name in QUICK, SCHEMES)


def sizes(scheme: QuantScheme) -> tuple[int, int]:
    """H and I: odd ones where blocks allow it; more than one super-block, and groups that end within a step."""
    if isinstance(scheme, Gguf):
        return (512, 256) if scheme.block[1] == 256 else (224, 96)
    return 296, 136


def limit(isa: Isa) -> float:
    """bf16 h and out cost 2.3e-3; AMX may round scale * code - minimum to bf16 as well. Small samples: half more."""
    return 6e-3 if isa is Isa.AMX_BF16 else 3.8e-3


def is_exact(isa: Isa, scheme: QuantScheme, rows: int) -> bool:
    """Whether no weight is rounded: on AMX for up to 32 rows, and for any number if parts are whole units of 128 k."""
    return isa is not Isa.AMX_BF16 or scheme.name == "int8_g128" or rows <= (16 if scheme.name == "q6_k" else 32)


@pytest.mark.parametrize("scheme", quick_schemes(), ids=lambda s: s.name)
def test_rows_equal_f64_whatever_their_number(native: Native, isas: list[IsaHere], scheme: QuantScheme) -> None:
    hidden, inter = sizes(scheme)
    layer = PartsLayer(2, hidden, inter, scheme=scheme, dtype=DTYPES[len(scheme.name) % 3])
    w13, w2 = layer.pack(native)
    for rows in (1, 2, 3, 4, 5, 7, 13, 40):
        x, ids, weights = batch(rows, hidden, 2, 2, seed=rows)
        x = (x + 0.5).bfloat16()  # sums of x that matter
        ids[0, 0] = 0
        wanted = layer.reference(x, ids, weights, ExpertsMode())
        for library, isa in isas:
            y = experts_rows(library, x, ids, weights, w13, w2, isa=isa, threads=2)
            assert error(y, wanted) < limit(isa), (isa, rows)


@pytest.mark.parametrize("name", ["int4_g32_zp", "int4_g64", "int8_g128", "q4_1", "q5_1", "q4_k", "q5_k", "q6_k"])
def test_scales_and_minima_are_exact_for_few_and_many_rows(native: Native, isas: list[IsaHere], name: str) -> None:
    # Weights rounded to bf16 give 3.4e-3 to 3.9e-3 here.
    scheme = GROUPED.get(name) or GGUF[name]
    layer = PartsLayer(1, 512, 512, scheme=scheme)
    w13, w2 = layer.pack(native)
    for rows in (4, 24, 72):
        x, ids, weights = batch(rows, 512, 1, 1, seed=rows)
        ids.zero_()
        wanted = layer.reference(x, ids, weights, ExpertsMode())
        for library, isa in isas:
            y = experts_rows(library, x, ids, weights, w13, w2, isa=isa)
            assert (error(y, wanted) < 2.7e-3) == is_exact(isa, scheme, rows), (isa, rows)
            y = experts_rows(library, x, ids, weights, w13, w2, mode=ExpertsMode(batch_invariant=True), isa=isa)
            assert error(y, wanted) < 2.7e-3, (isa, rows)


@pytest.mark.parametrize("name", ["int4_g32", "int4_g32_zp"])
def test_on_amx_bits_depend_on_the_number_of_rows_unless_asked_otherwise(isas: list[IsaHere], name: str) -> None:
    layer = PartsLayer(1, 512, 256, scheme=GROUPED[name])
    x, ids, weights = batch(40, 512, 1, 1)
    ids.zero_()
    for library, isa in isas:
        w13, w2 = layer.pack(library)
        for invariant in (False, True):
            mode = ExpertsMode(batch_invariant=invariant)
            together = experts_rows(library, x, ids, weights, w13, w2, mode=mode, isa=isa)
            alone = experts_rows(library, x[:8], ids[:8], weights[:8], w13, w2, mode=mode, isa=isa)
            assert torch.equal(together[:8], alone) == (invariant or isa is not Isa.AMX_BF16), (isa, invariant)


@pytest.mark.parametrize("scheme", quick_schemes(), ids=lambda s: s.name)
def test_bits_do_not_depend_on_threads_nor_on_other_rows(isas: list[IsaHere], scheme: QuantScheme) -> None:
    hidden, inter = sizes(scheme)[0] + 1024, sizes(scheme)[1]  # inputs of two panels on AVX512-BF16
    layer = PartsLayer(1, hidden, inter, scheme=scheme)
    x, ids, weights = batch(17, hidden, 1, 1)
    ids.zero_()
    mode = ExpertsMode(batch_invariant=True)
    for library, isa in isas:
        w13, w2 = layer.pack(library)

        together = experts_rows(library, x, ids, weights, w13, w2, mode=mode, isa=isa, threads=1)
        for cut, threads in ((slice(17), 3), (slice(1), 1), (slice(5, 7), 2), (slice(3, 11), 2)):
            rows = (x[cut], ids[cut], weights[cut])
            alone = experts_rows(library, *rows, w13, w2, mode=mode, isa=isa, threads=threads)
            assert torch.equal(together[cut], alone), (isa, cut)


@pytest.mark.parametrize("scheme", quick_schemes(), ids=lambda s: s.name)
def test_rows_rounded_to_fp8_are_scaled_part_by_part(isas: list[IsaHere], scheme: QuantScheme) -> None:
    hidden, inter = sizes(scheme)
    layer = PartsLayer(1, hidden, inter, scheme=scheme)
    x, ids, weights = batch(9, hidden, 1, 1)
    ids.zero_()
    mode = ExpertsMode(quantize=Rounding.FP8)
    wanted = layer.reference(x, ids, weights, mode)
    for library, isa in isas:
        for rows in (3, 9):
            w13, w2 = layer.pack(library)
            y = experts_rows(library, x[:rows], ids[:rows], weights[:rows], w13, w2, mode=mode, isa=isa)
            # h may take the neighbouring FP8 code, with weights rounded to bf16 more often.
            assert error(y, wanted[:rows]) < (4e-2 if isa is Isa.AMX_BF16 else 1.5e-2), isa


SIZES = st.tuples(st.integers(1, 70), st.integers(1, 300), st.integers(1, 3))
"""Outputs, inputs, threads."""


@given(st.sampled_from(SCHEMES), st.sampled_from(DTYPES), SIZES, st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_unpacking_gives_every_bit_back(
    native: Native, scheme: QuantScheme, dtype: torch.dtype, sizes: tuple[int, ...], gated: bool, seed: int
) -> None:
    outputs, inputs, threads = sizes
    storage, g = storage_of(scheme), torch.Generator("cpu").manual_seed(seed)
    assert storage is not None
    unit = scheme.block[1] if isinstance(scheme, Gguf) else 2
    layout = storage.layout(outputs, -(-inputs // unit) * unit, gated=gated, scale_dtype=dtype)
    packed = allocate(native, layout, 2)

    def octets(*shape: int, top: int = 256) -> Tensor:
        return torch.randint(0, top, shape, dtype=torch.uint8, generator=g)

    halves = range(1 + gated)
    sources = tuple(octets(*layout.source_shape) for _ in halves)
    scales: tuple[Tensor, ...] = ()
    zeros: tuple[Tensor, ...] = ()
    if isinstance(scheme, Gguf):
        sources = tuple(finite(s, layout) for s in sources)
    elif layout.parts is not None:
        groups = layout.parts.of_row(layout.num_inputs)
        scales = tuple(torch.randn(outputs, groups, generator=g).to(dtype) for _ in halves)
        if layout.parts.biases:
            zeros = tuple(-each.flip(0) for each in scales)
        if layout.parts.zeros:
            zeros = tuple(octets(outputs, groups, top=2**layout.format.bits) for _ in halves)
    pack_slot(native, packed, 1, sources, scales, zeros=zeros, threads=threads)
    packed.copy_slot(1, 0)
    for slot in range(2):
        for mine, theirs in (
            (unpack_slot(native, packed, slot, threads=threads), sources),
            (unpack_scales(packed, slot), scales),
            (unpack_zeros(packed, slot), zeros),
        ):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def finite(octets: Tensor, layout: MatrixLayout) -> Tensor:
    """Any blocks whose f16 scales are finite."""
    kind = layout.block_type
    assert kind is not None
    blocks = octets.view(octets.shape[0], -1, kind.num_bytes)
    for at in (208,) if kind is BlockType.Q6_K else (0,) if kind in (BlockType.Q4_0, BlockType.Q8_0) else (0, 2):
        blocks[..., at + 1] &= 0xBF
    return blocks.view(octets.shape)


def test_packed_bytes_are_those_of_the_checkpoint(native: Native) -> None:
    # 256 x 512: 4 bits and a bf16 scale for 32 are 4.5 bits, with a byte for the zero point 4.75; Q4_K: 144 B for 256.
    grouped = {"int4_g32": 4.5, "int4_g32_zp": 4.75, "int4_g128": 4.125, "int8_g128_zp": 8.1875, "int4_g64_affine": 4.5}
    blocks = {"q4_0": 4.5, "q4_1": 5, "q5_1": 6, "q8_0": 8.5, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625}
    for name, bits in {**grouped, **blocks}.items():
        scheme = GROUPED.get(name) or GGUF[name]
        storage = storage_of(scheme)
        assert storage is not None
        packed = allocate(native, storage.layout(256, 512, gated=False), 1)
        assert packed.num_bytes * 8 == bits * 256 * 512, name
        assert packed.num_bytes == scheme.num_bytes(256, 512), name


@pytest.mark.parametrize("scheme", quick_schemes(), ids=lambda s: s.name)
def test_a_scale_minimum_or_bias_that_is_not_finite_is_refused_in_each_source(
    native: Native, scheme: QuantScheme
) -> None:
    layer = PartsLayer(1, *sizes(scheme), scheme=scheme)
    packed, clean = allocate(native, layer.layouts()[0], 1), [layer.tensors[name][0] for name in ("gate", "up")]
    for value, source in product((math.nan, math.inf, -math.inf), (0, 1)):
        for part in scheme.blocks.halves if isinstance(scheme, Gguf) else ("scales", "zeros"):
            given = copy.deepcopy(clean)
            if isinstance(part, int):  # the place of an f16 in a block
                blocks = given[source].values[-1].view(-1, scheme.blocks.num_bytes)  # type: ignore[attr-defined]
                blocks[-1, part : part + 2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
            elif (held := getattr(given[source], part)) is not None and held.is_floating_point():
                held[-1, -1] = value
            else:
                continue
            with pytest.raises(WeightError, match=r"w13 of slot 0: 1 of its \w+ (scales|biases) are NaN or infinite"):
                pack_matrix(packed, 0, given, "w13", native)


def test_damaged_zero_points_are_refused(native: Native) -> None:
    layout = MatrixLayout(32, 64, False, Format.INT4, parts=PartScales(32, torch.float16, zeros=True))
    packed, w = allocate(native, layout, 1), torch.zeros(32, 32, dtype=torch.uint8)
    scales, zeros = torch.ones(32, 2, dtype=torch.float16), torch.zeros(32, 2, dtype=torch.uint8)
    with pytest.raises(WeightError, match="a zero point of 17 for codes below 16"):
        pack_slot(native, packed, 0, (w,), (scales,), zeros=(zeros + 17,))
    pack_slot(native, packed, 0, (w,), (scales,), zeros=(zeros + 16,))  # of GPTQ, stored less one: no code is above it
    assert torch.equal(unpack_zeros(packed, 0)[0], zeros + 16)
    with pytest.raises(ShapeError, match=r"zero points are none; expected 1 of \(32, 2\) torch.uint8"):
        pack_slot(native, packed, 0, (w,), (scales,))


def test_layouts_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ShapeError, match="groups of 48 inputs cannot be packed; use 32, 64, a multiple of 128 or 0"):
        PartScales(48, torch.bfloat16)
    with pytest.raises(ShapeError, match="Q4_K has blocks of 256 inputs, which do not divide 128"):
        MatrixLayout.of_blocks(32, 128, False, BlockType.Q4_K)
    with pytest.raises(ShapeError, match="INT4 needs scales of groups"):
        MatrixLayout(32, 128, False, Format.INT4)
    with pytest.raises(ShapeError, match="Q6_K is packed from ggml blocks"):
        MatrixLayout(32, 256, False, Format.Q6_K)


@pytest.mark.parametrize("scheme", quick_schemes(), ids=lambda s: s.name)
def test_panels_and_registers_give_the_same_bits(isas: list[IsaHere], scheme: QuantScheme) -> None:
    hidden, inter = sizes(scheme)
    layer = PartsLayer(1, hidden, inter, scheme=scheme)
    for library, isa in isas:
        w13, w2 = layer.pack(library)
        for rows in (1, 2, 3, 4, 6):
            x, ids, weights = batch(rows, hidden, 1, 1, seed=rows)
            ids.zero_()
            few, panels = (ExpertsMode(tuning=Tuning(panel_rows=bound)) for bound in (5, 1))
            one, other = (experts_rows(library, x, ids, weights, w13, w2, mode=m, isa=isa) for m in (few, panels))
            assert torch.equal(one, other), (isa, rows)


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0"])
def test_small_scales_count_where_the_caller_flushes_denormals(isas: list[IsaHere], name: str) -> None:
    # Of these weights the f16 scales are subnormal. torch.set_flush_denormal, and libraries that are loaded into the
    # process, make denormal f32 inputs count as zero in the thread that calls.
    layer = PartsLayer(1, 256, 256, scheme=GGUF[name])
    for tensor in layer.tensors.values():
        tensor.values.copy_(layer.scheme.quantize(torch.randn(1, 256, 256) * 1e-4).values)
    x, ids, weights = batch(3, 256, 1, 1)
    ids.zero_()
    for library, isa in isas:
        w13, w2 = layer.pack(library)
        wanted = experts_rows(library, x, ids, weights, w13, w2, isa=isa, threads=1)
        assert wanted.abs().max() > 0
        assert torch.set_flush_denormal(True)
        try:
            got = experts_rows(library, x, ids, weights, w13, w2, isa=isa, threads=1)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(got, wanted), isa
