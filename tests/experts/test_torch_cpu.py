"""Rows against rows sorted by expert; FP8 decoded by integer operations: every code, every scale, ragged edges."""

from dataclasses import replace

import pytest
import torch

from moe_mk.experts.base import ExpertsContext
from moe_mk.experts.torch_cpu import TorchCpuExperts, decoded_block_rows
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.plain import plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import GroupedTokens, OutputStage, RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

SLOTS, HIDDEN, INNER = 7, 48, 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 0.0123, 3.7e5, 2.0**7, 255.5, 2.0**8])
def test_every_code_is_decoded_as_torch_decodes_it(scale: float, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    codes[0x7F], codes[0xFF] = 0, 0x80  # NaN codes do not reach a backend: loading refuses them
    values = codes.view(torch.float8_e4m3fn).view(16, 16)
    q = QuantTensor(values, torch.full((1, 1), scale), Fp8Block("b", 16, 16))
    expected = (values.to(torch.float32) * scale).to(dtype)
    got = torch.cat(list(decoded_block_rows(q, dtype)))
    assert torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit())


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("rows,columns", [(16, 16), (17, 15), (40, 33), (1, 1)])
def test_ragged_blocks_take_the_scales_of_their_place(rows: int, columns: int, ue8m0: bool) -> None:
    scheme = Fp8Block("b", 16, 8, ue8m0)
    q = scheme.quantize(torch.randn(rows, columns) * torch.logspace(-3, 3, columns))
    got = torch.cat(list(decoded_block_rows(q, torch.float32)))
    assert torch.equal(got, q.dequantize(torch.float32))


def test_blocks_side_by_side_may_have_scales_far_apart() -> None:
    # The bias of the exponent is multiplied into the scales or, next to one of 256, into the values: 2^120 either way.
    values = torch.tensor([[448.0, 2.0**-9, 1.5, 448.0]]).to(torch.float8_e4m3fn)
    for scales in ([2.0**-60, 2.0**8], [2.0**8, 2.0**-20], [2.0**-60, 2.0**7]):
        q = QuantTensor(values, torch.tensor([scales]), Fp8Block("b", 16, 2))
        expected = values.to(torch.float32) * torch.tensor(scales).repeat_interleave(2)
        assert torch.equal(torch.cat(list(decoded_block_rows(q, torch.float32))), expected)


@pytest.mark.parametrize("weights", ["stack", "views", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "activation"),
    [(0, "silu"), (1, "silu"), (1, "situ"), (2, "swiglu_oai"), (31, "silu_limit"), (100, "swiglu_limit")],
)
def test_rows_have_the_bits_of_assignments_sorted_by_expert(
    count: int, activation: str, dtype: torch.dtype, weights: str
) -> None:
    g = torch.Generator().manual_seed(count)
    w13, w2 = (torch.randn(SLOTS, n, k, generator=g) * k**-0.5 for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    scheme = Fp8Block("b", 16, 16) if weights == "fp8" else plain(dtype)
    stack = ExpertWeights(scheme.quantize(w13), scheme.quantize(w2))
    context = ExpertsContext(plain(dtype), plain(dtype), activation, SLOTS, HIDDEN, INNER, torch.device("cpu"))
    backend = TorchCpuExperts(replace(context, swiglu_limit=1.5, swiglu_alpha=0.7))
    held = stack if weights == "stack" else backend.relayout(stack)
    assert held.slot(1).up_IH.values.data_ptr() == stack.slot(1).up_IH.values.data_ptr(), "nothing is copied"
    x_RH = torch.randn(count, HIDDEN, generator=g).to(dtype)
    ids_RK = torch.randint(-1, SLOTS - 1, (count, 5), generator=g, dtype=torch.int32)  # an expert may come twice
    if count > 1:
        x_RH[1], ids_RK[1] = torch.nan, -1  # not read
    elif activation == "silu":
        ids_RK[:] = torch.tensor([5, -1, 0, 2, 4])  # none twice
    rows = RowTokens(plain(dtype).quantize(x_RH), ids_RK, torch.randn(count, 5, generator=g), SLOTS)
    grouped = permute(rows, (GroupedTokens,))
    wanted = weight_and_reduce(backend.run(grouped, stack), grouped, until=OutputStage.REDUCED)
    found = backend.run(rows, held)
    assert found.stage is OutputStage.REDUCED and found.y.dtype is dtype and torch.equal(found.y, wanted.y)
    into_RH = torch.full((count, HIDDEN), torch.nan, dtype=dtype)
    assert backend.run(replace(rows, out_RH=into_RH), held).y is into_RH and torch.equal(into_RH, wanted.y)
    assert torch.equal(backend.sums(x_RH, ids_RK, rows.weights_RK, backend.ffn_of(held)).to(dtype), wanted.y)
