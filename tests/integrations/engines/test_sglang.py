"""The SGLang runner core: one call by loops, what it refuses, and layers of the wheel where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.integrations import sglang as door
from moe_mk.quant.kinds import scheme_of_kind
from tests.integrations.engines.cases import CLOSE, Tiny, call, error
from tests.integrations.engines.stand_ins import SGLANG, DispatchMoeRunnerCore, StandardCombineInput, put_in
from tests.layer.native import NEEDS_COMPILER
from tests.support.tiers import pairwise_cover

INSTALLED = importlib.util.find_spec("sglang") is not None
HOST = Path(__file__).parent / "sglang_host.py"


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, SGLANG)


def runner_config(**changes: Any) -> SimpleNamespace:
    facts = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False, "no_combine": False}
    facts |= dict.fromkeys(("routed_scaling_factor", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit"))
    return SimpleNamespace(**(facts | changes))


def dispatched(x: Any, weights: Any, ids: Any) -> SimpleNamespace:
    return SimpleNamespace(hidden_states=x, topk_output=SimpleNamespace(topk_weights=weights, topk_ids=ids))


def quant_info(tiny: Tiny, **changes: Any) -> SimpleNamespace:
    facts: dict[str, Any] = {"w13_weight": tiny.w13, "w2_weight": tiny.w2, "b13": tiny.b13, "b2": tiny.b2}
    facts |= {"fuse_swiglu_interleaved": False, "use_int4_w4a16": False, "use_int8_w8a16": False}
    return SimpleNamespace(**(facts | changes))


INT4, INT8 = {"use_int4_w4a16": True}, {"use_int8_w8a16": True}
BLOCKS, NO_ZEROS = {"block_shape": [8, 16]}, {"w13_zp": None, "w2_zp": None}
FORMATS: dict[str, dict[str, Any]] = {
    "": {}, "fp8_block": {"use_fp8_w8a8": True, "per_channel_quant": True, **BLOCKS},
    "fp8_channel": {"use_fp8_w8a8": True, "per_channel_quant": True}, "fp8_tensor": {"use_fp8_w8a8": True},
    "int8": {"use_int8_w8a8": True}, "int8_block": {"use_int8_w8a8": True, **BLOCKS},
    "int4_g32": {**INT4, **NO_ZEROS, "block_shape": [0, 32]}, "int4_g32_zp": {**INT4, "block_shape": [0, 32]},
    "int8_g64": {**INT8, **NO_ZEROS, "block_shape": [0, 64]}, "int8_g32_zp": {**INT8, "block_shape": [0, 32]},
}  # fmt: skip
"""By format: what SGLang's records of weights state."""


def hosted(tiny: Tiny, quant: str, *, interleaved: bool = False) -> tuple[SimpleNamespace, Tiny]:
    """Weights as SGLang passes them, and what they are when they are decoded."""
    order: Any = (lambda t: torch.stack(t.chunk(2, 1), 2).flatten(1, 2)) if interleaved else lambda t: t
    back: Any = (lambda t: torch.cat((t[:, 0::2], t[:, 1::2]), 1)) if interleaved else lambda t: t
    made, flags = replace(tiny, w13=order(tiny.w13)), {"fuse_swiglu_interleaved": interleaved, **FORMATS[quant]}
    if tiny.b13 is not None:
        made = replace(made, b13=order(tiny.b13))
    if not quant:
        return quant_info(made, **flags), tiny
    scheme = scheme_of_kind(quant, (8, 16))
    w13, w2 = scheme.quantize(made.w13), scheme.quantize(made.w2)
    if w13.zeros is not None and w2.zeros is not None:
        of_bytes = "int8" in quant  # those of four bits are two in a byte along the rows
        zeros = [z if of_bytes else z[:, 0::2] | z[:, 1::2] << 4 for z in (w13.zeros, w2.zeros)]
        flags |= {"w13_zp": zeros[0], "w2_zp": zeros[1]}
    given = quant_info(replace(made, w13=w13.values, w2=w2.values), w13_scale=w13.scales, w2_scale=w2.scales, **flags)
    return given, replace(tiny, w13=back(w13.dequantize(torch.float32)), w2=w2.dequantize(torch.float32))


PRODUCT = [
    case
    for case in product(
        FORMATS, ("silu", "gelu", "relu2"), (True, False), (True, False), (None, 2.5), (torch.float32, torch.float16)
    )
    if not case[3] or (case[1] != "relu2" and not case[0].endswith("_block"))
]
PLAIN = {"experts": "reference", "activations": "plain"}


