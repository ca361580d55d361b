"""SGLang: `--moe-runner-backend moe_mk`, by the entry point in `sglang.srt.plugins`.

The runner core has the inputs of SGLang's standard dispatcher and the outputs of its combine: routed experts
of one rank, unquantised. Read at SGLang 0.5.23; its contract is tested against a stand-in, not on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights, HeldExperts

NAME = "moe_mk"
QUANTISED = (
    "use_mxfp8",
    "use_fp8_w8a8",
    "use_int8_w8a8",
    "use_int8_w8a16",
    "use_int4_w4a16",
    "fuse_swiglu_interleaved",
)
"""Flags of its quant info under which weights are not plain (E, 2I, H) and (E, H, I)."""
UNWANTED = ("apply_router_weight_on_input", "no_combine", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")
"""Unsupported settings of its runner config."""


def register(**settings: Any) -> bool:
    """Register the runner core under its name; False if it exists. It is used only when selected.

    settings: of MoEConfig.kernel by key, if a program calls this before SGLang's entry point.
    """
    from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    try:
        resolve_moe_runner_backend(NAME)
    except ValueError:
        register_moe_runner_core(NAME, partial(core, settings=settings))
        return True
    return False


def core(config: Any, settings: Mapping[str, Any]) -> Any:
    """A runner core for one layer, a subclass of SGLang's; raises UnsupportedError for unsupported features."""
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    refuse(config)

    class MoeMkRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
        """Routed experts by the backend that the oracle selects."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._held = HeldExperts()

        @property
        def runner_backend(self) -> Any:
            return resolve_moe_runner_backend(NAME)

        def run_from_dispatch(
            self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
        ) -> Any:
            if hooks is not None:
                raise UnsupportedError("moe_mk in SGLang", ["LoRA on routed experts"])
            return combined(self._held, (dispatch_output, quant_info, runner_config), settings)

    return MoeMkRunnerCore(config)


@torch.no_grad()
def combined(held: HeldExperts, call: tuple[Any, Any, Any], settings: Mapping[str, Any]) -> Any:
    """One call (StandardDispatchOutput, quant info, MoeRunnerConfig) of SGLang to its StandardCombineInput."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    dispatch_output, quant_info, config = call
    w13, w2, topk = quant_info.w13_weight, quant_info.w2_weight, dispatch_output.topk_output
    weights = EngineWeights(w13, w2, config.activation if config.is_gated else "relu2", config.is_gated)
    refuse_quantised(quant_info)
    experts = held.of(
        (w13, w2), lambda: EngineExperts("SGLang", weights, top_k=topk.topk_ids.shape[1], settings=settings)
    )
    # Not None where the router has not scaled yet: SGLang's own runners multiply the sum by it.
    scale = config.routed_scaling_factor
    weights_TK = topk.topk_weights if scale is None else topk.topk_weights * scale
    return StandardCombineInput(experts(dispatch_output.hidden_states, weights_TK, topk.topk_ids))


def refuse(config: Any) -> None:
    """Raise UnsupportedError with everything in a MoeRunnerConfig that nothing here computes."""
    reasons = [f"{name}={getattr(config, name)}" for name in UNWANTED if getattr(config, name, None)]
    if not config.is_gated and config.activation != "relu2":
        reasons.append(f"experts without a gate and activation {config.activation!r}")
    if reasons:
        raise UnsupportedError("moe_mk cannot serve this model in SGLang", reasons)


def refuse_quantised(quant_info: Any) -> None:
    """Raise UnsupportedError for weights that are quantised, biased or interleaved."""
    reasons = [name for name in QUANTISED if getattr(quant_info, name, False)]
    reasons += [f"a bias ({name})" for name in ("b13", "b2") if getattr(quant_info, name, None) is not None]
    if reasons:
        raise UnsupportedError("moe_mk serves SGLang's unquantised experts", reasons)
