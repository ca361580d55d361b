"""What the adapters touch of four engines, no more: the same modules, names, signatures and rules of registration.
Signatures are those in seams.json, which was written from the engines themselves."""

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

from moe_mk.integrations.vllm import CONFIGS, MOE, PLUGGABLE
from moe_mk.integrations.vllm_formats import FORMATS, QUANTIZATION
from moe_mk.integrations.vllm_linear import DISPATCH, KINDS, REQUANTISE, REQUANTISING, UTILS


def put_in(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, object]]) -> None:
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
    SWIGLUOAI = "swigluoai"
    SITU = "situ"


def moe_config(**changes: Any) -> SimpleNamespace:
    parallel = SimpleNamespace(dp_size=1, ep_size=1, use_ep=False, tp_rank=0, enable_eplb=False)
    facts = {
        "num_experts": 5,
        "max_num_tokens": 64,
        "activation": Activation.SILU,
        "has_bias": False,
        "is_lora_enabled": False,
        "is_act_and_mul": True,
        "experts_per_token": 2,
        "in_dtype": torch.float32,
        "moe_parallel_config": parallel,
    }
    return SimpleNamespace(**(facts | changes))


class FusedMoEMethodBase:
    def __init__(self, moe: Any) -> None:
        self.moe = moe

    def uses_weight_scale_2_pattern(self) -> bool:
        return False

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

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


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    pass


class QuarkMoEMethod(FusedMoEMethodBase):
    pass


class LinearKernel:
    def __init__(self, config: Any, *names: str) -> None:
        self.config = config
        self.w_q_name, self.w_s_name, self.w_zp_name = names or (None,) * 3


class Vllm:
    """One process of vLLM: its registries, its layer, its VLLM_PLUGINS and --additional-config."""

    def __init__(
        self, plugins: list[str] | None, additional_config: dict[str, Any] | None = None, version: str = "0.32.0+cpu"
    ) -> None:
        self.registry: dict[str, type] = {}
        self.logged: list[str] = []
        registry = self.registry

        class RoutedExperts(nn.Module):
            def __new__(cls, *args: object, **kwargs: object) -> Any:
                return super().__new__(registry.get(cls.__name__, cls))

            def __init__(self, method: Callable[[Any], Any], moe: Any, **facts: Any) -> None:
                super().__init__()
                vars(self).update({"layer_name": "layers.1", "expert_map": None, "apply_router_weight_on_input": False})
                vars(self).update({"swiglu_limit": None, "swiglu_alpha": None, "swiglu_beta": None} | facts)
                self.quant_method = self._get_quant_method("layers.1", method, moe)

            @classmethod
            def register_oot(cls, _decorated_layer_cls: type | None = None, name: str | None = None) -> Any:
                def register(made: type) -> type:
                    assert name not in registry, f"Duplicate layer name: {name}"
                    registry[str(name)] = made
                    return made

                return register if _decorated_layer_cls is None else register(_decorated_layer_cls)

            def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
                return quant_config(moe_config)

            def weight_loader(self, param: Tensor, loaded_weight: Tensor, *args: Any) -> bool:
                param.data.copy_(loaded_weight)
                return True

        self.layer = RoutedExperts
        self.kernels: dict[str, list[type]] = {"fp8": [type("CPUFp8", (), {}), type("PerTensorTorchFP8", (), {})]}
        self.kernels |= {kind: [type("CPU" + kind.title(), (), {})] for kind in ("mp", "int8")}
        blocks: list[type] = []

        def register_linear_kernel(kernel_class: type, platform: str, kernel_type: str = "mp") -> None:
            self.kernels.setdefault(kernel_type, []).append(kernel_class)

        kinds = [base for base, _, _ in KINDS.values()]
        self.modules: dict[str, dict[str, object]] = {
            "vllm": {
                "envs": SimpleNamespace(VLLM_PLUGINS=plugins, VLLM_DISABLED_KERNELS=[]),
                "__version__": version,
            },
            "vllm.config": {"get_current_vllm_config": lambda: SimpleNamespace(additional_config=additional_config)},
            "vllm.logger": {"init_logger": lambda name: SimpleNamespace(info_once=self._log, warning_once=self._log)},
            "vllm.platforms": {"PlatformEnum": SimpleNamespace(CPU="cpu")},
            "vllm.model_executor.custom_op": {"op_registry_oot": registry},
            MOE: {"FusedMoEMethodBase": FusedMoEMethodBase, "RoutedExperts": RoutedExperts},
            f"{MOE}.config": {name: SimpleNamespace(**dict.fromkeys(names)) for name, names in CONFIGS.items()},
            UTILS: {DISPATCH: lambda layer, remove_weight: layer.left.append(remove_weight)},
            "vllm.model_executor.kernels.linear": {
                **{name: type(name, (LinearKernel,), {}) for name in kinds},
                "register_linear_kernel": register_linear_kernel,
                "_POSSIBLE_FP8_KERNELS": {"cpu": self.kernels["fp8"]},
                "_POSSIBLE_INT8_KERNELS": {"cpu": self.kernels["int8"]},
                "_POSSIBLE_KERNELS": {"cpu": self.kernels["mp"]},
                "_POSSIBLE_FP8_BLOCK_KERNELS": {"cpu": blocks},
            },
        }
        for module, name in PLUGGABLE:
            self.modules[module] = {
                name: RoutedExperts if name == "RoutedExperts" else type(name, (RoutedExperts,), {})
            }
        for requantising in REQUANTISING:
            self.modules.setdefault(f"{QUANTIZATION}.{requantising}", {})[REQUANTISE] = _no_kernel
        for each in FORMATS.values():
            if each.selects:
                found = self.modules.setdefault(each.module, {})
                found[each.selects] = _no_kernel
                if each.backend:
                    found[each.backend.split(".")[0]] = SimpleNamespace(MARLIN="marlin")

    def _log(self, message: str, *args: str) -> None:
        self.logged.append(message % args)


def _no_kernel(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("requires AMX tile support")


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
