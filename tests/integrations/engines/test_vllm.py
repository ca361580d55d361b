"""The vLLM plugin: inert unless it is named, what vLLM calls, and vLLM itself where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from moe_mk import MoELayer
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.integrations import vllm as door
from moe_mk.integrations import vllm_linear
from moe_mk.integrations.vllm_formats import FORMATS
from tests.integrations.engines import stand_ins, vllm_models
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
    half = Tiny(tiny.w13.bfloat16(), tiny.w2.bfloat16())
    _, layer = (layer_of(host, half, in_dtype=torch.bfloat16) for _ in range(2))
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
        assert layer.weight_loader(layer.w2_weight, tiny.w2.bfloat16()) is True


def test_a_rank_with_some_of_the_experts_adds_up_its_own(enabled: Vllm) -> None:
    # 10 experts over two ranks of 5: this one holds 5..9, so that global id 7 is its own 2.
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    expert_map = torch.cat((torch.full((5,), -1), torch.arange(5))).to(torch.int32)
    parallel = SimpleNamespace(dp_size=1, ep_size=2, use_ep=True, tp_rank=0, enable_eplb=False)
    layer = layer_of(enabled, tiny, expert_map=expert_map, moe_parallel_config=parallel)
    layer.quant_method.process_weights_after_loading(layer)
    global_TK = ids_TK + 5
    global_TK[:, 1] -= 5  # of the other rank
    global_TK[0, 0] = -1  # padding of vLLM
    assert door.local_ids(global_TK, None) is global_TK
    local_TK = ids_TK.clone()
    local_TK[:, 1], local_TK[0, 0] = -1, -1
    assert torch.equal(door.local_ids(global_TK, expert_map), local_TK)
    edges_TK = torch.tensor([[-2, -1, 4, 5, 9, 10, 2**31 - 1]], dtype=torch.int32)
    assert door.local_ids(edges_TK, expert_map).tolist() == [[-1, -1, -1, 0, 4, -1, -1]]
    assert error(run(layer, x_TH, weights_TK, global_TK), tiny.loops(x_TH, weights_TK, local_TK)) < CLOSE


def test_what_nothing_here_computes_is_refused_with_every_reason(enabled: Vllm) -> None:
    with pytest.raises(UnsupportedError, match=r"'situ'(.|\n)*LoRA(.|\n)*VLLM_PLUGINS"):
        layer_of(enabled, Tiny.drawn(), activation=Activation.SITU, is_lora_enabled=True)
    with pytest.raises(UnsupportedError, match=r"no experts of vLLM's QuarkMoEMethod\n.*Fp8MoEMethod"):
        layer_of(enabled, Tiny.drawn(), method=QuarkMoEMethod)
    layer = layer_of(enabled, Tiny.drawn(), apply_router_weight_on_input=True)
    with pytest.raises(UnsupportedError, match=r"layers.1\n.*applied to its input"):
        layer.quant_method.process_weights_after_loading(layer)


def reasons_of(layer_of_host: Callable[[], object]) -> str:
    try:
        layer_of_host()
    except UnsupportedError as refused:
        return " ".join(refused.reasons)
    return ""


def test_kinds_of_parallelism_and_of_activations_are_refused_one_by_one(enabled: Vllm) -> None:
    for dp, ep, use_ep, eplb, experts in product((1, 2), (1, 2, 4), (True, False), (True, False), (4, 5)):
        facts = {"dp_size": dp, "ep_size": ep, "use_ep": use_ep, "tp_rank": 0, "enable_eplb": eplb}
        of = {"num_experts": experts, "moe_parallel_config": SimpleNamespace(**facts)}
        found = reasons_of(lambda of=of: layer_of(enabled, Tiny.drawn(), **of))  # type: ignore[misc]
        assert ("data parallel size" in found) == (dp == 2 and not (use_ep and ep == 2)), of
        assert ("unequal parts" in found) == (dp == 2 and experts % ep > 0) and ("EPLB" in found) == eplb, of
    limited = "silu", "swigluoai", "swigluoai_uninterleave"
    for name, limit, beta in product((*limited, "gelu", "relu2_no_mul"), (None, 0.0, 7.0), (None, 1.0, 0.5)):
        of = {"activation": SimpleNamespace(value=name), "swiglu_limit": limit, "swiglu_beta": beta}
        found = reasons_of(lambda of=of: layer_of(enabled, Tiny.drawn(), swiglu_alpha=3.0, **of))  # type: ignore[misc]
        assert ("a clamp of" in found) == (limit is not None and name not in limited), of
        assert ("swiglu_beta=0.5" in found) == (beta == 0.5 and "oai" in name), of


def test_vllm_selects_no_kernel_for_our_methods_and_later_its_own(enabled: Vllm) -> None:
    modules = {each.module for each in FORMATS.values() if each.selects}
    before = {name: vars(sys.modules[name]).copy() for name in modules}
    selected: dict[str, object] = {}

    class AutoAWQMoEMethod(stand_ins.FusedMoEMethodBase):
        quant_config = SimpleNamespace(weight_bits=4, group_size=64, zero_point=True)
        uses_weight_scale_2_pattern = create_weights = Mock()

        def __init__(self, moe: Any) -> None:
            super().__init__(moe)
            for each in FORMATS.values():
                if each.selects:
                    select = getattr(sys.modules[each.module], each.selects)
                    selected[each.selects + each.backend] = select(moe, at=1 / moe.num_experts)

    method = layer_of(enabled, Tiny.drawn(), method=AutoAWQMoEMethod).quant_method
    backends = {"select_wna16_moe_backendWNA16MoEBackend.MARLIN": "marlin"}
    assert selected == {name: (backends.get(name), None) for name in selected} and {*backends} < {*selected}
    with pytest.raises(ZeroDivisionError):
        layer_of(enabled, Tiny.drawn(), method=AutoAWQMoEMethod, num_experts=0)
    assert before == {name: vars(sys.modules[name]) for name in modules}
    method.create_weights("layer", 1, size=2)
    AutoAWQMoEMethod.create_weights.assert_called_once_with("layer", 1, size=2)
    assert method.uses_weight_scale_2_pattern() is True


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
    names |= {"w13_weight_scale_2": "global_scale", "w2_input_scale": "input_scale", "w2_scales": "scale"}
    names |= {"w13_qzeros": "zeros", "w2_weight_zero_point": "zeros", "w2_g_idx": "order", "w13_weight_shape": "shape"}
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
