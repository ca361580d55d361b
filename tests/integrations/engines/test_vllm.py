"""The vLLM plugin: inert unless it is named, what vLLM calls, and vLLM itself where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from moe_mk import MoELayer
from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.integrations import vllm as door
from moe_mk.integrations import vllm_linear
from moe_mk.integrations.packed_linear import PackedLinear, packed_linear
from moe_mk.quant import QuantScheme
from moe_mk.quant.int8 import INT8_TOKEN, int8_groups
from moe_mk.quant.kinds import scheme_of_kind
from tests.integrations.engines import vllm_models
from tests.integrations.engines.cases import CLOSE, Tiny, call, error
from tests.integrations.engines.stand_ins import (
    Activation,
    QuarkMoEMethod,
    UnquantizedFusedMoEMethod,
    Vllm,
    moe_config,
    put_in,
)
from tests.integrations.engines.vllm_host import TOKENS
from tests.layer.native import NEEDS_COMPILER
from tests.support.layers import layer, tensors

CPU_ONLY = {"moe_mk": {"experts": "torch_cpu"}}


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    host = Vllm(["moe_mk"], CPU_ONLY)
    put_in(monkeypatch, host.modules)
    assert door.register()
    return host


def layer_of(host: Vllm, tiny: Tiny, *, method: type = UnquantizedFusedMoEMethod, **changes: Any) -> Any:
    """A layer of vLLM with loaded parameters. changes: of the config, or facts of the layer."""
    config = moe_config()
    of_config = {name: value for name, value in changes.items() if hasattr(config, name)}
    layer = host.layer(
        method, moe_config(**of_config), **{name: value for name, value in changes.items() if name not in of_config}
    )
    layer.w13_weight, layer.w2_weight = nn.Parameter(tiny.w13, False), nn.Parameter(tiny.w2, False)
    return layer


def run(layer: Any, *tokens: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer.quant_method.apply(layer, *tokens, None, None)
    return y


@pytest.mark.parametrize("plugins", [None, [], ["another"]])
def test_it_is_inert_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, plugins: list[str] | None) -> None:
    host = Vllm(plugins)
    put_in(monkeypatch, host.modules)
    assert not door.register()
    assert not host.registry and all(not hasattr(k, "of_moe_mk") for each in host.kernels.values() for k in each)


def test_it_may_be_loaded_twice_and_does_not_push_another_plugin_out(enabled: Vllm) -> None:
    assert not door.register()
    assert list(enabled.registry) == [name for _, name in door.PLUGGABLE]
    names = [kernel.__name__ for kernel in enabled.kernels["fp8"]]
    assert names == ["CPUFp8", "MoeMkLinearKernel", "PerTensorTorchFP8"]
    for kind in ("mp", "int8"):
        ours = [hasattr(kernel, "of_moe_mk") for kernel in enabled.kernels[kind]]
        assert ours == ([False, True] if torch.cpu._is_amx_tile_supported() else [True, False])
    enabled.registry["RoutedExperts"] = type("Hpu", (), {"__module__": "hpu"})
    del enabled.registry["GptOssRoutedExperts"], enabled.registry["TransformersRoutedExperts"]
    with pytest.raises(ConfigError, match=r"RoutedExperts is replaced by hpu\.Hpu already; name one of the two"):
        door.enable()


def test_vllm_makes_our_method_and_gets_what_loops_compute(enabled: Vllm) -> None:
    tiny, tokens = Tiny.drawn(), call()
    layer = layer_of(enabled, tiny)
    method = layer.quant_method
    assert type(method).__name__ == "UnquantizedFusedMoEMethod", "vLLM's loaders ask for the name"
    assert not method.is_monolithic and not method.supports_eplb
    assert method.maybe_roundup_sizes(32, 24, torch.float32, None) == (32, 24)
    method.process_weights_after_loading(layer)
    assert error(run(layer, *tokens), tiny.loops(*tokens)) < CLOSE
    assert method.experts_here.backend == "torch_cpu", "as --additional-config states"
    assert enabled.logged == ["moe_mk: routed experts (unquantised, UnquantizedFusedMoEMethod) by torch_cpu"]
    tiny.w2.mul_(2.0)  # new weights, as reinforcement learning loads them
    method.process_weights_after_loading(layer)
    assert error(run(layer, *tokens), tiny.loops(*tokens)) < CLOSE


@NEEDS_COMPILER
@pytest.mark.timeout(300)  # the first one compiles the kernels
@pytest.mark.parametrize("releases", [True, False])
def test_weights_are_held_once_unless_that_is_stated(monkeypatch: pytest.MonkeyPatch, releases: bool) -> None:
    stated = {"experts": "cpu_native"} | ({} if releases else {"release_weights": False})
    host = Vllm(["moe_mk"], {"moe_mk": stated})
    put_in(monkeypatch, host.modules)
    assert door.register()
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    layer = layer_of(host, Tiny(tiny.w13.bfloat16(), tiny.w2.bfloat16()), in_dtype=torch.bfloat16)
    layer.quant_method.process_weights_after_loading(layer)
    held = layer.w13_weight.untyped_storage().nbytes() + layer.w2_weight.untyped_storage().nbytes()
    assert (held == 0) == releases
    assert error(run(layer, x_TH.bfloat16(), weights_TK, ids_TK), tiny.loops(x_TH, weights_TK, ids_TK)) < 0.02
    if releases:
        with pytest.raises(
            UnsupportedError, match=r"loading weights into layers.1 again\n.*'release_weights'\] = false"
        ):
            layer.weight_loader(layer.w2_weight, tiny.w2)
    else:
        layer.weight_loader(layer.w2_weight, tiny.w2.bfloat16())


def test_a_rank_with_some_of_the_experts_adds_up_its_own(enabled: Vllm) -> None:
    # 10 experts over two ranks of 5: this one holds 5..9, so that global id 7 is its own 2.
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    expert_map = torch.cat((torch.full((5,), -1), torch.arange(5))).to(torch.int32)
    layer = layer_of(enabled, tiny, expert_map=expert_map)
    layer.quant_method.process_weights_after_loading(layer)
    global_TK = ids_TK + 5
    global_TK[:, 1] -= 5  # of the other rank
    global_TK[0, 0] = -1  # padding of vLLM
    local_TK = ids_TK.clone()
    local_TK[:, 1], local_TK[0, 0] = -1, -1
    assert torch.equal(door.local_ids(global_TK, expert_map), local_TK)
    edges_TK = torch.tensor([[-2, -1, 4, 5, 9, 10, 2**31 - 1]], dtype=torch.int32)
    assert door.local_ids(edges_TK, expert_map).tolist() == [[-1, -1, -1, 0, 4, -1, -1]]
    assert error(run(layer, x_TH, weights_TK, global_TK), tiny.loops(x_TH, weights_TK, local_TK)) < CLOSE


def test_experts_without_a_gate(enabled: Vllm) -> None:
    tiny, tokens = Tiny.drawn(gated=False), call()
    layer = layer_of(enabled, tiny, activation=Activation.RELU2_NO_MUL, is_act_and_mul=False)
    layer.quant_method.process_weights_after_loading(layer)
    assert error(run(layer, *tokens), tiny.loops(*tokens)) < CLOSE


def test_what_nothing_here_computes_is_refused_with_every_reason(enabled: Vllm) -> None:
    parallel = SimpleNamespace(dp_size=2, ep_size=4, use_ep=True, tp_rank=0, enable_eplb=True)
    with pytest.raises(UnsupportedError) as caught:
        layer_of(enabled, Tiny.drawn(), activation=Activation.SITU, is_lora_enabled=True, moe_parallel_config=parallel)
    stated = "\n".join(caught.value.reasons)
    for word in ("'situ'", "LoRA", "EPLB", "data parallel size 2", "5 experts on 4", "VLLM_PLUGINS"):
        assert word in stated
    with pytest.raises(UnsupportedError, match=r"swiglu_beta=0.5"):
        layer_of(enabled, Tiny.drawn(), activation=Activation.SWIGLUOAI, swiglu_beta=0.5)
    with pytest.raises(UnsupportedError, match=r"a clamp of 7.0 with activation 'relu2'; known with clamps: silu"):
        layer_of(enabled, Tiny.drawn(), activation=Activation.RELU2_NO_MUL, swiglu_limit=7.0)
    with pytest.raises(UnsupportedError, match=r"no experts of vLLM's QuarkMoEMethod\n.*Fp8MoEMethod"):
        layer_of(enabled, Tiny.drawn(), method=QuarkMoEMethod)
    layer = layer_of(enabled, Tiny.drawn(), apply_router_weight_on_input=True)
    with pytest.raises(UnsupportedError, match=r"layers.1\n.*applied to its input"):
        layer.quant_method.process_weights_after_loading(layer)


@NEEDS_COMPILER
@pytest.mark.timeout(300)  # the first one compiles the kernels
@pytest.mark.parametrize(
    "kind", ["bf16", "fp8_block", "fp8_tensor", "mxfp8", "mxfp4", "nvfp4", "int4_g32_zp", "int8", "int8_row"]
)
def test_a_linear_layer_is_the_product_with_its_decoded_weights(kind: str) -> None:
    scheme, draw = scheme_of_kind(kind), torch.Generator().manual_seed(0)
    w = torch.randn((256 if kind == "fp8_block" else 200, 288 if kind != "fp8_block" else 256), generator=draw) * 0.1
    q = scheme.quantize(w.bfloat16() if kind == "bf16" else w)
    linear, decoded = PackedLinear(q, "w"), scheme.dequantize(q, torch.float32).double()
    for rows in (0, 1, 5, 300):
        x = torch.randn((rows, w.shape[1]), generator=draw).bfloat16()
        y = packed_linear(x, linear.entry, None, w.shape[0])
        assert y.shape == (rows, w.shape[0]) and y.dtype is torch.bfloat16
        assert rows == 0 or error(y, x.double() @ decoded.T) < 2**-8, "one rounding to bf16"
    wide = torch.randn((2, 3, 2 * w.shape[1]), generator=draw).bfloat16()[..., : w.shape[1]]
    assert error(linear.run(wide), wide.double() @ decoded.T) < 2**-8
    for wrong in (torch.zeros((2, 8)), torch.zeros((2, w.shape[1]), device="meta")):
        with pytest.raises(ShapeError, match=rf"x is \(2, \d+\) torch.bfloat16 on {wrong.device}, expected"):
            linear.run(wrong.bfloat16())
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    given = (wide, linear.entry, w.shape[0])
    torch.library.opcheck(torch.ops.moe_mk.packed_linear, given, test_utils=tests)


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


@NEEDS_COMPILER
@pytest.mark.timeout(300)  # the first one compiles the kernels
@pytest.mark.parametrize(
    ("kind", "method", "wish", "rounds"),
    [
        ("int4_g128", "CompressedTensorsWNA16", "int8", True), ("int4_g128", "AutoGPTQLinearMethod", None, False),
        ("int4_g128", "CompressedTensorsWNA16", "checkpoint", False),
        ("int4_row", "CompressedTensorsW4A8Int", "checkpoint", True),
        ("int4_g128", "CompressedTensorsWNA8Int", "checkpoint", True),
        ("int8", "QuarkW8A8Int8", "int8", True), ("int8", "QuarkW8A8Int8", "checkpoint", True),
        ("int8", "QuarkW8A8Int8", "plain", False), ("mxfp4", "QuarkOCP_MX", "int8", False),
    ],
)  # fmt: skip
def test_linear_layers_of_vllm_round_tokens_as_the_settings_state(
    kind: str, method: str, wish: str | None, rounds: bool
) -> None:
    q = scheme_of_kind(kind).quantize(torch.randn((64, 256), generator=torch.Generator().manual_seed(0)))
    base, stated = type("Base", (), {"__init__": lambda self, config: None}), {"activations": wish}
    made: Any = vllm_linear.kernel_over(base, lambda _: q.scheme, lambda *_: q, Mock(), lambda: (stated, True))(None)
    layer = nn.Module()
    layer.prefix, layer.quant_method = "qkv_proj", type(method, (), {})()  # type: ignore[assignment]
    made.process_weights_after_loading(layer)
    x = torch.randn((5, 256), generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(made.apply_weights(layer, x), PackedLinear(q, "w", int8=rounds).run(x))
    made.shape = (64, 128)
    with pytest.raises(UnsupportedError, match=r"a matrix of \(64, 128\) is stored as \(64, 256\)"):
        made.process_weights_after_loading(layer)
    layer.quant_method = type("V2", (type(layer.quant_method),), {})()
    with pytest.raises(UnsupportedError, match=r"qkv_proj in moe_mk\n.*vLLM's V2 is not read\n.*MoeMkLinearKernel"):
        made.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("type_of", "group", "zeros", "wanted"),
    [
        ("uint4b8", 32, False, "int4_g32"), ("uint4", 64, True, "int4_g64_zp"), ("uint8b128", -1, False, "int8_row"),
        ("int4", 256, False, "int4_row"), ("uint4", 32, False, "reads no uint4 without zero points"),
        ("float4_e2m1f", 32, False, "reads no float4_e2m1f without zero points"),
        ("uint4b8", 16, False, "4-bit weights with groups of 16 are not supported; use 4 or 8 bits and 32, 64, 128, "
         "whole rows"),
    ],
)  # fmt: skip
def test_integers_of_vllm_are_read_by_their_type(type_of: str, group: int, zeros: bool, wanted: str) -> None:
    facts = {"weight_type": type_of, "group_size": group, "zero_points": zeros, "partition_weight_shape": (256, 64)}
    found = vllm_linear._grouped(SimpleNamespace(**facts))
    assert getattr(found, "name", found) == wanted


@NEEDS_COMPILER
@pytest.mark.parametrize(("has_product", "avx512_bf16", "amx"), [(False, False, False), (True, True, False)])
def test_layers_in_bf16_are_multiplied_here_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, has_product: bool, avx512_bf16: bool, amx: bool
) -> None:
    settings: dict[str, Any] = {"experts": "torch_cpu"}
    host = Vllm(["moe_mk"], {"moe_mk": settings})
    put_in(monkeypatch, host.modules)
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
        other = Vllm(["moe_mk"], CPU_ONLY)
        put_in(monkeypatch, other.modules)
        processor_is(monkeypatch, *processor)
        assert door.register()
        assert other.modules[vllm_linear.UTILS].items() <= vars(sys.modules[vllm_linear.UTILS]).items(), "as it was"


def processor_is(monkeypatch: pytest.MonkeyPatch, has_product: bool, avx512_bf16: bool, amx: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_product)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)


def test_fused_projections_of_int8_keep_their_scales(enabled: Vllm) -> None:
    # q, k and v of 4, 2 and 2 rows, each with one scale.
    layer = SimpleNamespace(
        weight=torch.arange(8, dtype=torch.int8)[:, None].repeat(1, 64),
        weight_scale=torch.tensor([0.5, 2.0, 3.0]),
        logical_widths=[4, 2, 2],
        scheme=type("CompressedTensorsW8A8Int8", (), {})(),
        quant_method=None,
    )
    (kernel,) = [each for each in enabled.kernels["int8"] if hasattr(each, "of_moe_mk")]
    made: Any = kernel(SimpleNamespace())  # type: ignore[call-arg]
    q = vllm_linear._matrix(made, layer)
    assert q.dequantize(torch.float32)[:, 0].tolist() == [0.0, 0.5, 1.0, 1.5, 8.0, 10.0, 18.0, 21.0]
    layer.prefix, layer.weight = "layers.0.qkv_proj", layer.weight[:, :40].contiguous()
    with pytest.raises(
        UnsupportedError, match=r"qkv_proj in moe_mk\n.*has 40\n.*VLLM_DISABLED_KERNELS=MoeMkLinearKernel"
    ):
        made.process_weights_after_loading(layer)


def test_a_model_of_vllm_loads_a_layer_as_it_loads_its_own_parameters() -> None:
    given, wanted = tensors(4), layer(4, 2)
    moe = MoELayer(wanted.config, dtype=torch.float32)
    loader = moe.loader()
    load = door.weight_loader(loader)
    for expert in range(4):
        for shard, projection in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            tensor, name = given[f"experts.{expert}.{projection}_proj.weight"], f"mlp.experts.w{shard[1:]}_weight"
            assert load(None, tensor, name, shard_id=shard, expert_id=expert, return_success=True)
    loader.feed("gate.weight", given["gate.weight"])
    loader.finish()
    x_TH = torch.randn((3, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(moe(x_TH), wanted(x_TH))
    names = {"w13_weight": "weight", "w13_weight_scale_inv": "scale", "w2_weight_scale": "scale", "w13_bias": "bias"}
    names |= {"w13_weight_scale_2": "global_scale", "w2_input_scale": "input_scale"}
    assert {name: door.kind_of(f"mlp.experts.{name}") for name in names} == names


def test_settings_that_are_no_table_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Vllm(["moe_mk"], {"moe_mk": "torch_cpu"})
    put_in(monkeypatch, host.modules)
    assert door.register()
    with pytest.raises(ConfigError, match=r"additional_config\['moe_mk'\] is 'torch_cpu', expected a table"):
        layer_of(host, Tiny.drawn())


def test_the_entry_point_leads_here() -> None:
    points = [p for p in entry_points(group="vllm.general_plugins") if p.name == "moe_mk"]
    if not points:
        pytest.skip("moe-mk was installed before it had this entry point: install it again")
    assert {point.value for point in points} == {"moe_mk.integrations.vllm:register"}
    assert points[0].load() is door.register


# vLLM itself, in a process of its own.

COMPILED = [["bf16"], ["fp8 blocks"], ["int4 groups"]]
EAGER = [
    ["fp8 tensors", "fp8 channels", "int4 groups with zeros", "int8 groups"],
    ["gptq", "awq", "int8", "gpt-oss", "int4 groups, int8 tokens"],
    ["nvfp4", "nvfp4 of modelopt", "mxfp4", "mxfp4, fp8 tokens"],
]
PLAIN = frozenset({"bf16", "gpt-oss"})
"""Models whose linear layers are all in bf16: vLLM's with AMX. Others have a router and the head in bf16."""
WITHIN = 3.0
"""Limits of a model in bf16: times the root mean square of what bf16 alone changes."""