@pytest.mark.parametrize(
    ("quant", "activation", "biased", "interleaved", "scale", "dtype"),
    [PRODUCT[number] for number in sorted(pairwise_cover(PRODUCT))],
)
def test_layers_compute_what_loops_do(
    quant: str, activation: str, biased: bool, interleaved: bool, scale: float | None, dtype: torch.dtype
) -> None:
    facts = {"activation": activation, "is_gated": (gated := activation != "relu2")}
    config = runner_config(**facts, routed_scaling_factor=scale)
    core = door.core(runner_config(**facts, routed_scaling_factor=9.0), PLAIN)  # a call states its own
    assert isinstance(core, DispatchMoeRunnerCore) and core.config.is_gated == gated
    for seed, inner in enumerate((64, 32)):
        drawn = Tiny.drawn(gated=gated, biased=biased, inner=inner, hidden=64, seed=seed)
        if not quant:
            drawn = Tiny(*(None if t is None else t.to(dtype) for t in (drawn.w13, drawn.w2, drawn.b13, drawn.b2)))
        given, tiny = hosted(replace(drawn, activation=activation), quant, interleaved=interleaved)
        for count in (5, 0, 2):
            x_TH, weights_TK, ids_TK = call(count, hidden=64)
            ids_TK[1:2, 1] = -1  # of another rank
            out = core.run_from_dispatch(dispatched(x_TH.to(dtype), weights_TK, ids_TK), given, config)
            wanted = (scale or 1.0) * tiny.loops(x_TH.to(dtype), weights_TK, ids_TK)
            assert isinstance(out, StandardCombineInput) and out.hidden_states.dtype is dtype
            assert not count or error(out.hidden_states, wanted) < (CLOSE if dtype is torch.float32 else 2**-8)


@pytest.mark.parametrize("quant", ["", "fp8_channel", "int4_g32_zp"])
def test_every_tensor_of_a_layer_is_read_again_where_it_is_another(quant: str) -> None:
    config, tokens, core = runner_config(), dispatched(*call(hidden=64)), door.core(runner_config(), PLAIN)
    given, other = (hosted(Tiny.drawn(inner=64, hidden=64, biased=True, seed=seed), quant)[0] for seed in (0, 1))
    tokens.hidden_states.requires_grad_()  # of a caller that has not left grad mode
    found = [core.run_from_dispatch(tokens, given, config)[0]]
    for name in [name for name, value in vars(given).items() if isinstance(value, torch.Tensor)]:
        setattr(given, name, getattr(other, name))
        found.append(core.run_from_dispatch(tokens, given, config)[0])
        assert not torch.equal(*found[-2:]), name
    assert torch.equal(found[-1], door.core(config, PLAIN).run_from_dispatch(tokens, other, config)[0])


def test_it_takes_the_place_of_the_triton_runner_and_is_called_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, hooks, applied = dict[str, Any](), dict[str, Any](), list[set[str]]()

    class Backend:
        def __init__(self, value: str) -> None:
            self.value = value

    def enter(name: str, core_of: Any) -> None:
        if name in cores:
            raise ValueError(name)
        cores[name] = core_of

    registry = SimpleNamespace(
        register=lambda target, hook, kind: hooks.update({target: (hook, kind)}),
        apply_hooks=lambda: applied.append({*hooks}),
    )
    put_in(monkeypatch, {
        **SGLANG,
        "sglang.srt.layers.moe.moe_runner.runner": {"register_moe_runner_core": enter},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": SimpleNamespace(AROUND="around")},
        "sglang.srt.layers.moe.utils": {"RegisteredMoeRunnerBackend": Backend},
        "sglang.srt.utils": {"use_intel_amx_backend": lambda layer: layer.amx},
    })  # fmt: skip
    assert door.register(release_weights=True, experts="reference") and not door.register()
    assert applied == [{door.RUNNER, door.UNQUANTISED}] and {kind for _, kind in hooks.values()} == {"around"}
    runner, unquantised = hooks[door.RUNNER][0], hooks[door.UNQUANTISED][0]
    made: list[Any] = []
    for stated in ("triton", "deep_gemm"):
        runner(lambda *args, **named: made.append((*args, named)), "self", Backend(stated), "config", lora_enabled=1)
        owner, backend, *rest = made[-1]
        assert (owner, rest) == ("self", ["config", {"lora_enabled": 1}])
        assert hasattr(backend, "is_triton") == (stated == "triton") and backend.value in ("moe_mk", "deep_gemm")
    assert made[0][1].is_triton() and made[0][1].value == "moe_mk"
    core = cores["moe_mk"](config := runner_config(runner_backend=made[0][1]))
    assert core.runner_backend is made[0][1] and core._held.release
    core.run_from_dispatch(dispatched(*call()), quant_info(Tiny.drawn()), config)
    assert [experts.backend for _, experts, _ in core._held._held.values()] == ["reference"]
    method = SimpleNamespace(runner=SimpleNamespace(run=lambda *given: given), get_triton_quant_info=lambda of: of.amx)
    for is_cpu, amx in product((True, False), (True, False)):
        tokens, layer = SimpleNamespace(hidden_states=SimpleNamespace(is_cpu=is_cpu)), SimpleNamespace(amx=amx)
        got = unquantised(lambda *given, **named: (*given, named), method, layer, tokens)
        theirs = (method, {"layer": layer, "dispatch_output": tokens})
        assert got == ((tokens, amx) if is_cpu and not amx else theirs)


