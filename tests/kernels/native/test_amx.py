"""The pipeline of the AMX kernels: what it executes, as counted by the emulation, and bits for any number of rows."""

import ctypes
from dataclasses import dataclass
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding, Tuning
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix
from moe_mk.kernels.native.prepared import experts_rows
from tests.kernels.native.layers import Layer, Storage, batch, error
from tests.support.tiers import slow

AMX = Isa.AMX_BF16
FP8_ROWS = ExpertsMode(quantize=Rounding.FP8)


@dataclass(frozen=True)
class Counts:
    """What the emulation has executed, in the order of TileCounts in csrc/tiles.h."""

    loads: int
    stores: int
    zeros: int
    products: int
    integer_products: int
    decoded: int


def counts(native: Native) -> Counts:
    """Since the last call."""
    found = (ctypes.c_int64 * 6)()
    ctypes.CDLL(str(native.path)).moe_mk_emulated_counts(found)
    return Counts(*found)


def weights_of(*packed: PackedMatrix) -> int:
    return sum(matrix.layout.pairs * 32 * matrix.layout.steps * 32 for matrix in packed)


def to_one_expert(rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, ids, _ = batch(rows, hidden, 1, 1, seed=rows)
    return x, ids.zero_()


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 130, 300, *slow(1024)])
@pytest.mark.parametrize("storage", list(Storage))
def test_every_weight_is_decoded_once_for_any_number_of_rows(emulated: Native, storage: Storage, rows: int) -> None:
    packed = Layer(1, 288, 144, storage).pack(
        emulated
    )  # 9 and 5 steps of k: blocks of 256 k and a rest; 9 pairs: 8 and 1
    x, ids = to_one_expert(rows, 288)
    counts(emulated)
    experts_rows(emulated, x, ids, None, *packed, isa=AMX, threads=2)
    assert counts(emulated).decoded == (0 if storage is Storage.BF16 else weights_of(*packed))


@pytest.mark.slow
def test_more_than_1024_rows_are_split_where_their_sums_would_leave_the_l2(emulated: Native) -> None:
    packed = Layer(1, 64, 32).pack(emulated)
    x, ids = to_one_expert(1025, 64)
    counts(emulated)
    experts_rows(emulated, x, ids, None, *packed, isa=AMX)
    assert counts(emulated).decoded == 2 * weights_of(*packed)


@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 96, 200, 300])
def test_tiles_of_a_unit_are_zeroed_and_stored_once_and_no_sum_is_loaded(emulated: Native, rows: int) -> None:
    # Of each pair and unit of 128 k: 2 sums a row tile, from TILEZERO to one store. Of each step: 2 products a row
    # tile; the loads are the row tiles and, once in 32 rows, the two tiles of weights.
    packed = Layer(1, 320, 272).pack(emulated)
    x, ids = to_one_expert(rows, 320)
    counts(emulated)
    experts_rows(emulated, x, ids, None, *packed, isa=AMX, threads=2)
    found, tiles, blocks = counts(emulated), ceil(rows / 16), ceil(rows / 32)
    steps = sum(matrix.layout.pairs * matrix.layout.steps for matrix in packed)
    units = sum(matrix.layout.pairs * ceil(matrix.layout.steps / 4) for matrix in packed)
    assert found.products == 2 * steps * tiles
    assert found.loads == steps * (tiles + 2 * blocks)
    assert found.stores == found.zeros == 2 * units * tiles


@pytest.mark.parametrize("storage", [*Storage, None], ids=lambda s: "FP8_ROWS" if s is None else s.name)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(emulated: Native, storage: Storage | None) -> None:
    # 9 and 5 steps: a rest of the blocks of 256 k, and of the units of 128. Slot 1 has few rows in a tile of its own.
    mode = FP8_ROWS if storage is None else ExpertsMode()
    packed = Layer(2, 288, 144, storage or Storage.FP8).pack(emulated)
    x, ids, weights = batch(290, 288, 2, 2)
    ids[8:, 1] = -1
    ids[:, 0] = 0
    ids[:8, 1] = 1
    together = experts_rows(emulated, x, ids, weights, *packed, mode=mode, isa=AMX, threads=2)
    for first, last in ((0, 1), (0, 16), (3, 20), (100, 165), (20, 280)):
        part = slice(first, last)
        alone = experts_rows(emulated, x[part], ids[part], weights[part], *packed, mode=mode, isa=AMX)
        assert torch.equal(alone, together[part]), part


@pytest.mark.parametrize("storage", [*Storage, None], ids=lambda s: "FP8_ROWS" if s is None else s.name)
def test_decoding_without_avx512_equals_f64_as_well(all_emulated: Native, storage: Storage | None) -> None:
    mode = FP8_ROWS if storage is None else ExpertsMode()
    layer = Layer(1, 288, 144, storage or Storage.FP8)
    packed = layer.pack(all_emulated)
    for rows in (1, 40, 70):
        x, ids = to_one_expert(rows, 288)
        y = experts_rows(all_emulated, x, ids, None, *packed, mode=mode, isa=AMX)
        assert error(y, layer.reference(x, ids, None, mode)) < (8e-3 if storage is None else 3.2e-3), rows


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 400),
    hidden=st.integers(1, 300).map(lambda half: 2 * half),
    inter=st.integers(1, 200).map(lambda half: 2 * half),
    storage=st.sampled_from(list(Storage)),
    rounded=st.booleans(),
    tuning=st.builds(Tuning, task_pairs=st.integers(0, 16), gather_kib=st.just(0) | st.integers(128, 700)),
)
def test_any_shape_and_number_of_rows_equals_the_scalar_kernels(
    emulated: Native, rows: int, hidden: int, inter: int, storage: Storage, rounded: bool, tuning: Tuning
) -> None:
    packed = Layer(2, hidden, inter, storage, seed=rows).pack(emulated)
    x, ids, weights = batch(rows, hidden, 2, 2, seed=rows)
    mode = ExpertsMode(quantize=Rounding.FP8 if rounded else Rounding.NONE)
    wanted = experts_rows(emulated, x, ids, weights, *packed, mode=mode, isa=Isa.AVX2, threads=2).float()
    tuned = ExpertsMode(quantize=mode.quantize, tuning=tuning)
    y = experts_rows(emulated, x, ids, weights, *packed, mode=tuned, isa=AMX, threads=2).float()
    # h may take the neighbouring bf16, or e4m3 code.
    assert (y - wanted).norm() <= (0.03 if rounded else 4e-3) * wanted.norm() + 1e-6


def test_rows_beyond_the_memory_for_tiles_give_the_same_bits(emulated: Native) -> None:
    # The emulation holds 1 MiB of x in tile order: 1500 rows of 512 are gathered by each task instead, 256 at a time.
    packed = Layer(1, 512, 32).pack(emulated)
    x, ids = to_one_expert(1500, 512)
    together = experts_rows(emulated, x, ids, None, *packed, isa=AMX, threads=2)
    part = experts_rows(emulated, x[700:1000], ids[:300], None, *packed, isa=AMX, threads=2)
    assert torch.equal(part, together[700:1000])
