"""What a layer prepares between calls is never that of tensors that were replaced or written to."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import MoELayer
from moe_mk.errors import ShapeError
from moe_mk.kernels.native.layer import MOST_SIZES
from moe_mk.kernels.native.prepared import RouteCall, RouteMode
from moe_mk.kernels.native.selfcheck import loaded
from tests.layer.native import NEEDS_COMPILER
from tests.support.layers import HIDDEN, config, tensors
from tests.support.replaced import CHANGES
from tests.support.tiers import quick_where

BACKENDS = [("torch_cpu", "fp32"), pytest.param("cpu_native", "bf16", marks=NEEDS_COMPILER)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(experts: str, quant: str, given: dict[str, Tensor], **settings: object) -> MoELayer:
    settings = {"has_correction_bias": True, "experts": experts, "quant": {"weights": quant}} | settings
    return MoELayer(config(8, 2, **settings), dtype=DTYPES[quant]).load_weights(given)


def results(layer: MoELayer, x_TH: Tensor) -> list[Tensor]:
    """Every way to call it; the first of each kind prepares, the second uses that."""
    found = []
    for _ in range(2):
        routing = layer.route(x_TH)
        found += [routing.ids_TK, routing.weights_TK, layer(x_TH), layer(x_TH[:1])]
        found += [layer.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)]
    return found


@pytest.mark.parametrize("fused_router", quick_where(bool, [True, False]))
@pytest.mark.parametrize("name", ["weight_EH", "bias_E"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("experts,quant", BACKENDS)
def test_gate_and_bias_are_those_of_now(experts: str, quant: str, change: str, name: str, fused_router: bool) -> None:
    given = tensors(8, bias=True, dtype=DTYPES[quant])
    layer, x_TH = load(experts, quant, given, fused_router=fused_router), torch.randn(6, HIDDEN).to(DTYPES[quant])
    call = partial(results, layer, x_TH)
    before = call()
    held = getattr(layer.state.backends.gate, name)
    values = (-held).detach().clone()
    CHANGES[change](layer.state.backends.gate, name, values, call)
    key = {"weight_EH": "gate.weight", "bias_E": "gate.e_score_correction_bias"}[name]
    fresh = load(experts, quant, {**given, key: values}, fused_router=fused_router)
    for got, wanted in zip(call(), results(fresh, x_TH), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=1e-2)  # a strided gate is summed in another order
    assert not torch.equal(before[0], call()[0])


@NEEDS_COMPILER
def test_arguments_of_a_prepared_call_are_kept_for_a_bounded_number_of_sizes() -> None:
    layer = load("cpu_native", "bf16", tensors(8, bias=True, dtype=torch.bfloat16), max_num_tokens=1024)
    x_TH = torch.randn(MOST_SIZES + 8, HIDDEN).bfloat16()
    routing, wanted_TH = layer.route(x_TH), layer(x_TH)
    for rows in range(1, len(x_TH)):
        assert torch.equal(layer(x_TH[:rows]), wanted_TH[:rows])
        layer.forward_routed(x_TH[:rows], routing.weights_TK[:rows], routing.ids_TK[:rows])
    assert layer._prepared is not None
    call: Any
    for call in (layer._prepared.call, layer._prepared.alone):  # as where a tuned file has kernels by rows
        for rows in range(1, len(x_TH)):
            call._block_at(rows)
            assert 0 < len(call._of_rows) <= MOST_SIZES


@NEEDS_COMPILER
def test_a_prepared_call_refuses_a_gate_and_a_bias_with_strides() -> None:
    dense_EH, bias_E = torch.randn(8, 16), torch.randn(8)
    wide_EH, wide_E = torch.randn(8, 32)[:, ::2], torch.randn(16)[::2]
    for gate_EH, bias in ((wide_EH, bias_E), (dense_EH, wide_E), (wide_EH, None)):
        with pytest.raises(ShapeError, match=r"cpu route: strides .* expected contiguous ones"):
            RouteCall(loaded(), gate_EH, bias, RouteMode(2))
