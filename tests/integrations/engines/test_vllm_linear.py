"""Linear layers of vLLM: which are computed, what is read of their parameters, and products with these."""

import re
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.integrations import vllm as door
from moe_mk.integrations import vllm_linear
from moe_mk.integrations.packed_linear import PackedLinear, packed_linear
from moe_mk.integrations.vllm_formats import QUANTIZATION
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.quant import QuantScheme, QuantTensor
from moe_mk.quant.int8 import INT8_CHANNEL, INT8_TOKEN, int8_groups
from moe_mk.quant.kinds import scheme_of_kind
from tests.integrations.engines.cases import error
from tests.integrations.engines.stand_ins import Vllm, put_in
from tests.layer.native import NEEDS_COMPILER


def vllm(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Vllm, dict[str, Any]]:
    """A process of vLLM with our kernels, and these by kind."""
    put_in(monkeypatch, (host := Vllm(["moe_mk"], {"moe_mk": settings})).modules)
    assert door.register()
    return host, {kind: k for kind, held in host.kernels.items() for k in held if hasattr(k, "of_moe_mk")}


@NEEDS_COMPILER
@pytest.mark.timeout(300)  # the first one compiles the kernels
@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("int8", INT8_TOKEN), ("int4_g32_zp", int8_groups(32)), ("int4_g128", int8_groups(128)),
        ("int4_row", int8_groups(128)), ("int8_g64", int8_groups(64)), ("q4_k", int8_groups(32)),
        ("q8_0", int8_groups(32)), ("q6_k", None), ("fp8_channel", None), ("bf16", None),
    ],
)  # fmt: skip
def test_a_linear_layer_rounds_tokens_to_int8_where_it_multiplies_integers(
    kind: str, tokens: QuantScheme | None
) -> None:
    scheme, draw = scheme_of_kind(kind), torch.Generator().manual_seed(0)
    w = torch.randn((200, 512), generator=draw) * 0.1
    q = scheme.quantize(w.bfloat16() if kind == "bf16" else w)
    linear, plain, decoded = PackedLinear(q, "w", int8=True), PackedLinear(q, "w"), q.dequantize(torch.float32).double()
    for rows in (0, 1, 3, 5, 40):
        wide = torch.randn((rows, 600), generator=draw).bfloat16()
        x = wide[:, 44:556]
        y, before = linear.run(x), wide.clone()
        rounded = x if tokens is None else tokens.quantize(x.float()).dequantize(torch.float32)
        assert rows == 0 or error(y, rounded.double() @ decoded.T) < 2**-8, "one rounding to bf16"
        assert torch.equal(wide, before) and torch.equal(y, plain.run(x)) == (tokens is None or rows == 0)
        assert torch.equal(packed_linear(x[None], plain.entry, None, 200), plain.run(x)[None])
        assert rows == 0 or error(plain.run(x), x.double() @ decoded.T) < 2**-8, "one rounding to bf16"
    for wrong in (torch.zeros((2, 8)), torch.zeros((2, 512), device="meta")):
        with pytest.raises(ShapeError, match=rf"x is \(2, \d+\) torch.bfloat16 on {wrong.device}, expected"):
            linear.run(wrong.bfloat16())
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.moe_mk.packed_linear, (x, plain.entry, 200), test_utils=tests)


