"""A number that is not finite, at any place: it reaches every output that f64 gives it, and no row without it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.kernels.native.experts_mode import Activation, ExpertsMode, Rounding, Tuning
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.prepared import experts_rows
from tests.kernels.native.conftest import IsaHere
from tests.kernels.native.layers import Layer, Storage, batch

WIDTHS = st.one_of(st.integers(1, 300), st.sampled_from([15, 16, 17, 31, 33, 127, 128, 129, 255, 257]))
VALUES = st.sampled_from([math.nan, math.inf, -math.inf])
MODES = [
    *(ExpertsMode(kind) for kind in Activation), ExpertsMode(limit=0.7), ExpertsMode(Activation.SWIGLU_OAI, limit=2.0),
    ExpertsMode(Activation.SITU, limit=4.0), ExpertsMode(Activation.RELU2, limit=0.7),
    ExpertsMode(quantize=Rounding.FP8), ExpertsMode(quantize=Rounding.FP8_UE8M0), ExpertsMode(batch_invariant=True),
    ExpertsMode(tuning=Tuning(panel_rows=1)),
]  # fmt: skip
GATED = (Activation.SWIGLU_OAI, Activation.SILU_LIMIT, Activation.SITU)


def place_in(size: int, at: float) -> int:
    """Of a size; the last quarter of the draws is its last column."""
    return size - 1 if at > 0.75 else int(at * size)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.tuples(st.integers(2, 12), st.integers(1, 3), WIDTHS, WIDTHS), st.sampled_from(list(Storage)), VALUES,
    st.sampled_from(["x", "x", "weight", "bias", "routing"]), st.sampled_from(MODES), st.floats(0, 1),
    st.integers(0, 99),
)  # fmt: skip
def test_what_is_not_finite_goes_where_f64_has_it_and_nowhere_else(
    native: Native, isas: list[IsaHere], sizes: tuple[int, ...], storage: Storage, value: float, where: str,
    mode: ExpertsMode, at: float, seed: int,
) -> None:  # fmt: skip
    rows, slots, hidden, inter = sizes
    if storage.format.bits == 4:  # two inputs share a byte
        hidden, inter = hidden + hidden % 2, inter + inter % 2
    storage = Storage.BF16 if where == "weight" else storage
    if mode.quantize:
        storage = Storage.FP8
    gated = mode.activation in GATED or seed % 2 == 0
    layer = Layer(slots, hidden, inter, storage, gated, where == "bias" or seed % 3 == 0, seed=seed)
    x, ids, weights = batch(rows, hidden, slots, min(2, slots), seed=seed)
    ids[1, 0] = slots - 1
    clean, row = [], 1
    for library, isa in isas:
        clean.append(experts_rows(library, x, ids, weights, *layer.pack(native), mode=mode, isa=isa, threads=2))
    name = ("gate", "up", "down")[seed % 3] if gated else ("gate", "down")[seed % 2]
    if where == "x":
        x[row, place_in(hidden, at)] = value
    elif where == "routing":
        weights[row, 0] = value
    elif where == "bias":
        bias = layer.parts[f"{name}_bias"]
        bias[slots - 1, place_in(bias.shape[1], at)] = value
    else:
        matrix = layer.parts[name]
        matrix[slots - 1, place_in(matrix.shape[1], at), place_in(matrix.shape[2], at)] = value
    wanted = layer.reference(x, ids, weights, mode)
    has_it = torch.zeros(rows, dtype=torch.bool)
    has_it[row] = True
    if where in ("bias", "weight"):
        has_it = (ids == slots - 1).any(1)
    for before, (library, isa) in zip(clean, isas, strict=True):
        y = experts_rows(library, x, ids, weights, *layer.pack(native), mode=mode, isa=isa, threads=2)
        assert torch.equal(y[~has_it], before[~has_it]), isa
        finite = y.isfinite()
        assert not (finite & ~wanted.isfinite()).any(), (isa, name)
        if not mode.quantize and value is not math.nan:
            both = finite & wanted.isfinite()
            largest = wanted[wanted.isfinite()].abs().max().clamp_min(1.0) if wanted.isfinite().any() else 1.0
            assert ((y.double() - wanted)[both].abs() <= 0.02 * largest).all(), (isa, name)


@pytest.mark.parametrize("mode", MODES, ids=range(len(MODES)))
@pytest.mark.parametrize("hidden", [40, 100, 130])
def test_a_nan_in_any_column_of_a_token_is_in_all_of_its_outputs(
    isas: list[IsaHere], mode: ExpertsMode, hidden: int
) -> None:
    layer = Layer(1, hidden, 72, Storage.FP8, gated=mode.activation is not Activation.RELU2)
    x, ids = torch.randn(3, hidden).bfloat16(), torch.zeros(3, 1, dtype=torch.int32)
    for column in (0, hidden // 2, hidden - 1):
        bad = x.clone()
        bad[1, column] = math.nan
        for library, isa in isas:
            y = experts_rows(library, bad, ids, None, *layer.pack(library), mode=replace(mode), isa=isa)
            assert y[1].isnan().all() and y[[0, 2]].isfinite().all(), (isa, column)


@pytest.mark.parametrize("mode", MODES[:9], ids=range(9))
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_a_nan_in_one_bias_is_in_every_output_that_needs_it(isas: list[IsaHere], mode: ExpertsMode, name: str) -> None:
    gated = mode.activation is not Activation.RELU2
    if name == "up" and not gated:
        pytest.skip("it has no such part")
    layer = Layer(1, 40, 24, Storage.BF16, gated=gated, biases=True)
    layer.parts[f"{name}_bias"][0, -1] = math.nan
    x, ids = torch.randn(3, 40).bfloat16(), torch.zeros(3, 1, dtype=torch.int32)
    for library, isa in isas:
        y = experts_rows(library, x, ids, None, *layer.pack(library), mode=mode, isa=isa)
        assert y.isnan().all() if name != "down" else (y[:, -1].isnan().all() and y[:, :-1].isfinite().all()), isa