@NEEDS_COMPILER
def test_released_weights_are_freed_once_they_are_converted() -> None:
    config, layers = runner_config(), [Tiny.drawn(seed=seed) for seed in (0, 1)]
    core, (x_TH, weights_TK, ids_TK) = door.core(config, {"experts": "cpu_native"}, release_weights=True), call()
    given = [quant_info(Tiny(tiny.w13.bfloat16(), tiny.w2.bfloat16())) for tiny in layers]
    tokens = dispatched(x_TH.bfloat16(), weights_TK, ids_TK)
    first = [core.run_from_dispatch(tokens, each, config).hidden_states for each in given]
    assert [
        each.w13_weight.untyped_storage().nbytes() + each.w2_weight.untyped_storage().nbytes() for each in given
    ] == [0, 0]
    assert all(
        error(y_TH, tiny.loops(x_TH, weights_TK, ids_TK)) < 0.02 for y_TH, tiny in zip(first, layers, strict=True)
    )
    again = [core.run_from_dispatch(tokens, each, config).hidden_states for each in given]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_what_nothing_here_computes_is_refused_with_every_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"no_combine=True(.|\n)*swiglu_limit=7.0"):
        door.core(runner_config(no_combine=True, swiglu_limit=7.0), {})
    with pytest.raises(UnsupportedError, match="without a gate and activation 'gelu'"):
        door.core(runner_config(is_gated=False, activation="gelu"), {})
    with pytest.raises(UnsupportedError, match="a_new_law=3, which is not known"):
        door.core(runner_config(a_new_law=3), {})
    for name in "apply_router_weight_on_input gemm1_alpha gemm1_beta gemm1_clamp_limit silu_mul_keep_fp32".split():
        with pytest.raises(UnsupportedError, match=f"{name}=2.0"):
            door.core(runner_config(**{name: 2.0}), {})
    config, tokens = runner_config(), dispatched(*call())
    core = door.core(config, {})
    with pytest.raises(UnsupportedError, match="use_mxfp8"):
        core.run_from_dispatch(tokens, quant_info(Tiny.drawn(), use_mxfp8=True), config)
    odd = quant_info(Tiny.drawn(), use_int4_w4a16=True, block_shape=[0, 48], w13_zp=None, w2_zp=None)
    with pytest.raises(UnsupportedError, match="groups of 48 columns"):
        core.run_from_dispatch(tokens, odd, config)
    for name in ("hidden_states_scale", "hidden_states_pre_quant"):
        rounded = SimpleNamespace(**vars(tokens), **{name: torch.ones(1)})
        with pytest.raises(UnsupportedError, match=f"quantised before dispatch .{name}."):
            core.run_from_dispatch(rounded, quant_info(Tiny.drawn()), config)
    with pytest.raises(UnsupportedError, match="LoRA"):
        core.run_from_dispatch(tokens, quant_info(Tiny.drawn()), config, hooks=object())


def run_host(plugins: str) -> subprocess.CompletedProcess[str]:
    if not INSTALLED:
        pytest.skip("SGLang is not installed here; `make engines` installs its wheel and runs this")
    environment = os.environ | {"SGLANG_PLUGINS": plugins}
    return subprocess.run([sys.executable, str(HOST)], env=environment, capture_output=True, text=True, timeout=115)


@pytest.mark.external
@pytest.mark.stress
def test_layers_of_the_wheel_compute_what_loops_do() -> None:
    done = run_host("moe_mk")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert len(facts["errors"]) == 11 and max(facts["errors"].values()) < 0.02
    assert set(facts["settings"]) == {*door.READ, *door.HARMLESS, *door.REFUSED}
    assert "swiglu_limit=7.0" in facts["refused"] and facts["recorded"]


@pytest.mark.external
@pytest.mark.stress
def test_the_wheel_keeps_its_own_runner_where_the_plugin_is_not_named() -> None:
    done = run_host("another")
    assert done.returncode != 0 and "MoeMkRunnerCore" in done.stderr, done.stderr[-2000:]
