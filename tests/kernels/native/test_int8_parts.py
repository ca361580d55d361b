"""W4A8 and W8A8 of weights in groups and ggml blocks: bit for bit the definition, on every instruction set."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.experts.cpu_native.weights import pack_matrix, storage_of
from moe_mk.kernels.native.experts_mode import Activation, ExpertsMode, Rounding, Tuning
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.packed import PackedMatrix, allocate
from moe_mk.kernels.native.prepared import experts_rows
from moe_mk.quant.gguf import GGUF, Gguf
from moe_mk.quant.grouped import GROUPED, Grouped
from moe_mk.quant.int8 import int8_groups
from moe_mk.quant.kinds import activation_group, scheme_of_kind
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from tests.kernels.native.conftest import IsaHere
from tests.kernels.native.layers import Layer, Storage, batch, error
from tests.kernels.native.test_parts import DTYPES, PartsLayer
from tests.support.tiers import quick_where

# Groups that end within a step, an odd number of steps, several units of 128 inputs, rows of less than a group.
CASES = {
    "int4_g32": (296, 136), "int4_g32_zp": (296, 136), "int4_g64": (224, 72), "int4_g64_zp": (224, 96),
    "int4_g128": (1504, 72), "int4_g128_zp": (1504, 296), "int4_row": (96, 40), "int4_row_zp": (360, 168),
    "int8_g32": (296, 136), "int8_g64_zp": (224, 96), "int8_g128": (1504, 72), "int8_row": (360, 72),
    "int4_g64_affine": (224, 96), "int8_g128_affine": (1504, 72),
    "q4_0": (224, 96), "q4_1": (224, 96), "q8_0": (224, 96), "q4_k": (512, 256),
}  # fmt: skip
QUICK = ("int4_g32", "int4_g128_zp", "int4_row", "int8_g64_zp", "int8_g128_affine", "q4_1", "q8_0", "q4_k")
MODE = ExpertsMode(Activation.RELU2, quantize=Rounding.INT8_PARTS)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """f32 products in f64 are exact, so that only the sum is rounded."""
    return (a.double() * b.double() + c.double()).float()


def integers(scheme: QuantScheme, q: QuantTensor, part: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes less what they are offset by, and the scale and the minimum of each part."""
    if isinstance(scheme, Gguf):
        codes, scales, minima = scheme.split(q)
        return codes.long(), scales, minima
    assert isinstance(scheme, Grouped) and q.scales is not None
    base = 0 if q.zeros is not None and scheme.bits == 4 else scheme.middle
    columns = q.shape[-1]
    group = [part * at // min(scheme.columns, columns) for at in range(-(-columns // part))]
    scales = q.scales.float()[:, group]
    minima = None if q.zeros is None else scales * (q.zeros.float()[:, group] - float(base))
    if scheme.has_biases and q.zeros is not None:
        minima = -(scales * float(base) + q.zeros.float()[:, group])
    return scheme.codes(q).long() - base, scales, minima


def product(x: QuantTensor, scheme: QuantScheme, q: QuantTensor, part: int) -> Tensor:
    """f32 [R, N] by the definition at the top of csrc/int8_parts.h."""
    weights, scales, minima = integers(scheme, q, part)
    assert x.scales is not None
    total = torch.zeros(x.shape[0], q.shape[0])
    for at in range(scales.shape[1]):
        here = slice(at * part, min((at + 1) * part, q.shape[-1]))
        codes, of_rows = x.values[:, here].long(), x.scales[:, at, None]
        total = fma((codes @ weights[:, here].T).float(), scales[:, at] * of_rows, total)
        if minima is not None:
            total = fma(-minima[:, at].expand_as(total), of_rows * codes.sum(1, keepdim=True).float(), total)
    return total


def ungated(
    native: Native, up: QuantScheme, hidden: int, inter: int, down: QuantScheme | None = None
) -> tuple[list[QuantTensor], list[PackedMatrix]]:
    g, dtype = torch.Generator("cpu").manual_seed(1), DTYPES[len(up.name) % 3]
    tensors, packed = [], []
    for name, scheme, rows, columns in (("w13", up, inter, hidden), ("w2", down or up, hidden, inter)):
        storage = storage_of(scheme)
        assert storage is not None
        # A mean other than 0 makes zero points and minima matter.
        q = scheme.quantize((torch.randn(rows, columns, generator=g) + 0.5) * columns**-0.5)
        if isinstance(scheme, Grouped) and q.scales is not None:
            zeros = q.zeros.to(dtype) if scheme.has_biases and q.zeros is not None else q.zeros
            q = replace(q, scales=q.scales.to(dtype), zeros=zeros)
        tensors.append(q)
        packed.append(allocate(native, storage.layout(rows, columns, gated=False, scale_dtype=dtype), 1))
        pack_matrix(packed[-1], 0, tensors[-1:], name)
    return tensors, packed


@pytest.mark.parametrize("name", quick_where(lambda name: name in QUICK, list(CASES)))
def test_products_of_groups_are_exact_bit_for_bit(native: Native, isas: list[IsaHere], name: str) -> None:
    # From five rows on AMX has tiles, of 16 rows; 300 rows are more than one block of them.
    scheme, (hidden, inter) = scheme_of_kind(name), CASES[name]
    (up, down), (w13, w2) = ungated(native, scheme, hidden, inter)
    group, tokens_as = w13.layout.part, int8_groups(w13.layout.part)
    assert group == min(activation_group(scheme), hidden)
    for rows in (1, 2, 3, 4, 5, 9, 17, 40, 300):
        x = torch.randn(rows, hidden, generator=torch.Generator("cpu").manual_seed(rows)).bfloat16()
        q, ids = tokens_as.quantize(x), torch.zeros(rows, 1, dtype=torch.int32)
        h = int8_groups(w2.layout.part).quantize(torch.relu(product(q, scheme, up, group)).square().bfloat16())
        wanted = product(h, scheme, down, w2.layout.part).bfloat16()
        for library, isa in isas:
            got = experts_rows(library, x, ids, None, w13, w2, mode=MODE, isa=isa, threads=2)
            assert torch.equal(got, wanted), (isa, rows)
            sent = experts_rows(library, q.values, ids, None, w13, w2, mode=MODE, isa=isa, x_scales_RX=q.scales)
            assert torch.equal(sent, wanted), (isa, rows)  # rows that come rounded
            least = replace(MODE, tuning=Tuning(gather_kib=128, tile_rows=1 + rows % 2 * 255))
            assert torch.equal(experts_rows(library, x, ids, None, w13, w2, mode=least, isa=isa), wanted), (isa, rows)


@pytest.mark.parametrize("down", ["q6_k", "q5_k", "mxfp4"])
def test_hidden_rows_stay_in_bf16_for_down_projections_of_other_formats(isa_here: IsaHere, down: str) -> None:
    (native, isa), scheme, other = isa_here, GGUF["q4_k"], scheme_of_kind(down)
    (up, second), (w13, w2) = ungated(native, scheme, 512, 256, other)
    for rows in (1, 3, 6, 40):
        x = torch.randn(rows, 512, generator=torch.Generator("cpu").manual_seed(rows)).bfloat16()
        h = torch.relu(product(int8_groups(32).quantize(x), scheme, up, 32)).square().bfloat16()
        wanted = h.double() @ second.dequantize(torch.float32).double().T
        got = experts_rows(
            native, x, torch.zeros(rows, 1, dtype=torch.int32), None, w13, w2, mode=MODE, isa=isa, threads=2
        )
        assert error(got, wanted) < 2**-8, rows


@pytest.mark.parametrize("name", ["int4_g32", "int4_g128_zp", "q4_k", "q8_0"])
def test_gated_layers_are_near_those_of_bf16_rows_whatever_the_batch(isa_here: IsaHere, name: str) -> None:
    # x rounded to 1 / 127 of the largest of 32 or 128 is 0.7 % off, h, which has a longer tail, 1 to 1.5 %.
    native, isa = isa_here
    layer = PartsLayer(3, 512, 256, scheme=scheme_of_kind(name))
    packed, mode = layer.pack(native), ExpertsMode(quantize=Rounding.INT8_PARTS)
    for rows in (1, 6, 40):
        x, ids, weights = batch(rows, 512, 3, 2, seed=rows)
        ids[0, 0] = 0
        got = experts_rows(native, x, ids, weights, *packed, mode=mode, isa=isa, threads=2)
        plain = experts_rows(native, x, ids, weights, *packed, mode=ExpertsMode(), isa=isa, threads=2)
        exact = layer.reference(x, ids, weights, ExpertsMode())
        assert 7e-3 < error(got, exact) < 2.2e-2 and error(plain, exact) < 6e-3, rows
        alone = [
            experts_rows(native, x[r : r + 1], ids[r : r + 1], weights[r : r + 1], *packed, mode=mode, isa=isa)
            for r in range(rows)
        ]
        assert torch.equal(torch.cat(alone), got)


@pytest.mark.parametrize("name", ["int4_g128", "q4_k"])
def test_shared_experts_read_the_same_rounded_rows(isa_here: IsaHere, name: str) -> None:
    native, isa = isa_here
    routed, alone = (PartsLayer(n, 256, 256 * n, scheme=scheme_of_kind(name), seed=n) for n in (2, 1))
    packed, shared = routed.pack(native), alone.pack(native)
    x, ids, weights = batch(11, 256, 2, 2)
    mode = ExpertsMode(quantize=Rounding.INT8_PARTS)
    both = experts_rows(native, x, ids, weights, *packed, mode=mode, isa=isa, shared=shared)
    first = experts_rows(native, x, ids, weights, *packed, mode=mode, isa=isa)
    ones = torch.ones(11, 1)
    second = experts_rows(native, x, torch.zeros(11, 1, dtype=torch.int32), ones, *shared, mode=mode, isa=isa)
    assert error(both, first.double() + second.double()) < 4e-3


@pytest.mark.parametrize("rows", [3, 20])
def test_a_token_with_an_infinity_affects_only_itself(isa_here: IsaHere, rows: int) -> None:
    native, isa = isa_here
    packed, mode = PartsLayer(1, 512, 256).pack(native), ExpertsMode(quantize=Rounding.INT8_PARTS)
    x, ids = torch.randn(rows, 512).bfloat16(), torch.zeros(rows, 1, dtype=torch.int32)
    clean = experts_rows(native, x, ids, None, *packed, mode=mode, isa=isa)
    x[1, 511] = float("inf")
    y = experts_rows(native, x, ids, None, *packed, mode=mode, isa=isa)
    assert y[1].isnan().all() and torch.equal(y[0], clean[0]) and torch.equal(y[2:], clean[2:])


def test_weights_that_cannot_be_multiplied_as_integers_are_refused(native: Native) -> None:
    mode, (x, ids, _) = ExpertsMode(quantize=Rounding.INT8_PARTS), batch(2, 512, 1, 1)
    with pytest.raises(ShapeError, match="rounded to INT8 in groups, which MXFP4 weights do not multiply"):
        experts_rows(native, x, ids, None, *Layer(1, 512, 256, Storage.MXFP4).pack(native), mode=mode)
    with pytest.raises(ShapeError, match="which Q6_K weights do not multiply"):
        experts_rows(native, x, ids, None, *PartsLayer(1, 512, 256, scheme=GGUF["q6_k"]).pack(native), mode=mode)
    kinds = ("int4_g32", "int4_g128", "int8_g32")
    routed, *others = (PartsLayer(1, 512, 256, scheme=GROUPED[kind]).pack(native) for kind in kinds)
    for other in others:  # other groups, or another order of codes
        with pytest.raises(ShapeError, match="differ between routed and shared experts"):
            experts_rows(native, x, ids, None, *routed, mode=mode, shared=other)
    codes, scales = torch.zeros(2, 512, dtype=torch.int8), torch.ones(2, 4)
    with pytest.raises(ShapeError, match=r"x_scales is \(2, 4\) torch.float32, expected \(2, 16\)"):
        experts_rows(native, codes, ids, None, *routed, mode=mode, x_scales_RX=scales)
