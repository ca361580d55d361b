"""What the adapters touch of four engines, no more: the same modules, names, signatures and rules of registration.

Signatures are those in seams.json, which was written from the engines themselves.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn


def put_in(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, object]]) -> None:
    """Modules for one test, parents included."""
    for name in modules:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in modules or end == len(parts):
                module = ModuleType(path)
                vars(module).update(modules.get(path, {}))
                monkeypatch.setitem(sys.modules, path, module)


# vLLM 0.32.


class Activation(Enum):
    SILU = "silu"
    RELU2_NO_MUL = "relu2_no_mul"
    SITU = "situ"


def moe_config(**changes: Any) -> SimpleNamespace:
    facts = {
        "activation": Activation.SILU,
        "has_bias": False,
        "is_lora_enabled": False,
        "swiglu_limit": None,
        "is_act_and_mul": True,
        "experts_per_token": 2,
        "moe_parallel_config": SimpleNamespace(dp_size=1),
    }
    return SimpleNamespace(**(facts | changes))


class Vllm:
    """One process of vLLM: its registry, its method, what VLLM_PLUGINS and --additional-config say."""

    def __init__(self, plugins: list[str] | None, additional_config: dict[str, Any] | None = None) -> None:
        self.registry: dict[str, type] = {}
        registry = self.registry

        class UnquantizedFusedMoEMethod:
            def __new__(cls, *args: object, **kwargs: object) -> Any:
                return super().__new__(registry.get(cls.__name__, cls))

            def __init__(self, moe: Any) -> None:
                self.moe = moe

            @classmethod
            def register_oot(cls, _decorated_op_cls: type, name: str | None = None) -> type:
                assert cls.__name__ not in registry, f"Duplicate op name: {cls.__name__}"
                registry[cls.__name__] = _decorated_op_cls
                return _decorated_op_cls

            @property
            def is_monolithic(self) -> bool:
                return True

            @property
            def supports_eplb(self) -> bool:
                return True

            def process_weights_after_loading(self, layer: Any) -> None:
                raise NotImplementedError("vLLM's own layout")

            def apply(
                self,
                layer: Any,
                x: Tensor,
                topk_weights: Tensor,
                topk_ids: Tensor,
                shared_experts: Any,
                shared_experts_input: Tensor | None,
            ) -> Tensor:
                raise NotImplementedError("vLLM's own kernel")

        self.method = UnquantizedFusedMoEMethod
        self.modules: dict[str, dict[str, object]] = {
            "vllm": {"envs": SimpleNamespace(VLLM_PLUGINS=plugins)},
            "vllm.config": {"get_current_vllm_config": lambda: SimpleNamespace(additional_config=additional_config)},
            "vllm.model_executor.custom_op": {"op_registry_oot": registry},
            "vllm.model_executor.layers.fused_moe": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        }


# SGLang 0.5.23.


class DispatchMoeRunnerCore(ABC):
    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    @abstractmethod
    def runner_backend(self) -> Any: ...

    @abstractmethod
    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
    ) -> Any: ...


class StandardCombineInput(NamedTuple):
    hidden_states: Tensor


SGLANG: dict[str, dict[str, object]] = {
    "sglang.srt.layers.moe.moe_runner.base": {"DispatchMoeRunnerCore": DispatchMoeRunnerCore},
    "sglang.srt.layers.moe.token_dispatcher": {"StandardCombineInput": StandardCombineInput},
}
"""What a core needs; sglang_host.py has the rest from the wheel."""


# mini-sglang.


class Registry:
    """Names to makers, entered by a decorator."""

    def __init__(self) -> None:
        self.made: dict[str, Callable[[], Any]] = {}

    def register(self, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        assert name not in self.made

        def enter(maker: Callable[[], Any]) -> Callable[[], Any]:
            self.made[name] = maker
            return maker

        return enter

    def supported_names(self) -> list[str]:
        return list(self.made)


# torchtitan 0.3.


class GroupedExperts(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = (config.num_experts, config.hidden_dim, config.dim)
        self.w1_EFD = nn.Parameter(torch.empty(shape))
        self.w2_EDF = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))
        self.w3_EFD = nn.Parameter(torch.empty(shape))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        raise NotImplementedError("torchtitan's own grouped GEMM")


def torchtitan(overrides: dict[str, Any]) -> dict[str, dict[str, object]]:
    def override(
        *, target: type, fqns: list[str] | None = None, description: str = "", exact: bool = False
    ) -> Callable[[Any], Any]:
        def enter(factory: Any) -> Any:
            overrides[f"{factory.__module__}.{factory.__name__}"] = (target, exact, factory)
            return factory

        return enter

    return {
        "torchtitan.config": {"override": override},
        "torchtitan.models.common.moe": {"GroupedExperts": GroupedExperts},
    }