def hosted(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; `make engines` installs its build for CPUs and runs this")
    program = [sys.executable, "-m", "tests.integrations.engines.vllm_host", str(folder), *arguments]
    done = subprocess.run(program, env=os.environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {each["name"]: each for each in facts}


@pytest.mark.timeout(300)  # as long as its process may take
@pytest.mark.external
@pytest.mark.stress
@pytest.mark.row(175)
@pytest.mark.parametrize("options", ["--alone", "--alone --tp", "--ep"])
def test_calls_of_vllm_are_recorded_with_all_ranks(tmp_path: Path, options: str) -> None:
    # With --ep, vLLM 0.32's own operator for CPUs reads beyond its tables for experts of other ranks and crashes.
    (found,) = hosted(tmp_path, "--record", "--eager", *options.split(), "bf16").values()
    record = found["record"]
    assert len(record["layers"]) == len({*record["layers"]}) >= 2 and min(record["tokens"]) > 1
    assert max(record["errors"]) < 0.02, "of bf16 rows"


@pytest.mark.timeout(300)  # as long as its process may take
@pytest.mark.external
@pytest.mark.stress
@pytest.mark.parametrize(
    ("names", "options"),
    [
        *((names, []) for names in COMPILED),
        *((names, ["--eager"]) for names in EAGER),
        (["int4 groups", "int8 groups", "int8"], ["--eager", "--int8"]),
        (["int4 groups, int8 tokens", "int4 channels, int8 tokens"], ["--checkpoint"]),
    ],
)
def test_vllm_generates_the_tokens_of_transformers(tmp_path: Path, names: list[str], options: list[str]) -> None:
    rounds = bool({"--int8", "--checkpoint"} & {*options})
    for name, found in hosted(tmp_path, *options, *names).items():
        assert found["behind"] < WITHIN * found["noise"] and found["off"] < WITHIN * found["noise"], found
        assert found["equal"] >= 31, "of 36; the others are about as good"
        calls, layers = found["calls"], vllm_models.LAYERS
        assert calls["cpu_native"] is True, "its experts, and vLLM's copy is freed"
        assert calls["experts"] >= layers * TOKENS
        assert calls["experts int8"] == calls["experts"] * rounds
        if not torch.cpu._is_amx_tile_supported():
            of_bf16 = (3 if name in PLAIN else 1) * layers + 1 if vllm_linear.packs_bf16() else 0
            others = 0 if name in PLAIN else 2 * layers
            assert calls["linear"] == others + of_bf16, "q, k and v as one, o, and the router of each layer; the head"
            assert calls["linear int8"] == others * rounds


@pytest.mark.timeout(300)  # as long as its process may take
@pytest.mark.external
@pytest.mark.stress
def test_vllm_generates_the_same_tokens_without_us(tmp_path: Path) -> None:
    alone, ours = hosted(tmp_path, "--alone", "--eager", "bf16"), hosted(tmp_path, "--eager", "bf16")
    assert alone["bf16"]["calls"]["experts"] == 0
    assert alone["bf16"]["equal"] == ours["bf16"]["equal"]


@pytest.mark.external
@pytest.mark.stress
@pytest.mark.timeout(300)  # three processes import vLLM
@pytest.mark.parametrize(("option", "experts", "width"), [("--tp", 8, 64), ("--ep", 4, 128), ("--dp", 4, 128)])
def test_two_ranks_of_vllm_generate_the_tokens_of_transformers(
    tmp_path: Path, option: str, experts: int, width: int
) -> None:
    found = hosted(tmp_path, "--eager", option, "bf16")["bf16"]
    of_rank = [["cpu_native", experts, width, True]] * vllm_models.LAYERS
    assert found["ranks"] == ([of_rank] if option == "--dp" else [of_rank] * 2)
    assert found["behind"] < WITHIN * found["noise"] and found["off"] < WITHIN * found["noise"], found
    assert found["equal"] >= 31, "of 36; the others are about as good"
