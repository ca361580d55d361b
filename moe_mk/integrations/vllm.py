"""vLLM: computes the unquantised experts of its models.

    VLLM_PLUGINS=moe_mk vllm serve MODEL --additional-config '{"moe_mk": {"experts": "cpu_native"}}'

vLLM loads every installed plugin in each of its processes. This one is inactive unless `VLLM_PLUGINS` lists it; vLLM
reads that variable and passes it to its workers. `enable()` does the same from a program. vLLM still routes, gathers
tokens, adds shared experts and sums over ranks. Read and run with vLLM 0.32 for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.integrations.engine_experts import LORA, EngineExperts, EngineWeights
from moe_mk.weights.loader import LayerLoader

NAME = "moe_mk"
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu2_no_mul": "relu2"}
"""Activations: names of vLLM's MoEActivation, and of moe_mk."""


RELEASE = "release_weights"
"""A key next to the kernel settings: whether vLLM's weights are freed where the backend keeps a copy in its own layout.
vLLM can then not update them."""


def register() -> bool:
    """The entry point in `vllm.general_plugins`: calls `enable()` if `VLLM_PLUGINS` lists this plugin. Idempotent."""
    from vllm import envs

    return NAME in (envs.VLLM_PLUGINS or ()) and enable()


def enable() -> bool:
    """Replace vLLM's unquantised MoE method in models built from now on; False if already done.

    Raises ConfigError if another plugin has replaced it.
    """
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    taken = op_registry_oot.get(UnquantizedFusedMoEMethod.__name__)
    if taken is None:
        UnquantizedFusedMoEMethod.register_oot(method_over(UnquantizedFusedMoEMethod))
        return True
    if getattr(taken, "of_moe_mk", False):
        return False
    raise ConfigError(
        f"vLLM's unquantised MoE method is replaced by {taken.__module__}.{taken.__qualname__} already; "
        f"name one of the two plugins in VLLM_PLUGINS"
    )


def method_over(base: Any) -> type:
    """The class that vLLM instantiates instead of `base`; a subclass, because `__init__` of others is skipped."""

    class MoeMkMethod(base):  # type: ignore[misc]
        """Experts by the backend that the oracle selects; parameters keep vLLM's names and layout."""

        of_moe_mk = True

        def __init__(self, moe: Any) -> None:
            refuse(moe)
            super().__init__(moe)
            self.experts_here: EngineExperts | None = None
            self.settings = dict(_settings())
            self.releases = bool(self.settings.pop(RELEASE, False))

        @property
        def is_monolithic(self) -> bool:  # vLLM routes
            return False

        @property
        def supports_eplb(self) -> bool:  # it would exchange weights without updating the converted copy
            return False

        def maybe_roundup_sizes(
            self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
        ) -> tuple[int, int]:
            return hidden_size, intermediate_size_per_partition

        def process_weights_after_loading(self, layer: Any) -> None:
            if layer.apply_router_weight_on_input:
                raise UnsupportedError(f"moe_mk in {layer.layer_name}", ["routing weights are applied to its input"])
            weights = EngineWeights(layer.w13_weight, layer.w2_weight, ACTIVATIONS[layer.activation.value])
            if not self.moe.is_act_and_mul:
                weights = EngineWeights(weights.w13, weights.w2, weights.activation, gated=False)
            top_k = self.moe.experts_per_token
            self.experts_here = EngineExperts(
                layer.layer_name, weights, top_k=top_k, settings=self.settings, release=self.releases
            )

        def apply(
            self,
            layer: Any,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            shared_experts: Any,
            shared_experts_input: Tensor | None,
        ) -> Tensor:
            del shared_experts, shared_experts_input  # vLLM runs them itself for methods without a modular kernel
            assert self.experts_here is not None, "weights are processed after loading"
            return self.experts_here(x, topk_weights, local_ids(topk_ids, layer.expert_map))

    return MoeMkMethod


def weight_loader(loader: LayerLoader) -> Callable[..., bool]:
    """The `weight_loader` of parameters that stand for the experts of a `MoELayer` in a model of vLLM.

    Called as vLLM's models call it: (param, loaded_weight, weight_name, shard_id, expert_id, return_success=False).
    The parameter is not read. Returns whether this rank keeps any of the tensor. Call `loader.finish()` after all.
    """

    def load(
        param: object,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        del param, return_success
        return loader.feed_shard(loaded_weight, expert_id=expert_id, shard_id=shard_id, kind=kind_of(weight_name))

    return load


def kind_of(weight_name: str) -> str:
    """The kind of `LayerLoader.feed_shard` for the last part of a parameter's name, such as w13_weight_scale_inv."""
    last = weight_name.rpartition(".")[2]
    endings = {
        "weight_scale_2": "global_scale",
        "input_scale": "input_scale",
        "scale": "scale",
        "scale_inv": "scale",
        "bias": "bias",
    }
    return next((kind for ending, kind in endings.items() if last.endswith(ending)), "weight")


def local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Ids of this rank's experts, -1 elsewhere. expert_map: (E) of vLLM, local id or -1; None on one rank."""
    if expert_map is None:
        return topk_ids
    known = topk_ids.clamp(0, expert_map.shape[0] - 1).long()
    return torch.where((topk_ids >= 0) & (topk_ids < expert_map.shape[0]), expert_map[known].to(topk_ids.dtype), -1)


def refuse(moe: Any) -> None:
    """Raise UnsupportedError with all unsupported features of a vLLM FusedMoEConfig."""
    parallel, reasons = moe.moe_parallel_config, []
    if moe.activation.value not in ACTIVATIONS:
        reasons.append(f"activation {moe.activation.value!r}; known: {', '.join(ACTIVATIONS)}")
    if moe.has_bias:
        reasons.append("experts with biases")
    if moe.is_lora_enabled:
        reasons.append(LORA)
    if moe.swiglu_limit is not None:
        reasons.append(f"swiglu_limit={moe.swiglu_limit}")
    if parallel.dp_size > 1:
        reasons.append(f"data parallel size {parallel.dp_size}: vLLM's all-to-all backends need its own experts")
    if reasons:
        raise UnsupportedError(
            "moe_mk does not support this model in vLLM", [*reasons, "leave moe_mk out of VLLM_PLUGINS"]
        )


def _settings() -> Mapping[str, Any]:
    """The kernel settings in vLLM's `--additional-config`."""
    from vllm.config import get_current_vllm_config

    stated = (get_current_vllm_config().additional_config or {}).get(NAME, {})
    if not isinstance(stated, dict):
        raise ConfigError(f"additional_config[{NAME!r}] is {stated!r}, expected a table of kernel settings")
    return stated