@NEEDS_COMPILER
@pytest.mark.parametrize(("has_product", "avx512_bf16", "amx"), [(False, False, False), (True, True, False)])
def test_layers_in_bf16_are_multiplied_here_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, has_product: bool, avx512_bf16: bool, amx: bool
) -> None:
    settings: dict[str, Any] = {"experts": "torch_cpu"}
    put_in(monkeypatch, (host := Vllm(["moe_mk"], {"moe_mk": settings})).modules)
    processor_is(monkeypatch, has_product, avx512_bf16, amx)
    assert door.register()
    dispatch = getattr(sys.modules[vllm_linear.UTILS], vllm_linear.DISPATCH)
    x, bias = torch.randn(5, 128).bfloat16(), torch.randn(72).bfloat16()

    def prepared(w: torch.Tensor, remove_weight: bool = True) -> Any:
        layer = SimpleNamespace(weight=nn.Parameter(w, requires_grad=False), prefix="o_proj", left=[])
        dispatch(layer, remove_weight=remove_weight)
        return layer

    w = torch.randn(72, 128).bfloat16()
    for remove_weight in (True, False):
        layer = prepared(w.clone(), remove_weight)
        assert (layer.weight.numel() < w.numel()) == remove_weight and not layer.left
        y = layer.cpu_linear(x, layer.weight, bias)
        assert error(y, x.double() @ w.double().T + bias.double()) < 2**-7
    assert host.logged == ["moe_mk: linear layers (bf16) by cpu_native"]
    for other in (w.float(), w[:, :100], w.to("meta"), w[None]):
        assert prepared(other).left == [True]
    settings["release_weights"] = False
    assert prepared(w).left == [True]
    del settings["release_weights"]
    with monkeypatch.context() as missing:
        missing.setattr(vllm_linear, "native_kernels", Mock(side_effect=UnsupportedError("no compiler", [])))
        assert prepared(w).left == [True]
    monkeypatch.setattr(host.modules["vllm"]["envs"], "VLLM_DISABLED_KERNELS", ["MoeMkLinearKernel"])
    assert prepared(w, False).left == [False]
    for processor in ((True, False, False), (True, True, True)):
        other = Vllm(["moe_mk"])
        put_in(monkeypatch, other.modules)
        processor_is(monkeypatch, *processor)
        assert door.register()
        assert other.modules[vllm_linear.UTILS].items() <= vars(sys.modules[vllm_linear.UTILS]).items(), "as it was"


def processor_is(monkeypatch: pytest.MonkeyPatch, has_product: bool, avx512_bf16: bool, amx: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_product)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)


class GroupShape(tuple[int, int]):
    """vLLM's: (rows, columns) under one scale, -1 for all."""

    is_per_tensor, is_per_channel, is_per_token = (
        (lambda self, shape=shape: self == shape) for shape in ((-1, -1), (-1, 1), (1, -1))
    )


def config_of(shape: tuple[int, int], **facts: Any) -> Any:
    """A configuration of vLLM. shape: of scales in FP8."""
    key = SimpleNamespace(scale=SimpleNamespace(group_shape=GroupShape(shape)))
    return SimpleNamespace(weight_quant_key=key, **facts)


