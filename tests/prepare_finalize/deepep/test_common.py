"""Rows as libraries want them and back, and the limits of number formats."""

import pytest
import torch

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.errors import UnsupportedError
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.deepep.common import (
    Call,
    UniformExpertIds,
    expect_wire,
    format_reasons,
    from_library,
    padded_row,
    payloads_of,
    rows_of,
    to_library,
)
from moe_mk.prepare_finalize.deepep.high_throughput import DeepEPHighThroughput
from moe_mk.quant import BF16, FP32, FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.microscaling import MXFP8
from moe_mk.quant.nvfp4 import NVFP4_TOKENS
from moe_mk.quant.tensor import QuantScheme
from tests.support.deepep_ranks import asked, ranks_of, small


@pytest.mark.parametrize("wire", [BF16, FP8_1x128, FP8_1x128_UE8M0], ids=lambda wire: wire.name)
@pytest.mark.parametrize("tokens", [0, 3])
def test_rows_go_and_come_back_bit_for_bit(wire: QuantScheme, tokens: int) -> None:
    x = wire.quantize(torch.randn(tokens, 1088, generator=torch.Generator().manual_seed(0)).bfloat16())
    given = to_library(x, padded_row(1088, 512))
    values, scales = given if isinstance(given, tuple) else (given, None)
    assert values.shape == (tokens, 1280) and values.is_contiguous() and bool((values[:, 1088:].float() == 0).all())
    if scales is not None:  # 9 scales, or 9 exponents in 3 words
        assert scales.element_size() == 4 and scales.shape == (tokens, 3 if wire.scale_dtype.itemsize == 1 else 9)
    back = from_library(given, wire, 1088)
    assert torch.equal(back.dequantize(torch.float32), x.dequantize(torch.float32))


def test_rows_fill_a_multiple_of_bytes() -> None:
    assert [padded_row(hidden, 512) for hidden in (1, 256, 257, 7168)] == [256, 256, 512, 7168]


def test_formats_that_do_not_travel() -> None:
    assert format_reasons(asked()) == [] and [r.code for r in format_reasons(asked(dtype=FP32))] == ["dtype"]
    narrow = {"weights": "fp8_block", "block": (64, 64)}
    assert format_reasons(small()) == [] and [r.code for r in format_reasons(small(quant=narrow))] == ["wire"]
    assert format_reasons(small(quant=narrow, wire="plain")) == []


def test_a_row_goes_to_each_rank_or_first_to_each_node() -> None:
    # 8 ranks, 256 experts, top-8 of 4 of 8 groups: a token visits 3.983 of 8 ranks, 7 of 8 of them elsewhere.
    one = DeepEPHighThroughput.volume(asked())
    assert round(one.dispatch_rows / 128, 2) == round(3.983 * 7 / 8, 2) and one.far_rows is None
    # 4 nodes: 3.133 of them, 3 of 4 elsewhere; inside, 6.820 ranks of 32, 7 of 8 others of the same node.
    many = DeepEPHighThroughput.volume(asked(ep=32))
    assert many.far_rows is not None and round(many.far_rows / 128, 2) == 2.35
    assert round((many.dispatch_rows - many.far_rows) / 128, 2) == round(6.820 * 7 / 8, 2)


@pytest.mark.parametrize("wire", [INT8_TOKEN, MXFP8, NVFP4_TOKENS, Fp8Block("fp8_1x64", 1, 64)], ids=lambda w: w.name)
@pytest.mark.parametrize("name", ["deepep_ht", "deepep_ll", "uccl_ep"])
def test_rows_that_kernels_do_not_know_are_refused_when_a_layer_is_built(name: str, wire: QuantScheme) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"(?s)cannot carry {wire.name} rows.*bf16, and FP8 .* every 128 channels"
    ):
        ranks_of(name, wire)


def test_rows_that_kernels_know() -> None:
    for wire in (BF16, FP32, FP8_1x128, FP8_1x128_UE8M0):
        expect_wire(wire, "deep_ep")


