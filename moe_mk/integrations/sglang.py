"""SGLang: `--moe-runner-backend moe_mk`, by the entry point in `sglang.srt.plugins`.

The runner core has the inputs of SGLang's standard dispatcher and the outputs of its combine: routed experts of one
rank, unquantised, FP8 or INT8. Read at SGLang 0.5.23; its contract is tested against a stand-in, not on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.engine_experts import LORA, EngineExperts, EngineWeights, HeldExperts

NAME = "moe_mk"
REFUSED = ("use_mxfp8", "use_int8_w8a16", "use_int4_w4a16", "fuse_swiglu_interleaved")
"""Flags of its quant info for weights in layouts that are not read."""
STATIC = ("a13_scale", "a2_scale", "w13_zp", "w2_zp")
"""Tensors of its quant info that are not read: scales of activations, and zero points."""
UNWANTED = ("apply_router_weight_on_input", "no_combine", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")
"""Unsupported settings of its runner config."""


def register(*, release_weights: bool = False, **settings: Any) -> bool:
    """Register the runner core under its name; False if it exists. It is used only when selected.

    release_weights: free SGLang's weights where the backend keeps a copy in its own layout. SGLang can then not update
    them.
    settings: of MoEConfig.kernel by key, if a program calls this before SGLang's entry point.
    """
    from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    try:
        resolve_moe_runner_backend(NAME)
    except ValueError:
        register_moe_runner_core(NAME, partial(core, settings=settings, release_weights=release_weights))
        return True
    return False


def core(config: Any, settings: Mapping[str, Any], *, release_weights: bool = False) -> Any:
    """A runner core for one layer, a subclass of SGLang's; raises UnsupportedError for unsupported features."""
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    refuse(config)

    class MoeMkRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
        """Routed experts by the backend that the oracle selects."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._held = HeldExperts(release=release_weights)

        @property
        def runner_backend(self) -> Any:
            return resolve_moe_runner_backend(NAME)

        def run_from_dispatch(
            self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
        ) -> Any:
            if hooks is not None:
                raise UnsupportedError("moe_mk in SGLang", [LORA])
            return combined(self._held, (dispatch_output, quant_info, runner_config), settings)

    return MoeMkRunnerCore(config)


@torch.no_grad()
def combined(held: HeldExperts, call: tuple[Any, Any, Any], settings: Mapping[str, Any]) -> Any:
    """One call (StandardDispatchOutput, quant info, MoeRunnerConfig) of SGLang to its StandardCombineInput."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    dispatch_output, quant_info, config = call
    topk, x_TH = dispatch_output.topk_output, dispatch_output.hidden_states
    weights = weights_of(quant_info, config, x_TH.dtype)
    top_k = topk.topk_ids.shape[1]
    experts = held.of(
        weights.tensors,
        lambda: EngineExperts("SGLang", weights, top_k=top_k, settings=settings, release=held.release),
    )
    # Not None where the router has not scaled yet: SGLang's own runners multiply the sum by it.
    scale = config.routed_scaling_factor
    weights_TK = topk.topk_weights if scale is None else topk.topk_weights * scale
    return StandardCombineInput(experts(x_TH, weights_TK, topk.topk_ids))


def refuse(config: Any) -> None:
    """Raise UnsupportedError with everything in a MoeRunnerConfig that nothing here computes."""
    reasons = [f"{name}={getattr(config, name)}" for name in UNWANTED if getattr(config, name, None)]
    if not config.is_gated and config.activation != "relu2":
        reasons.append(f"experts without a gate and activation {config.activation!r}")
    if reasons:
        raise UnsupportedError("moe_mk cannot serve this model in SGLang", reasons)


def weights_of(quant_info: Any, config: Any, dtype: torch.dtype) -> EngineWeights:
    """The weights of a layer: unquantised, FP8 or INT8, with biases. dtype: of tokens.

    Raises UnsupportedError with every other format that is stated.
    """
    reasons = [name for name in REFUSED if getattr(quant_info, name, False)]
    reasons += [name for name in STATIC if getattr(quant_info, name, None) is not None]
    if reasons:
        raise UnsupportedError("moe_mk serves SGLang's unquantised, FP8 and INT8 experts", reasons)
    block, quant = getattr(quant_info, "block_shape", None), ""
    per_channel = bool(getattr(quant_info, "per_channel_quant", False))
    if getattr(quant_info, "use_fp8_w8a8", False):
        quant = "fp8_block" if block else "fp8_channel" if per_channel else "fp8_tensor"
    elif getattr(quant_info, "use_int8_w8a8", False):
        quant = "int8_block" if block else "int8"
    return EngineWeights(
        quant_info.w13_weight,
        quant_info.w2_weight,
        config.activation if config.is_gated else "relu2",
        config.is_gated,
        quant=quant,
        block=tuple(block) if block else (128, 128),
        w13_scale=quant_info.w13_scale if quant else None,
        w2_scale=quant_info.w2_scale if quant else None,
        w13_bias=quant_info.b13,
        w2_bias=quant_info.b2,
        dtype=dtype if quant else None,
    )