def loaded(kind: str, quant: str, how: str) -> tuple[Any, dict[str, Any], QuantTensor]:
    """A configuration, the parameters of a layer with q, k and v in one, and its matrix."""
    w, facts = torch.randn((384, 256), generator=torch.Generator().manual_seed(0)) * 0.1, {"act_type": torch.bfloat16}
    q, turn = scheme_of_kind(quant).quantize(w), (lambda t: t.t()) if how == "turned" else lambda t: t
    if how == "fused":  # one scale for each of q, k and v
        scales = torch.stack([each.abs().amax() / 127 for each in w.split([128, 192, 64])])
        rows = scales.repeat_interleave(torch.tensor([128, 192, 64]))[:, None]
        q = QuantTensor((w / rows).round().to(torch.int8), rows, INT8_CHANNEL)
        held = {"weight": q.values, "weight_scale": scales, "logical_widths": [128, 192, 64]}
        return SimpleNamespace(input_dtype=torch.bfloat16), held, q
    assert q.scales is not None
    if kind == "mp":
        given = pack("int_quantized" if how == "signed" else "compressed_tensors", q)
        names = {"w_q": "", "w_s": "scale", "w_zp": "zeros"}
        held = {name: nn.Parameter(turn(given[part]), False) for name, part in names.items() if part in given}
        for parameter in held.values():
            parameter.input_dim, parameter.output_dim = (0, 1) if how == "turned" else (1, 0)
        codes = {"int4_g64_zp": "uint4", "int8_g128": "uint8b128", "int4_row": "int4"}
        code, group = codes.get(quant, "uint4b8"), -1 if quant == "int4_row" else int(quant.split("_")[1][1:])
        facts |= {"weight_type": code, "group_size": group, "zero_points": "w_zp" in held}
        return config_of((0, 0), partition_weight_shape=(256, 384), **facts), held, q
    shapes = {"fp8_tensor": (-1, -1), "fp8_channel": (1, -1) if how == "token" else (-1, 1), "fp8_block": (128, 128)}
    flat = kind in ("fp8", "int8") and quant != "fp8_block"
    held = {"weight": turn(q.values) if flat else q.values, "weight_scale": q.scales.flatten() if flat else q.scales}
    if quant == "fp8_block":
        held["weight_scale_inv"] = held.pop("weight_scale")
    elif q.scales.dtype is torch.float8_e8m0fnu:
        held["weight_scale"] = q.scales.view(torch.uint8)
    if q.global_scale is not None:
        held["weight_global_scale"] = q.global_scale.reshape(1)
    return (
        config_of((-1, -1) if how == "rows" else shapes.get(quant, (0, 0)), weight_shape=(384, 256), **facts),
        held,
        q,
    )


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("kind", "quant", "how", "method", "wish", "rounds"),
    [
        ("fp8", "fp8_tensor", "turned", "Fp8LinearMethod", "int8", False),
        ("fp8", "fp8_channel", "turned", "CompressedTensorsW8A8Fp8", None, False),
        ("fp8", "fp8_channel", "token", "FBGEMMFp8LinearMethod", None, False),
        ("fp8", "fp8_channel", "rows", "ModelOptLinearMethod", None, False),
        ("fp8", "fp8_block", "", "Fp8LinearMethod", None, False),
        ("int8", "int8", "turned", "QuarkW8A8Int8", "checkpoint", True),
        ("int8", "int8", "", "QuarkW8A8Int8", "int8", True),
        ("int8", "int8", "fused", "CompressedTensorsW8A8Int8", "plain", False),
        ("mp", "int4_g32", "", "AutoGPTQLinearMethod", None, False),
        ("mp", "int4_g128", "", "CompressedTensorsWNA8Int", "checkpoint", True),
        ("mp", "int4_row", "signed", "CompressedTensorsW4A8Int", "checkpoint", True),
        ("mp", "int4_g64_zp", "turned", "INCWNA16LinearScheme", "int8", True),
        ("mp", "int4_g64_zp", "", "AutoAWQMarlinLinearMethod", "checkpoint", False),
        ("mp", "int8_g128", "turned", "CompressedTensorsWNA16", None, False),
        ("nvfp4", "nvfp4", "", "CompressedTensorsW4A4Fp4", None, False),
        ("mxfp4", "mxfp4", "", "QuarkOCP_MX", "int8", False),
        ("mxfp8", "mxfp8", "", "INCMxfp8LinearScheme", None, False),
    ],
)  # fmt: skip
def test_linear_layers_are_the_products_with_their_decoded_weights(
    monkeypatch: pytest.MonkeyPatch, kind: str, quant: str, how: str, method: str, wish: str | None, rounds: bool
) -> None:
    kernel = vllm(monkeypatch, release_weights=how != "token", activations=wish)[1][kind]
    config, held, q = loaded(kind, quant, how)
    assert kernel.can_implement(config) == kernel.is_supported() == (True, None) and kernel.get_min_capability() == -1
    made, layer, scheme = kernel(config, "w_q", "w_s", "w_zp"), nn.Module(), type(method, (), {})()
    vars(layer).update(prefix="kv_b_proj" if how == "rows" else "qkv_proj", whole=(whole := torch.ones(2, 8)))
    vars(layer)["quant_method"] = SimpleNamespace(scheme=scheme) if "INC" in method else scheme
    if "Compressed" in method:
        vars(layer).update(quant_method=None, scheme=scheme)
    if kind == "nvfp4":
        vars(layer)[vllm_linear.GATHERED] = None
    for name, value in {**held, "shared": whole[:1], "vector": torch.ones(8)}.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, False)
        setattr(layer, name, value)
    x, bias = torch.randn((5, 256), generator=torch.Generator().manual_seed(1)).bfloat16(), torch.randn(384).bfloat16()
    here, w = PackedLinear(q, "w", int8=rounds), q.dequantize(torch.float32).double()
    made.process_weights_after_loading(layer)
    y = made.apply_weights(layer, x, bias)
    assert torch.equal(y, here.run(x) + bias)
    assert error(y, x.double() @ w.T + bias.double()) < 2 ** -(6 if rounds else 7)
    freed = {name for name, each in layer.named_parameters() if each.untyped_storage().nbytes() == 0}
    matrices = {name for name, each in held.items() if isinstance(each, torch.Tensor) and each.dim() == 2}
    assert freed == (matrices if how not in ("token", "rows") and kind != "nvfp4" else set()) and whole.all()
    assert vllm_linear.ENTRY not in layer.state_dict() and vllm_linear.ENTRY in dict(layer.named_buffers())


