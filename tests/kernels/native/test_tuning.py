"""Parameters of the native experts that only the time depends on: every legal one gives the same bits."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.native.experts_mode import LIMITS, ExpertsMode, Rounding, Tuning
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.library import CExperts, Native
from moe_mk.kernels.native.prepared import experts_rows
from tests.kernels.native.layers import Layer, Storage, batch
from tests.support.tiers import quick_where

LEAST, MOST = ({name: limits[end] for name, limits in LIMITS.items()} for end in (0, 1))
ODD = list(LIMITS)[::2]
EXTREMES = [  # each parameter at both ends, beside others at the same end and at the other
    *(Tuning(**each) for each in (LEAST, MOST)),
    Tuning(**{**LEAST, **{name: MOST[name] for name in ODD}}),
    Tuning(**{**MOST, **{name: LEAST[name] for name in ODD}}),
]

QUICK = list(Storage)[:2]


def modes(storage: Storage) -> list[dict[str, object]]:
    """Every way to compute that has kernels of its own."""
    rounded = [{"quantize": Rounding.INT8 if storage.format is Format.INT8 else Rounding.FP8}]
    return [{}, {"batch_invariant": True}, *rounded]


@pytest.mark.parametrize("storage", quick_where(QUICK.__contains__, Storage))
def test_the_least_and_the_most_of_each_give_the_same_bits(isa_here, storage: Storage) -> None:
    native, isa = isa_here
    w13, w2 = Layer(2, 1056, 144, storage).pack(native)  # 33 steps of k: chunks of whole blocks, and a rest
    for rows in (1, 4, 7, 72):  # about 58 rows an expert: two chunks of k in the least memory to gather them
        x, ids, weights = batch(rows, 1056, 2, 2, seed=rows)
        for mode in modes(storage) if rows == 7 else [{}]:
            wanted = experts_rows(native, x, ids, weights, w13, w2, mode=ExpertsMode(**mode), isa=isa)
            for tuning in EXTREMES:
                tuned = ExpertsMode(**mode, tuning=tuning)
                got = experts_rows(native, x, ids, weights, w13, w2, mode=tuned, isa=isa)
                assert torch.equal(got, wanted), (rows, mode, tuning)


@pytest.mark.parametrize("rows", [5, 8, 9, 40, 300])
def test_rows_of_bf16_have_the_bits_that_they_have_alone(isa_here, rows: int) -> None:
    # Groups of at most eight rows; 33 steps of k: units of 32, and a rest.
    native, isa = isa_here
    w13, w2 = Layer(1, 1056, 144, Storage.BF16).pack(native)
    x, ids, weights = batch(rows, 1056, 1, 1)
    mode = ExpertsMode(batch_invariant=True)
    together = experts_rows(native, x, ids, weights, w13, w2, mode=mode, isa=isa)
    for row in {0, 4, rows // 2, rows - 1}:
        one = slice(row, row + 1)
        alone = experts_rows(native, x[one], ids[one], weights[one], w13, w2, mode=mode, isa=isa)
        assert torch.equal(alone, together[one]), row


@pytest.mark.slow
def test_more_rows_than_a_block_in_the_least_memory(isa_here) -> None:
    # 256 rows at a time, few steps of k each; the one row that is left over goes its own way.
    native, isa = isa_here
    w13, w2 = Layer(1, 12000, 32).pack(native)
    x, ids, weights = batch(257, 12000, 1, 1)
    ids.zero_()
    wanted = experts_rows(native, x, ids, weights, w13, w2, isa=isa)
    for size in (128, 4096):
        mode = ExpertsMode(tuning=Tuning(gather_kib=size))
        assert torch.equal(experts_rows(native, x, ids, weights, w13, w2, mode=mode, isa=isa), wanted), size


@settings(max_examples=30, deadline=None)
@given(
    tuning=st.builds(Tuning, **{name: st.just(0) | st.integers(least, most) for name, (least, most) in LIMITS.items()}),
    rows=st.integers(0, 40),
    hidden=st.integers(1, 150).map(lambda half: 2 * half),
    inter=st.integers(1, 100).map(lambda half: 2 * half),
    storage=st.sampled_from(list(Storage)),
    threads=st.integers(1, 3),
)
def test_any_tuning_of_any_shape_gives_the_same_bits(
    native: Native, tuning: Tuning, rows: int, hidden: int, inter: int, storage: Storage, threads: int
) -> None:
    w13, w2 = Layer(3, hidden, inter, storage).pack(native)
    x, ids, weights = batch(rows, hidden, 3, 2)
    for isa in native.isas:
        wanted = experts_rows(native, x, ids, weights, w13, w2, isa=isa)
        mode = ExpertsMode(tuning=tuning)
        assert torch.equal(experts_rows(native, x, ids, weights, w13, w2, mode=mode, isa=isa, threads=threads), wanted)


@pytest.mark.parametrize("name", list(LIMITS))
def test_beyond_the_limits_is_refused_in_python_and_behind_it(native: Native, name: str) -> None:
    least, most = LIMITS[name]
    for value in (least - 1 or -1, most + 1, -(2**31)):
        with pytest.raises(ConfigError, match=rf"{name} {value} is neither 0 \(built in\) nor from {least} to {most}"):
            Tuning(**{name: value})
        past = Tuning()
        object.__setattr__(past, name, value)  # as a caller of the library itself could
        w13, w2 = Layer(1, 64, 32).pack(native)
        x, ids, weights = batch(1, 64, 1, 1)
        with pytest.raises(ShapeError, match="experts: sizes do not fit together"):
            experts_rows(native, x, ids, weights, w13, w2, mode=ExpertsMode(tuning=past))


def test_the_structure_ends_with_the_parameters_in_the_order_of_the_header() -> None:
    assert [name for name, _ in CExperts._fields_[-6:]] == list(LIMITS)
    assert ctypes.sizeof(CExperts) - CExperts.panel_rows.offset == 24
