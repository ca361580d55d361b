"""Packed experts of every scheme: back bit for bit, moved as bytes, cut for tensor parallelism, at their old size."""

from dataclasses import replace

import pytest
import torch

from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.experts.cpu_native.weights import PackedExpertWeights, storage_of
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.kernels.native.layer import RowsOfExperts
from moe_mk.quant import (
    BF16,
    FP8_CHANNEL,
    FP8_TENSOR,
    FP16,
    FP32,
    INT8_CHANNEL,
    INT8_TOKEN,
    MXFP4,
    MXFP8,
    NVFP4,
    FP8_1x128,
    FP8_1x128_UE8M0,
    FP8_128x128,
    FP8_128x128_UE8M0,
    INT8_128x128,
    Int8Block,
    QuantScheme,
    QuantTensor,
)
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.int8 import int8_groups
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights, digest
from moe_mk.weights.slices import narrow_columns, narrow_rows
from tests.layer.native import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
SCHEMES = [
    BF16, FP8_128x128, FP8_CHANNEL, FP8_TENSOR, INT8_128x128, INT8_CHANNEL, MXFP8, MXFP4, NVFP4, GROUPED["int4_g32"],
    GROUPED["int4_g64_zp"], GROUPED["int8_row_zp"], GGUF["q4_0"], GGUF["q4_1"], GGUF["q5_1"], GGUF["q8_0"],
]  # fmt: skip
SLOTS, HIDDEN, INNER = 3, 192, 256


def experts(scheme: QuantScheme) -> MappedExpertWeights:
    g = torch.Generator("cpu").manual_seed(9)

    def matrix(rows: int, columns: int) -> QuantTensor:
        return scheme.quantize(torch.randn(rows, columns, generator=g) * columns**-0.5)

    shapes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    slots = [SlotWeights(*(matrix(*shape) for shape in shapes), None) for _ in range(SLOTS)]
    return MappedExpertWeights(tuple(slots), scheme)


def context(compute: QuantScheme = BF16, inner: int = INNER) -> ExpertsContext:
    return ExpertsContext(BF16, compute, "silu", SLOTS, HIDDEN, inner, torch.device("cpu"))


def packed(weights: MappedExpertWeights, inner: int = INNER) -> PackedExpertWeights:
    made = EXPERTS["cpu_native"](context(inner=inner)).relayout(weights)
    assert isinstance(made, PackedExpertWeights)
    return made


def matrices(slot: SlotWeights) -> list[QuantTensor]:
    return [q for q in (slot.gate_IH, slot.up_IH, slot.down_HI) if q is not None]


def parts_of(slot: SlotWeights) -> list[torch.Tensor]:
    """Values, scales, scales above them and zero points, as bytes."""
    held = [part for q in matrices(slot) for part in (q.values, q.scales, q.global_scale, q.zeros) if part is not None]
    return [part.contiguous().view(torch.uint8) for part in held]