def test_linear_layers_that_are_not_computed_are_refused_by_dtype_width_and_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = vllm(monkeypatch)[1]
    half, whole = {"act_type": torch.bfloat16}, vars(config_of((-1, -1)))
    for reason, facts in {
        "they are torch.float16": whole | {"input_dtype": torch.float16},
        "they are torch.float32": whole | {"act_type": torch.float32},
        "(they are )torch.float32": whole,  # the default of torch is the model's
        "multiple of 32 .*has 100": whole | half | {"weight_shape": (64, 100)},
        "multiple of 32 .*has 101": whole | half | {"partition_weight_shape": (101, 64)},
        "no FP8 blocks of 64x128": half | vars(config_of((64, 128))),
        "no FP8 blocks of 128x64": half | vars(config_of((128, 64))),
        "no uint4 without zero points": half | {"weight_type": "uint4", "group_size": 32, "zero_points": False},
        "no uint4b8 with zero points": half | {"weight_type": "uint4b8", "group_size": 32, "zero_points": True},
        "no fp4 without": half | {"weight_type": "fp4", "group_size": 32, "zero_points": False},
        "groups of 16 are": half | {"weight_type": "uint4b8", "group_size": 16, "zero_points": False},
        "": whole | half | {"partition_weight_shape": (128, 100)},
    }.items():
        kind = "mp" if "weight_type" in facts else "fp8"
        facts = {"partition_weight_shape": (256, 64)} | facts if kind == "mp" else facts
        able, why = kernels[kind].can_implement(SimpleNamespace(**facts))
        assert (able, why) == (True, None) if not reason else not able and re.search(reason, why), (facts, why)
    for group in (-1, 256):
        facts = {"weight_type": "uint8", "group_size": group, "zero_points": True, "partition_weight_shape": (256, 64)}
        assert vllm_linear._grouped(SimpleNamespace(**facts)).name == "int8_row_zp"  # type: ignore[union-attr]
    layer = SimpleNamespace(
        prefix="qkv_proj", weight=torch.ones((64, 40), dtype=torch.int8), weight_scale=torch.ones(64)
    )
    made = kernels["int8"](SimpleNamespace())
    for name, shape, reason in (
        ("V2", None, "vLLM's V2 is not read"),
        ("QuarkW8A8Int8", None, "has 40"),
        ("QuarkW8A8Int8", (64, 20), r"a matrix of \(64, 20\) is stored as \(64, 40\)"),
    ):
        layer.quant_method, made.shape = type(name, (), {})(), shape
        with pytest.raises(UnsupportedError, match=rf"qkv_proj in moe_mk\n.*{reason}\n.*KERNELS=MoeMkLinearKernel"):
            made.process_weights_after_loading(layer)


@pytest.mark.parametrize("module", vllm_linear.REQUANTISING)
def test_fused_projections_in_fp8_keep_a_scale_for_each_row_where_vllm_has_no_operator(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    vllm(monkeypatch)
    requantise, weight = getattr(sys.modules[f"{QUANTIZATION}.{module}"], vllm_linear.REQUANTISE), torch.ones(4, 2)
    scale, same = requantise(weight, torch.tensor([2.0, 3.0]), [1, 3])
    assert same is weight and scale.tolist() == [[2.0], [3.0], [3.0], [3.0]]
    assert vllm_linear._one_scale(lambda *given: (given[1], given[0]), weight, scale, [1]) == (scale, weight)