# Bytes of a DeepSeek-V3 row of 7168 values.
SCHEMES: list[tuple[QuantScheme, int]] = [
    (BF16, 14336),
    (FP8_1x128, 7392),
    (FP8_1x128_UE8M0, 7224),
    (MXFP8, 7392),
    (NVFP4_TOKENS, 4032),
]


@pytest.mark.row(77)
@pytest.mark.parametrize("scheme,row", SCHEMES, ids=[scheme.name for scheme, _ in SCHEMES])
def test_payloads_are_dense_rows_of_as_many_bytes_as_the_format_has(scheme: QuantScheme, row: int) -> None:
    x = scheme.quantize(torch.randn(3, 7168))
    payloads = payloads_of(x)
    assert sum(part.element_size() * part.shape[1] for part in payloads) == row
    assert all(part.dim() == 2 and len(part) == 3 and part.is_contiguous() for part in payloads)
    back = rows_of([part.clone() for part in payloads], x)
    assert torch.equal(back.dequantize(torch.float32), x.dequantize(torch.float32))


CPU = torch.device("cpu")


def numbers(place: ExpertMap, rank: int, multiple: int = 1) -> UniformExpertIds:
    comm = LockstepWorld(place.num_ranks).communicators()[rank]
    return UniformExpertIds(TransportContext(comm, place, place.tables(CPU), FP32, FP32, 2, 2, CPU), multiple)


def test_ranks_with_fewer_experts_leave_gaps() -> None:
    # Physical experts 0 1 | 2 | 3 4 on three ranks become numbers 0 1 | 2 | 4 5.
    place = ExpertMap(((0, 1), (2,), (3, 4)), 5)
    ids_TK = torch.tensor([[0, 1, 2], [3, 4, -1]])
    assert numbers(place, 0).of(ids_TK).tolist() == [[0, 1, 2], [4, 5, -1]]
    assert numbers(place, 0).of(ids_TK, nowhere=6).tolist() == [[0, 1, 2], [4, 5, 6]]
    assert numbers(place, 2).slots(torch.tensor([[0, 1, 2], [4, 5, -1]])).tolist() == [[-1, -1, -1], [0, 1, -1]]
    assert numbers(place, 1).slots(torch.tensor([[2, 3]])).tolist() == [[0, -1]], "number 3 is a gap"


@pytest.mark.parametrize("ranks,multiple,per_rank", [(2, 4, 6), (3, 4, 4), (4, 4, 3), (8, 4, 2)])
def test_there_are_as_many_numbers_as_a_library_wants_multiples_of(ranks: int, multiple: int, per_rank: int) -> None:
    made = numbers(ExpertMap.linear(max(9, ranks), ranks), 0, multiple)
    assert made.per_rank == per_rank and made.total == ranks * per_rank and made.total % multiple == 0


def test_division_finds_the_rank_and_slots_the_way_back() -> None:
    place = ExpertMap.from_physical([5, 0, 3, 1, 4, 2, 0, 5], 4, 6)
    tables, physical = place.tables(CPU), torch.arange(8)
    for rank in range(4):
        made = numbers(place, rank)
        number = made.of(physical)
        assert torch.equal(number // made.per_rank, tables.rank_of_P)
        assert torch.equal(made.slots(number), tables.local_slots(physical, rank).to(torch.int32))


def old(x: int, *, hook: bool = False) -> tuple[int, bool]:
    return x, hook


def new(scale: float = 1.0, hook: bool = False, x: int = 0, overlap: bool = False) -> tuple[int, bool, bool]:
    return x, hook, overlap


def test_order_does_not_matter_and_options_that_a_build_lacks_are_left_out() -> None:
    assert Call(old, ["x"])({"x": 3}, {"hook": True, "overlap": True}) == (3, True)
    assert Call(new, ["x"])({"x": 3}, {"hook": True, "overlap": True}) == (3, True, True)
    assert Call(lambda **anything: anything, ["x"])({"x": 3}, {"y": 4}) == {"x": 3, "y": 4}


def test_what_an_adapter_cannot_do_without_is_asked_for_when_it_is_built() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)old of the installed build lacks.*no 'mask'.*no 'scale'"):
        Call(old, ["x", "mask", "scale"])