def same(mine: SlotWeights, theirs: SlotWeights) -> bool:
    """Values, scales and scales above them, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(parts_of(mine), parts_of(theirs), strict=True))


def rows(count: int) -> RowTokens:
    g = torch.Generator("cpu").manual_seed(4)
    x = torch.randn(count, HIDDEN, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(SLOTS, generator=g)[:2] for _ in range(count)]).to(torch.int32)
    return RowTokens(QuantTensor(x, None, BF16), ids, torch.rand(count, 2, generator=g), SLOTS)


@pytest.mark.row(110)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_unpacking_gives_values_and_scales_back_bit_for_bit(scheme: QuantScheme) -> None:
    given = experts(scheme)
    made = packed(given)
    assert all(same(made.slot(index), given.slot(index)) for index in range(SLOTS))
    assert digest(made) == digest(given) != digest(experts(BF16 if scheme is not BF16 else MXFP8))
    for matrix in (made.w13, made.w2):
        matrix.copy_slot(2, 0)  # bytes
    assert digest(made) != digest(given)
    assert same(made.slot(0), given.slot(2)) and same(made.slot(1), given.slot(1))


@pytest.mark.parametrize(("compute", "takes_fp8"), [(BF16, True), (FP8_1x128, True), (INT8_TOKEN, False)])
def test_rows_in_fp8_are_taken_unless_rows_are_rounded_to_int8(compute: QuantScheme, takes_fp8: bool) -> None:
    backend = EXPERTS["cpu_native"](context(compute))
    rows = backend.fuse_layer(backend.relayout(experts(INT8_CHANNEL)), 4)
    assert isinstance(rows, RowsOfExperts) and rows.takes_fp8 == takes_fp8


def test_unpacked_tensors_are_copies() -> None:
    for scheme in (FP8_128x128, MXFP4, GROUPED["int4_g64_zp"], GGUF["q8_0"]):
        made = packed(experts(scheme))
        before = [part.clone() for part in parts_of(made.slot(1))]
        found = parts_of(made.slot(1))
        for matrix in (made.w13, made.w2):
            for memory in (matrix.values_LB, matrix.scales_LX, matrix.zeros_LX):
                if memory is not None:
                    memory.view(torch.uint8).zero_()
        assert all(torch.equal(one, other) for one, other in zip(found, before, strict=True)), scheme.name


def test_progress_is_reported_after_every_expert() -> None:
    stated: list[tuple[str, int, int]] = []
    made = EXPERTS["cpu_native"](context()).relayout(experts(BF16), lambda *state: stated.append(state))
    total = made.num_bytes
    assert stated == [("pack", total * done // SLOTS, total) for done in (1, 2, 3)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_packed_experts_take_the_bytes_of_the_checkpoint(scheme: QuantScheme) -> None:
    # One f32 an output more at most: scales of blocks are spread to 16 outputs, one for all of them to each.
    given = experts(scheme)
    outputs = SLOTS * (2 * INNER + HIDDEN)
    assert given.num_bytes <= packed(given).num_bytes <= given.num_bytes + 4 * outputs


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_slices_of_tensor_parallel_ranks_add_up(scheme: QuantScheme) -> None:
    given, tokens, half = experts(scheme), rows(9), INNER // 2
    exact = ReferenceExperts(context()).run(tokens, given).y.float()
    total = torch.zeros_like(exact)
    for start in (0, half):
        cut = []
        for slot in given.slots:
            assert slot.gate_IH is not None
            gate, up = narrow_rows(slot.gate_IH, start, half), narrow_rows(slot.up_IH, start, half)
            cut.append(SlotWeights(gate, up, narrow_columns(slot.down_HI, start, half), None))
        part = MappedExpertWeights(tuple(cut), scheme)
        made = packed(part, inner=half)
        assert all(same(made.slot(index), part.slot(index)) for index in range(SLOTS))
        total += EXPERTS["cpu_native"](context(inner=half)).run(tokens, made).y.float()
    assert ((total - exact).norm() / exact.norm()).item() < 6e-3  # two bf16 halves


@pytest.mark.parametrize(
    ("scheme", "tokens_as"),
    [
        (INT8_CHANNEL, INT8_TOKEN),
        (GROUPED["int4_g32_zp"], int8_groups(32)),
        (GROUPED["int4_g128"], int8_groups(128)),
        (GGUF["q8_0"], int8_groups(32)),
        (FP8_128x128, FP8_1x128),
        (FP8_128x128_UE8M0, FP8_1x128_UE8M0),
    ],
    ids=lambda s: s.name,
)
def test_tokens_that_travelled_rounded_are_multiplied_as_they_are(scheme: QuantScheme, tokens_as: QuantScheme) -> None:
    given, tokens = experts(scheme), rows(7)
    backend = EXPERTS["cpu_native"](context(tokens_as))
    own = backend.relayout(given)
    rounded = RowTokens(tokens_as.quantize(tokens.x_RH.values), tokens.ids_RK, tokens.weights_RK, SLOTS)
    here, sent = backend.run(tokens, own).y, backend.run(rounded, own).y
    assert torch.equal(here, sent)
    wanted = ReferenceExperts(context(tokens_as)).run(tokens, given).y.float()
    # Where h lies between two codes the reference may take the other one: a step of 2^-3 for FP8, of 1 / 127 for INT8.
    assert ((here.float() - wanted).norm() / wanted.norm()).item() < (8e-3 if tokens_as.family == "int8" else 1.2e-2)


def test_rounded_tokens_and_shared_experts_in_bf16_are_separate_calls() -> None:
    scheme = GROUPED["int4_g32"]
    backend = EXPERTS["cpu_native"](context(int8_groups(32)))
    own = backend.relayout(experts(scheme))
    alike, plain = packed(experts(scheme)), packed(experts(BF16))
    assert backend.fuse_shared_experts(own, alike) is not None
    assert backend.fuse_shared_experts(own, plain) is None
    ungated = [replace(slot, gate_IH=None) for slot in experts(scheme).slots]
    assert backend.fuse_shared_experts(own, packed(replace(experts(scheme), slots=tuple(ungated)))) is None
    assert EXPERTS["cpu_native"](context()).fuse_shared_experts(own, plain) is not None


def test_w2_may_be_stored_in_another_format_than_w13() -> None:
    first, second, tokens = experts(GROUPED["int4_g32"]), experts(GGUF["q8_0"]), rows(9)
    mixed = [SlotWeights(a.gate_IH, a.up_IH, b.down_HI, None) for a, b in zip(first.slots, second.slots, strict=True)]
    given = MappedExpertWeights(tuple(mixed), GROUPED["int4_g32"])
    made = packed(given)
    assert all(same(made.slot(index), given.slot(index)) for index in range(SLOTS))
    assert [q.scheme.name for q in matrices(made.slot(0))] == ["int4_g32", "int4_g32", "q8_0"]
    wanted = ReferenceExperts(context()).run(tokens, given).y.float()
    got = EXPERTS["cpu_native"](context()).run(tokens, made).y.float()
    assert ((got - wanted).norm() / wanted.norm()).item() < 6e-3


def test_int8_tokens_are_decoded_for_bf16_products() -> None:
    own, tokens = packed(experts(INT8_CHANNEL)), rows(7)
    plain, codes = EXPERTS["cpu_native"](context()), INT8_TOKEN.quantize(tokens.x_RH.values)
    decoded = QuantTensor(codes.dequantize(torch.bfloat16), None, BF16)
    got, wanted = (plain.run(RowTokens(x, tokens.ids_RK, tokens.weights_RK, SLOTS), own).y for x in (codes, decoded))
    assert torch.equal(got, wanted)


def test_schemes_the_kernels_have_no_format_for() -> None:
    assert [storage_of(scheme) for scheme in (FP16, FP32, Int8Block("int8_64x64", 64, 64))] == [None] * 3
