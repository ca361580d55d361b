"""SGLang: in the place of its Triton runner, by the entry point in `sglang.srt.plugins`.

SGLang 0.5.23 parses `--moe-runner-backend` before it loads plugins, and its methods for weights choose among built-in
runners, most of them "triton". In processes whose SGLANG_PLUGINS names moe_mk, a runner that is made for "triton" gets
the core of this library, by SGLang's hooks. Its inputs are those of SGLang's standard dispatcher, its outputs those of
the combine: routed experts of one rank, unquantised, FP8, INT8 and INT4. On a CPU, where SGLang's unquantised method
calls no runner, it calls this one. Tested with the modules of the wheel on a CPU, not on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.integrations import looked_up
from moe_mk.integrations.engine_experts import LORA, EngineExperts, EngineWeights, HeldExperts
from moe_mk.quant.grouped import GROUPED

NAME = "moe_mk"
REPLACED = "triton"
"""The built-in runner whose place the core takes."""
RUNNER = "sglang.srt.layers.moe.moe_runner.runner.MoeRunner.__init__"
UNQUANTISED = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.apply"
"""What is hooked: a runner gets another backend, and on a CPU SGLang's unquantised method calls its runner."""
REFUSED = (
    "apply_router_weight_on_input", "no_combine", "no_combine_keep_router_weight", "gemm1_alpha", "gemm1_beta",
    "gemm1_clamp_limit", "swiglu_limit", "silu_mul_keep_fp32",
)  # fmt: skip
"""Settings of its runner config that change the result and are not supported."""
READ = ("activation", "is_gated", "routed_scaling_factor")
HARMLESS = (
    "num_experts", "num_local_experts", "hidden_size", "intermediate_size_per_partition", "layer_id", "top_k",
    "num_fused_shared_experts", "params_dtype", "routing_method_type", "runner_backend", "inplace", "layer",
    "gate_up_interleaved", "use_tp_all_gather_activation",
)  # fmt: skip
"""Settings that state sizes, or what other runners do; gate_up_interleaved belongs to gemm1_alpha."""
ROUNDED = ("hidden_states_scale", "hidden_states_pre_quant")
"""Parts of a dispatch output that state tokens in another format."""


CALLED = (
    (RUNNER.rsplit(".", 2)[0], "register_moe_runner_core"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.register"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.apply_hooks"),
    ("sglang.srt.plugins.hook_registry", "HookType.AROUND"),
    ("sglang.srt.layers.moe.moe_runner.base", "DispatchMoeRunnerCore.run_from_dispatch"),
    ("sglang.srt.layers.moe.utils", "RegisteredMoeRunnerBackend"),
    ("sglang.srt.layers.moe.token_dispatcher", "StandardCombineInput"),
    ("sglang.srt.utils", "use_intel_amx_backend"),
)
"""Modules and names of SGLang that are used here, in addition to what is hooked."""


def plugin() -> bool:
    """Register if SGLANG_PLUGINS names moe_mk; False otherwise. SGLang calls it in each of its processes.

    False also, with a warning, if this version of SGLang lacks something that is used here: its own experts run.
    """
    from sglang.srt.environ import envs

    named = envs.SGLANG_PLUGINS.get() or ""
    if NAME not in (name.strip() for name in named.split(",")):
        return False
    hooked = [(module, f"{owner}.{name}") for module, owner, name in (t.rsplit(".", 2) for t in (RUNNER, UNQUANTISED))]
    missing = [f"{module}.{name}" for module, name in (*CALLED, *hooked) if looked_up(module, *name.split(".")) is None]
    if missing:
        getLogger(__name__).warning("moe_mk: SGLang's own experts run, since it has no %s", ", ".join(missing))
        return False
    return register()


def register(*, release_weights: bool = False, **settings: Any) -> bool:
    """Take the place of the Triton runner in layers that are built afterwards; False if that was done before.

    release_weights: free SGLang's weights where the backend keeps a copy in its own layout. SGLang can then not update
    them.
    settings: of MoEConfig.kernel by key, if a program calls this before SGLang's entry point.
    """
    from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        register_moe_runner_core(NAME, partial(core, settings=settings, release_weights=release_weights))
    except ValueError:
        return False
    HookRegistry.register(RUNNER, make_runner, HookType.AROUND)
    HookRegistry.register(UNQUANTISED, apply_unquantised, HookType.AROUND)
    HookRegistry.apply_hooks()
    return True


def core(config: Any, settings: Mapping[str, Any], *, release_weights: bool = False) -> Any:
    """A runner core for one layer, a subclass of SGLang's; raises UnsupportedError for unsupported features."""
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore

    refuse(config)

    class MoeMkRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
        """Routed experts by the backend that the oracle selects."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._held = HeldExperts(release=release_weights)

        @property
        def runner_backend(self) -> Any:
            return config.runner_backend

        def run_from_dispatch(
            self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
        ) -> Any:
            if hooks is not None:
                raise UnsupportedError("moe_mk in SGLang", [LORA])
            return combined(self._held, (dispatch_output, quant_info, runner_config), settings)

    return MoeMkRunnerCore(config)


def make_runner(own: Callable[..., Any], runner: Any, runner_backend: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's MoeRunner(runner_backend, config), with our backend instead of the Triton one.

    `is_triton` of it is true: SGLang's methods then pass the weights as to that runner.
    """
    from sglang.srt.layers.moe.utils import RegisteredMoeRunnerBackend

    class InPlaceOfTriton(RegisteredMoeRunnerBackend):  # type: ignore[misc]
        def is_triton(self) -> bool:
            return True

    own(runner, InPlaceOfTriton(NAME) if runner_backend.value == REPLACED else runner_backend, *args, **kwargs)


