"""The custom ops: registered with fakes, legal for compiled graphs, and the same answers as the functions."""

import torch
from torch.library import opcheck

from moe_mk.kernels.native import ExpertsMode, Native, RouteMode, Scoring, experts_rows, quantize_1x128, route
from moe_mk.kernels.native import ops as ops
from tests.kernels.native.layers import Layer, Storage, batch


def arguments(native: Native, storage: Storage, biases: bool) -> tuple[tuple[object, ...], torch.Tensor]:
    layer = Layer(2, 96, 64, storage, biases=biases)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(5, 96, 2, 2)
    packed = (w13.values_LB, w13.scales_LX, w13.bias_LX, w2.values_LB, w2.scales_LX, w2.bias_LX)
    call = (x, None, ids, weights, *packed, 64, True, 128, 128, 0, 1.702, 0.0, False, False, 1)
    return call, experts_rows(native, x, ids, weights, w13, w2)


def test_experts_op_is_clean_and_equal(native: Native) -> None:
    for storage, biases in ((Storage.FP8, False), (Storage.BF16, True)):
        call, wanted = arguments(native, storage, biases)
        assert torch.equal(torch.ops.moe_mk.cpu_experts_rows(*call), wanted)
        opcheck(torch.ops.moe_mk.cpu_experts_rows.default, call)


def test_experts_op_takes_modes_and_quantised_rows(native: Native) -> None:
    w13, w2 = (layer := Layer(2, 96, 64)).pack(native)
    x, ids, weights = batch(5, 96, layer.slots, 2)
    values, scales = quantize_1x128(native, x)
    mode = ExpertsMode(limit=0.5, quantize=True)
    wanted = experts_rows(native, values, ids, weights, w13, w2, mode=mode, x_scales_RX=scales)
    packed = (w13.values_LB, w13.scales_LX, None, w2.values_LB, w2.scales_LX, None)
    call = (values, scales, ids, weights, *packed, 64, True, 128, 128, 0, 1.702, 0.5, True, False, 1, 0)
    assert torch.equal(torch.ops.moe_mk.cpu_experts_rows(*call), wanted)


def test_route_and_quantise_ops_are_clean_and_equal(native: Native) -> None:
    x, gate, bias = torch.randn(5, 96).bfloat16(), torch.randn(8, 96), torch.rand(8)
    call = (x, gate, bias, 2, int(Scoring.SIGMOID), 4, 2, True, 2.5, 1)
    wanted = route(native, x, gate, bias, RouteMode(2, Scoring.SIGMOID, 4, 2, True, 2.5))
    assert all(torch.equal(a, b) for a, b in zip(torch.ops.moe_mk.cpu_route(*call), wanted, strict=True))
    opcheck(torch.ops.moe_mk.cpu_route.default, call)
    _, scales = torch.ops.moe_mk.cpu_quantize_1x128(x, 1)
    assert torch.equal(scales, quantize_1x128(native, x)[1])
    opcheck(torch.ops.moe_mk.cpu_quantize_1x128.default, (x, 1))
