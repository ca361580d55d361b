"""On AVX2 bf16 rows times integer codes become integers: what an outlier in a row costs, and bits."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_mk.kernels.native.experts_mode import Activation, ExpertsMode, Tuning
from moe_mk.kernels.native.packed import PackedMatrix
from moe_mk.kernels.native.prepared import experts_rows
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from tests.kernels.native.conftest import IsaHere
from tests.kernels.native.layers import Layer, Storage, batch, error
from tests.kernels.native.test_parts import PartsLayer

SCHEMES: list[QuantScheme] = [
    *(GROUPED[name] for name in ("int4_g32", "int4_g128", "int8_g64")),
    *(GGUF[name] for name in ("q4_0", "q8_0", "q6_k")),
    *(storage.scheme for storage in (Storage.INT8, Storage.MXFP4, Storage.NVFP4)),
]
HIDDEN, INTER = 512, 256
Rows = tuple[Tensor, Tensor, Tensor]
OUTLIER = 69  # not the first column of a part
FEW, PANELS = (ExpertsMode(tuning=Tuning(panel_rows=bound), batch_invariant=True) for bound in (5, 1))


def layer_of(scheme: QuantScheme, factor: Tensor, addend: float = 0.0) -> Layer:
    """Experts with w13 = quantize(w13 * factor + addend)."""
    storage = {storage.scheme: storage for storage in Storage}.get(scheme)
    parts = PartsLayer(1, HIDDEN, INTER, scheme=scheme)
    layer = parts if storage is None else Layer(1, HIDDEN, INTER, storage)
    for name in ("gate", "up"):
        q = scheme.quantize(layer.weight(name, 0)[None].float() * factor + addend)
        scales = None if q.scales is None else q.scales.to(parts.dtype)
        parts.tensors[name] = QuantTensor(q.values, scales, scheme, None, q.zeros)
        layer.parts[name], layer.scales[name], layer.above[name] = q.values, q.scales, q.global_scale
    return layer


def layer_that_ignores(scheme: QuantScheme, factor: float = 1.0) -> Layer:
    """Experts with column OUTLIER of w13 zero and one output scaled by `factor`; all of SCHEMES represent 0 exactly."""
    factors = torch.ones(INTER, HIDDEN)
    factors[OUTLIER], factors[:, OUTLIER] = factor, 0
    return layer_of(scheme, factors)


def rows_with(outlier: float, count: int) -> Rows:
    """The row in the middle has an outlier in one input."""
    x, ids, weights = batch(count, HIDDEN, 1, 1)
    x[count // 2, OUTLIER] = outlier
    return x, ids.zero_(), weights


def run(here: IsaHere, packed: tuple[PackedMatrix, PackedMatrix], rows: Rows, mode: ExpertsMode) -> Tensor:
    return experts_rows(here[0], *rows, *packed, mode=mode, isa=here[1], threads=2)


def check(isas: list[IsaHere], layer: Layer, rows: Rows, mode: ExpertsMode = FEW) -> None:
    """Every row equals the reference, with the same bits from registers and from panels, and among fewer rows."""
    wanted = layer.reference(*rows, mode)
    for here in isas:
        packed = layer.pack(here[0])
        y = run(here, packed, rows, mode)
        assert all(error(got, want) < 6e-3 for got, want in zip(y, wanted, strict=True)), here[1]
        for count, other in ((2, mode), (len(y), replace(mode, tuning=PANELS.tuning))):
            x, ids, weights = (each[:count] for each in rows)
            assert torch.equal(y[:count], run(here, packed, (x, ids, weights), other)), (here[1], count)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("outlier", [400.0, 3e4, 1e12])
def test_inputs_beside_an_outlier_stay_precise(isas: list[IsaHere], scheme: QuantScheme, outlier: float) -> None:
    # 15 bits of the outlier alone would leave nothing of the other inputs of its part.
    check(isas, layer_that_ignores(scheme), rows_with(outlier, 3))


@pytest.mark.parametrize("count", [7, 11])
@pytest.mark.parametrize("apart", [0, 3, 6, 7, 12, 40])
@pytest.mark.parametrize("name", ["mxfp4", "q4_k"])
def test_parts_of_any_magnitude_count_as_much(isas: list[IsaHere], name: str, apart: int, count: int) -> None:
    # Weights of one part of each 128 inputs are 2^-apart of the others, and its inputs are as much larger.
    k = torch.arange(HIDDEN)
    factor = torch.where(k // 32 % 4 == k // 128 % 4, 2.0**-apart, 1.0)
    x, ids, weights = batch(count, HIDDEN, 1, 1)
    x[1:] = (x[1:] / factor).bfloat16()
    check(isas, layer_of(GGUF.get(name) or Storage.MXFP4.scheme, factor), (x, ids.zero_(), weights))


@pytest.mark.parametrize("scheme", [*SCHEMES, GGUF["q4_k"], GGUF["q5_k"]], ids=lambda s: s.name)
def test_sums_of_the_largest_codes_and_inputs_fit(isas: list[IsaHere], scheme: QuantScheme) -> None:
    x, ids, weights = batch(11, HIDDEN, 1, 1)
    x.fill_(255 / 128)  # all eight significant bits
    check(isas, layer_of(scheme, torch.zeros(()), 2.0), (x, ids.zero_(), weights))


@pytest.mark.parametrize(("factor", "outlier"), [(1.0, 3e4), (2e3, 3e4), (1.0, math.nan)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_bits_of_a_row_are_its_own(isas: list[IsaHere], scheme: QuantScheme, factor: float, outlier: float) -> None:
    # Of 11 rows all tasks share the integers of h; with one large output of w13 they need further terms.
    layer = layer_that_ignores(scheme, factor)
    for here in isas:
        packed = layer.pack(here[0])
        for count in (3, 11):
            x, ids, weights = rows_with(outlier, count)
            together = run(here, packed, (x, ids, weights), FEW)
            for row in range(count):
                one = slice(row, row + 1)
                for mode in (FEW, PANELS):
                    alone = run(here, packed, (x[one], ids[one], weights[one]), mode)
                    same = torch.isnan(alone) if row == count // 2 and outlier != outlier else together[one] == alone
                    assert same.all(), (here[1], count, row)


@pytest.mark.parametrize("name", ["int4_g32", "q4_0", "q6_k"])
@pytest.mark.parametrize("magnitude", [1e-35, 1e-30, 1e-12, 1e12])
def test_rows_of_any_magnitude_equal_f64(isas: list[IsaHere], name: str, magnitude: float) -> None:
    # GELU(x) is x / 2 for small x, so that no output is zero.
    layer = PartsLayer(1, HIDDEN, INTER, gated=False, scheme=GROUPED.get(name) or GGUF[name])
    x, ids, weights = batch(4, HIDDEN, 1, 1)
    x[1] = (x[1].float() * magnitude).bfloat16()
    check(isas, layer, (x, ids.zero_(), weights), replace(FEW, activation=Activation.GELU_ERF))