def apply_unquantised(own: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """SGLang's unquantised method: on a CPU its runner, unless it has packed the weights for its AMX kernels."""
    from sglang.srt.utils import use_intel_amx_backend

    if dispatch_output.hidden_states.is_cpu and not use_intel_amx_backend(layer):
        return method.runner.run(dispatch_output, method.get_triton_quant_info(layer))
    return own(method, layer=layer, dispatch_output=dispatch_output)


@torch.no_grad()
def combined(held: HeldExperts, call: tuple[Any, Any, Any], settings: Mapping[str, Any]) -> Any:
    """One call (StandardDispatchOutput, quant info, MoeRunnerConfig) of SGLang to its StandardCombineInput."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    dispatch_output, quant_info, config = call
    if rounded := [name for name in ROUNDED if getattr(dispatch_output, name, None) is not None]:
        raise UnsupportedError(
            "moe_mk in SGLang", [f"tokens that were quantised before dispatch ({', '.join(rounded)})"]
        )
    topk, x_TH = dispatch_output.topk_output, dispatch_output.hidden_states
    top_k = topk.topk_ids.shape[1]
    experts = held.of(
        stated(quant_info),
        lambda: EngineExperts(
            "SGLang", weights_of(quant_info, config, x_TH.dtype), top_k=top_k, settings=settings, release=held.release
        ),
    )
    # Not None where the router has not scaled yet: SGLang's own runners multiply the sum by it.
    scale = config.routed_scaling_factor
    weights_TK = topk.topk_weights if scale is None else topk.topk_weights * scale
    return StandardCombineInput(experts(x_TH, weights_TK, topk.topk_ids))


def refuse(config: Any) -> None:
    """Raise UnsupportedError with everything in a MoeRunnerConfig that nothing here computes."""
    reasons = [f"{name}={getattr(config, name)}" for name in REFUSED if getattr(config, name, None)]
    if not config.is_gated and config.activation != "relu2":
        reasons.append(f"experts without a gate and activation {config.activation!r}")
    unknown = vars(config).keys() - {*READ, *HARMLESS, *REFUSED}
    reasons += [f"{name}={vars(config)[name]}, which is not known" for name in sorted(unknown) if vars(config)[name]]
    if reasons:
        raise UnsupportedError("moe_mk cannot serve this model in SGLang", reasons)


def stated(quant_info: Any) -> tuple[Tensor, ...]:
    """The tensors of a quant info that are read, values first."""
    names = ("w13_weight", "w2_weight", "w13_scale", "w2_scale", "w13_zp", "w2_zp", "b13", "b2")
    return tuple(tensor for name in names if (tensor := getattr(quant_info, name, None)) is not None)


def weights_of(quant_info: Any, config: Any, dtype: torch.dtype) -> EngineWeights:
    """The weights of a layer, with biases. dtype: of tokens.

    Calibrated scales of activations are not applied: tokens are not rounded by them. Raises UnsupportedError for
    MXFP8 and for groups of other widths than 32, 64 and 128.
    """
    if getattr(quant_info, "use_mxfp8", False):
        raise UnsupportedError("moe_mk serves SGLang's unquantised, FP8, INT8 and INT4 experts", ["use_mxfp8"])
    block: Any = getattr(quant_info, "block_shape", None)
    quant = ""
    per_channel = bool(getattr(quant_info, "per_channel_quant", False))
    zeros: tuple[Tensor | None, Tensor | None] = (None, None)
    if getattr(quant_info, "use_fp8_w8a8", False):
        quant = "fp8_block" if block else "fp8_channel" if per_channel else "fp8_tensor"
    elif getattr(quant_info, "use_int8_w8a8", False):
        quant = "int8_block" if block else "int8"
    elif bits := 4 * quant_info.use_int4_w4a16 + 8 * quant_info.use_int8_w8a16:
        zeros = _unpacked(quant_info.w13_zp, bits), _unpacked(quant_info.w2_zp, bits)
        quant = f"int{bits}_g{block[1]}" + ("" if zeros[0] is None else "_zp")
        if quant not in GROUPED:
            raise UnsupportedError(
                "moe_mk in SGLang", [f"integers in groups of {block[1]} columns; 32, 64 and 128 exist"]
            )
    return EngineWeights(
        quant_info.w13_weight,
        quant_info.w2_weight,
        config.activation if config.is_gated else "relu2",
        config.is_gated,
        order="interleaved" if quant_info.fuse_swiglu_interleaved else "gate_up",
        quant=quant,
        block=tuple(block) if quant.endswith("_block") else (128, 128),
        w13_scale=quant_info.w13_scale if quant else None,
        w2_scale=quant_info.w2_scale if quant else None,
        w13_zeros=zeros[0],
        w2_zeros=zeros[1],
        w13_bias=quant_info.b13,
        w2_bias=quant_info.b2,
        dtype=dtype if quant else None,
    )


def _unpacked(zeros: Tensor | None, bits: int) -> Tensor | None:
    """Zero points (L, rows, groups), one a byte: those of four bits lie two in a byte along the rows."""
    if zeros is None or bits == 8:
        return zeros
    return torch.stack((zeros & 15, zeros >> 4), dim=2).flatten(1, 2)
