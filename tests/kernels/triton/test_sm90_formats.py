"""sm_90 code decodes or multiplies every weight format of `kernel_format.py`, with biases and clamps. No GPU needed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

from moe_mk.experts.triton.tuning import BUILT_IN, DECODED, DECODED_TO_FP8, INTEGERS
from moe_mk.experts.triton.weights import LARGEST_SHIFT, in_words
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.triton.tile import SHARED_MEMORY, Tile
from tests.kernels.triton.sm90_gemms import is_after_3_6, w2_of, w13, w13_of

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled

pytestmark = [pytest.mark.sm90, pytest.mark.slow]

DECODED_FORMS = ("w_fp8", "w_int8_block", "w_fp8_row", "w_int8", "w_mxfp8", "w_mxfp4", "w_nvfp4")
INTEGER_FORMS = ("w_int4", "w_int4/128", "w_int4_zero", "w_int4_zero/128", "w_int8_group", "w_int8_zero")
FORMAT_TILES = dict.fromkeys(("int8", "int8_block", "fp8_row"), BUILT_IN) | dict.fromkeys(DECODED_FORMS, DECODED)
FORMAT_TILES |= dict.fromkeys(INTEGER_FORMS, INTEGERS) | {"mxfp4": DECODED_TO_FP8}
IN_CI = ("int8", "fp8_row", "w_fp8", "w_mxfp4", "w_nvfp4", "w_int4_zero/128")
"""One form of each way to decode codes and to apply scales; test_mxfp4_is_decoded has that of mxfp4."""
UNITS = {"int8": "IGMMA", "int8_block": "IGMMA", "fp8_row": "QGMMA", "mxfp4": "QGMMA"}
"""Of the matrix unit where both sides are codes; decoded weights are multiplied in 16 bits."""


def check_format(format: str, built: Compiled, *, swap: bool, stack: int = 0) -> None:
    """stack: bytes of local memory that may be used outside of the loop."""
    unit = UNITS.get(format, "HGMMA")
    assert built.instructions[unit] >= 4
    assert [name for name in built.instructions if name.endswith("MMA")] == [unit]
    assert built.instructions["UTMALDG"], "weights travel at the size they are stored in"
    assert built.spills_in_loop == built.scratch == 0 and built.shared < SHARED_MEMORY
    assert built.stack <= stack and (stack or not built.spills)
    if swap and format not in UNITS:
        assert built.instructions["STS"] <= 16, "decoded weights stay in registers"


def stack_of_w13(format: str, tile: Tile) -> int:
    """Triton 3.6 keeps all in registers; 3.8 has six words of w13 with mxfp4 and 128 rows outside, not in the loop."""
    spilling = is_after_3_6() and format == "mxfp4" and tile.rows == 128
    return 24 if spilling else 0


@pytest.mark.parametrize(
    "format", [pytest.param(format, marks=[pytest.mark.stress] * (format not in IN_CI)) for format in FORMAT_TILES]
)
def test_every_type_of_weights_is_decoded_on_the_way_to_the_matrix_unit(format: str) -> None:
    decode, prefill = FORMAT_TILES[format][0][1], FORMAT_TILES[format][-1][1]
    check_format(format, w13_of(format, decode), swap=True)
    check_format(format, w2_of(format, decode), swap=True)
    check_format(format, w13_of(format, prefill), swap=False, stack=stack_of_w13(format, prefill))


@pytest.mark.stress
@pytest.mark.parametrize("place", [1, 2, 3], ids=["few rows", "mid", "prefill"])
@pytest.mark.parametrize("format", FORMAT_TILES)
def test_so_it_is_at_every_tile(format: str, place: int) -> None:
    tile = FORMAT_TILES[format][place][1]
    check_format(format, w13_of(format, tile), swap=tile.swap, stack=stack_of_w13(format, tile))
    check_format(format, w2_of(format, tile), swap=tile.swap)


@pytest.mark.parametrize("place", [1, -1], ids=["decode", "prefill"])
def test_biases_and_clamps_cost_no_spill(place: int) -> None:
    """gpt-oss: MXFP4, biases of both products, SwiGLU behind clamps."""
    tile = FORMAT_TILES["w_mxfp4"][place][1]
    check_format("w_mxfp4", w13_of("w_mxfp4", tile, act="swiglu_oai", biased=True), swap=tile.swap)
    check_format("w_mxfp4", w2_of("w_mxfp4", tile, biased=True), swap=tile.swap)


@pytest.mark.stress
@pytest.mark.parametrize("format", ["int8", "int8_block", "w_int8", "w_fp8"])
@pytest.mark.parametrize("act", ["silu", "swiglu_oai"])
def test_nor_do_they_beside_scales_of_whole_rows(format: str, act: str) -> None:
    tile = FORMAT_TILES[format][-1][1]
    check_format(format, w13_of(format, tile, act=act, biased=True), swap=False)


@pytest.mark.stress
def test_of_biased_nvfp4_only_what_is_needed_once_a_tile_leaves_the_registers() -> None:
    built = w13_of("w_nvfp4", FORMAT_TILES["w_nvfp4"][-1][1], act="swiglu_oai", biased=True)
    assert built.instructions["HGMMA"] >= 4 and built.spills_in_loop == 0 and built.stack <= 16


STEPS = {16: (569, 319), 32: (412, 260), 64: (415, 239), 128: (513, 267)}
"""Instructions of a step of both GEMMs with mxfp4, by rows of a tile; docs/performance.md has some of them."""
SLACK = 1.05
"""For another patch release of the compiler."""


@pytest.mark.parametrize("place", range(4), ids=lambda place: f"{DECODED_TO_FP8[place][1].rows} rows")
def test_mxfp4_is_decoded_to_fp8_without_a_conversion_instruction(place: int) -> None:
    tile = DECODED_TO_FP8[place][1]
    both = (w13_of("mxfp4", tile), stack_of_w13("mxfp4", tile)), (w2_of("mxfp4", tile), 0)
    for (built, stack), recorded, blocks in zip(both, STEPS[tile.rows], (2, 1), strict=True):
        check_format("mxfp4", built, swap=False, stack=stack)
        assert not built.in_step["F2FP"] and not built.in_step["I2F"] and not built.in_step["F2F"]
        assert built.step <= SLACK * recorded
        if tile.swap:
            words = 4 if is_after_3_6() else 2  # of shifts, a block
            assert built.in_step["STS"] <= words * blocks, "shifts go through shared memory, weights do not"


@pytest.mark.stress
@pytest.mark.parametrize("place", range(4), ids=lambda place: f"{DECODED_TO_FP8[place][1].rows} rows")
def test_of_mxfp4_with_rows_in_place_one_address_leaves_the_registers(place: int) -> None:
    tile = DECODED_TO_FP8[place][1]
    shape = {"swap": tile.swap, "warps": tile.warps, "stages": tile.stages}
    built = w13(tile.rows, **shape, gather=False, format="mxfp4")
    assert built.spills_in_loop == 0 and built.stack <= (8 if tile.rows == 128 else 0)
    assert built.step <= STEPS[tile.rows][0]


@pytest.mark.parametrize("place", range(4), ids=lambda place: f"{DECODED_TO_FP8[place][1].rows} rows")
def test_the_words_of_mxfp4_are_whole_in_a_register(place: int) -> None:
    """The assembly reads four bytes that a thread has one after the other: they must be four columns of a row."""
    for built in (w13_of("mxfp4", DECODED_TO_FP8[place][1]), w2_of("mxfp4", DECODED_TO_FP8[place][1])):
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", built.ttgir, re.MULTILINE))
        decoders = [line for line in built.ttgir.splitlines() if "prmt.b32" in line]
        assert decoders
        for line in decoders:
            name = re.search(r"tensor<128x64xi8, (#\w+)>", line)
            assert name is not None
            by_row = re.search(r"sizePerThread = \[1, 16\].* order = \[1, 0\]", layouts[name[1]])
            assert by_row or "register = [[0, 1], [0, 2]," in layouts[name[1]]


def permuted(low: int, high: int, selector: int) -> int:
    """prmt.b32: four bytes of eight."""
    table, places = (high << 32 | low).to_bytes(8, "little"), [selector >> 4 * byte & 15 for byte in range(4)]
    assert max(places) < 8, "the highest bit of a place repeats the sign of a byte"
    return int.from_bytes(bytes(table[place] for place in places), "little")


PTX = {
    "and.b32": int.__and__, "or.b32": int.__or__, "shr.u32": int.__rshift__, "prmt.b32": permuted,
    "shl.b32": lambda word, count: word << count & 0xFFFFFFFF,
}  # fmt: skip


def evaluated(assembly: str, inputs: dict[str, int]) -> tuple[int, int]:
    """The results of straight-line PTX on 32-bit words."""
    values = dict(inputs)
    for line in assembly.strip("{} \n").split(";"):
        if ".reg" not in line and line.strip():
            name, target, *given = line.replace(",", " ").split()
            values[target] = PTX[name](*(values[each] if each in values else int(each, 0) for each in given))
    return values["$0"], values["$1"]


def test_the_assembly_decodes_every_code_under_every_shift() -> None:
    from moe_mk.kernels.triton import weight_formats as kernels

    def table(shift: int, half: str) -> int:
        given = [getattr(kernels, f"{half}_{name}").value for name in ("BINADE", "MAGNITUDES")]
        return (shift * given[0] + given[1]) & 0xFFFFFFFF

    draw, names = torch.Generator().manual_seed(2), ("$2", "$3", "$7", "$11", "$15")
    each = torch.arange(16)[:, None].expand(16, 128)
    codes = torch.cat((each, torch.randint(0, 16, (8, 128), generator=draw)))
    words = in_words(e2m1.pack(codes.to(torch.uint8)), 64).view(torch.int32)
    for low in range(LARGEST_SHIFT + 1):
        high = LARGEST_SHIFT - low
        tables = [table(low, "LOW"), table(low, "HIGH"), table(high, "LOW"), table(high, "HIGH")]
        expected = e2m1.decode(codes) * torch.exp2(torch.tensor([low - 5.0, high - 5.0]).repeat_interleave(64))
        for row, given in enumerate(words.tolist()):
            found = [
                evaluated(kernels.DECODE_FP8.value, dict(zip(names, (word & 0xFFFFFFFF, *tables), strict=True)))
                for word in given
            ]
            halves = torch.tensor(found).T.to(torch.uint32).contiguous().view(torch.float8_e4m3fn)
            assert torch.equal(halves.flatten().float(), expected[row])


@pytest.mark.stress
@pytest.mark.parametrize("place", range(4), ids=lambda place: f"{DECODED_TO_FP8[place][1].rows} rows")
def test_of_biased_mxfp4_only_what_is_needed_once_a_tile_leaves_the_registers(place: int) -> None:
    tile = DECODED_TO_FP8[place][1]
    built = w13_of("mxfp4", tile, act="swiglu_oai", biased=True)
    assert built.spills_in_loop == 0 and built.stack <= (24 if tile.rows == 128 else 0)
    check_format("mxfp4", w2_of("mxfp4", tile, biased=True), swap=tile.swap)
