"""vLLM: computes the routed experts of its models, in the formats that vLLM loads.

    VLLM_PLUGINS=moe_mk vllm serve MODEL --additional-config '{"moe_mk": {"experts": "cpu_native"}}'

vLLM loads every installed plugin in each of its processes. This one is inactive unless `VLLM_PLUGINS` lists it; vLLM
reads that variable and passes it to its workers. `enable()` does the same from a program. vLLM still routes, gathers
tokens, adds shared experts and sums over ranks; it also creates and loads all parameters. Run with vLLM 0.32 for CPUs;
the sources of the versions in READ have what is replaced here. In another version the same is looked up when the plugin
is loaded: where it is missing or takes other parameters, one warning states it, and vLLM's own experts run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, reduce
from importlib import import_module
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_mk.comm.groups import ParallelGroups
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.integrations import looked_up
from moe_mk.integrations.engine_experts import LORA, EngineExperts, is_released
from moe_mk.integrations.vllm_formats import ACTIVATIONS, CLAMPED, FORMATS, LAYERS, format_of, weights_of
from moe_mk.integrations.vllm_linear import linear_names, register_kernels
from moe_mk.weights.loader import LayerLoader

NAME = "moe_mk"
READ = ("0.32", "0.33")
"""Versions of vLLM, by minor, whose sources were read."""
MOE = f"{LAYERS}.fused_moe"
PARAMETERS = {
    "RoutedExperts._get_quant_method": ("self", "prefix", "quant_config", "moe_config"),
    "RoutedExperts.register_oot": ("_decorated_layer_cls", "name"),
    "FusedMoEMethodBase.__init__": ("self", "moe"),
    "FusedMoEMethodBase.apply": (
        "self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input",
    ),
    "FusedMoEMethodBase.process_weights_after_loading": ("self", "layer"),
}  # fmt: skip
"""What is replaced or called here, and the parameters with which it was read."""
CONFIGS = {
    "FusedMoEConfig": (
        "activation", "experts_per_token", "has_bias", "in_dtype", "is_act_and_mul", "is_lora_enabled",
        "max_num_tokens", "moe_parallel_config", "num_experts",
    ),
    "FusedMoEParallelConfig": ("dp_size", "enable_eplb", "ep_size", "tp_rank", "use_ep"),
}  # fmt: skip
"""What is read of vLLM's configurations."""
PLUGGABLE = (
    (f"{MOE}.routed_experts", "RoutedExperts"),
    ("vllm.model_executor.models.gpt_oss", "GptOssRoutedExperts"),
    ("vllm.model_executor.models.transformers.moe", "TransformersRoutedExperts"),
)
"""vLLM's layers that hold routed experts."""
RELEASE = "release_weights"
"""A key next to the kernel settings: whether vLLM's weights are freed where the backend keeps a copy in its own layout,
true by default. vLLM can then not update them."""


def register() -> bool:
    """The entry point in `vllm.general_plugins`: calls `enable()` if `VLLM_PLUGINS` lists this plugin. Idempotent."""
    from vllm import envs

    return NAME in (envs.VLLM_PLUGINS or ()) and enable()


def enable() -> bool:
    """Replace vLLM's layers of routed experts in models built from now on.

    False if already done, or if this vLLM differs from those that were read, which a warning states. Raises ConfigError
    if another plugin has replaced one of the layers.
    """
    import vllm

    read = ".".join(vllm.__version__.split(".")[:2]) in READ
    if differing := [] if read else differences():
        _log("warning", UNREAD + "its own experts run, since it has no %s", vllm.__version__, ", ".join(differing))
        return False
    from vllm.model_executor.custom_op import op_registry_oot

    taken = {name: op_registry_oot[name] for _, name in PLUGGABLE if name in op_registry_oot}
    if any(getattr(each, "of_moe_mk", False) for each in taken.values()):
        return False
    for name, each in taken.items():
        raise ConfigError(
            f"vLLM's {name} is replaced by {each.__module__}.{each.__qualname__} already; "
            f"name one of the two plugins in VLLM_PLUGINS"
        )
    for module, name in PLUGGABLE:
        base = getattr(import_module(module), name)
        base.register_oot(layer_over(base), name=name)
    register_kernels(_say, settings=_settings)
    if not read:
        _log(
            "warning", UNREAD + "experts and linear layers of classes that were not read are refused", vllm.__version__
        )
    return True


def differences() -> list[str]:
    """Lists what this vLLM does not have as it was read: modules, classes, their methods with parameters, fields."""
    missing = [f"{module}.{name}" for module, name in PLUGGABLE if looked_up(module, name) is None]
    for name, wanted in PARAMETERS.items():
        function = looked_up(MOE, *name.split("."))
        if function is None or tuple(signature(function).parameters) != wanted:
            missing.append(f"{name}({', '.join(wanted)})")
    for name, fields in CONFIGS.items():
        of = looked_up(f"{MOE}.config", name)
        stated = {*dir(of), *getattr(of, "__dataclass_fields__", ())}
        missing += [f"{name}.{field}" for field in fields if field not in stated]
    return missing + [f"{module}.{name}" for module, name in linear_names() if looked_up(module, name) is None]


def layer_over(base: Any) -> type:
    """The class that vLLM instantiates instead of `base`: its parameters and loaders, and a method of ours."""

    class MoeMkRoutedExperts(base):  # type: ignore[misc]
        """Routed experts by the backend that the oracle selects."""

        of_moe_mk = True

        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            refuse(moe_config, getattr(self, "swiglu_limit", None), getattr(self, "swiglu_beta", None))
            with _no_kernel_selected() as selecting:
                theirs = super()._get_quant_method(prefix, quant_config, moe_config)
            name = type(theirs).__name__
            if name in FORMATS and name not in selecting:
                reason = f"{FORMATS[name].module} has no {FORMATS[name].selects}, by which {name} selects its kernel"
                raise UnsupportedError("moe_mk in this version of vLLM", [reason, "leave moe_mk out of VLLM_PLUGINS"])
            return method_over(name)(theirs, moe_config)

        def weight_loader(self, param: Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_released(param):
                raise UnsupportedError(
                    f"loading weights into {self.layer_name} again",
                    [f"vLLM's copy was freed; start with additional_config[{NAME!r}][{RELEASE!r}] = false"],
                )
            return super().weight_loader(param, *args, **kwargs)

    return MoeMkRoutedExperts


@contextmanager
def _no_kernel_selected() -> Iterator[set[str]]:
    """Let vLLM's methods be made where vLLM has no kernel for them: selecting one would raise.

    Yields the names in FORMATS of which that is done: a version of vLLM may lack some.
    """
    replaced: list[tuple[Any, str, Any]] = []
    names = set()
    try:
        for name, each in FORMATS.items():
            if each.selects:
                try:
                    module = import_module(each.module)
                    backend = reduce(getattr, each.backend.split("."), module) if each.backend else None
                    replaced.append((module, each.selects, getattr(module, each.selects)))
                except (ImportError, AttributeError):
                    continue
                setattr(module, each.selects, lambda *_, backend=backend, **__: (backend, None))
            names.add(name)
        yield names
    finally:
        for module, name, function in reversed(replaced):
            setattr(module, name, function)


@cache
def method_over(name: str) -> type:
    """Our method under the name of one of vLLM's, by which its loaders know the format."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    class MoeMkMethod(FusedMoEMethodBase):  # type: ignore[misc]
        """Experts by the backend that the oracle selects; `theirs` creates the parameters."""

        def __init__(self, theirs: Any, moe: Any) -> None:
            super().__init__(moe)
            self.theirs, self.format = theirs, format_of(theirs)
            self.experts_here: EngineExperts | None = None
            self.settings, self.releases = _settings()

        @property
        def is_monolithic(self) -> bool:  # vLLM routes
            return False

        @property
        def supports_internal_mk(self) -> bool:  # with data parallelism tokens are dispatched here, not by vLLM
            return bool(self.moe.moe_parallel_config.dp_size > 1)

        @property
        def supports_eplb(self) -> bool:  # it would exchange weights without updating the converted copy
            return False

        def uses_weight_scale_2_pattern(self) -> bool:
            return bool(self.theirs.uses_weight_scale_2_pattern())

        def maybe_roundup_sizes(
            self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
        ) -> tuple[int, int]:
            return hidden_size, intermediate_size_per_partition

        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
            self.theirs.create_weights(layer, *args, **kwargs)

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            del layer

        def process_weights_after_loading(self, layer: Any) -> None:
            if layer.apply_router_weight_on_input:
                raise UnsupportedError(f"moe_mk in {layer.layer_name}", ["routing weights are applied to its input"])
            settings, groups = self.settings, None
            if self.supports_internal_mk:
                if (placed := layer.expert_map_manager.placement_strategy) != "linear":
                    raise UnsupportedError(
                        f"moe_mk in {layer.layer_name}",
                        [f"data parallelism with experts placed {placed}; use --expert-placement-strategy linear"],
                    )
                settings, groups = {"max_num_tokens": self.moe.max_num_tokens} | settings, _groups()
            weights = weights_of(layer, self.theirs, self.format)
            self.experts_here = EngineExperts(
                layer.layer_name,
                weights,
                top_k=self.moe.experts_per_token,
                settings=settings,
                release=self.releases,
                groups=groups,
            )
            _say(
                "moe_mk: routed experts (%s, %s) by %s", weights.quant or "unquantised", name, self.experts_here.backend
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
            ids = topk_ids if self.supports_internal_mk else local_ids(topk_ids, layer.expert_map)
            return self.experts_here(x, topk_weights, ids)

    MoeMkMethod.__name__ = name
    return MoeMkMethod


UNREAD = f"moe_mk: vLLM %s is none of the versions that were read ({', '.join(READ)}): "


def _log(level: str, message: str, *args: str) -> None:
    """One line in vLLM's log for each of the combinations of arguments."""
    from vllm.logger import init_logger

    getattr(init_logger(f"vllm.plugins.{NAME}"), f"{level}_once")(message, *args)


def _say(message: str, *args: str) -> None:
    _log("info", message, *args)


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
        "weight_scale_2": "global_scale", "input_scale": "input_scale", "scale": "scale", "scale_inv": "scale",
        "scales": "scale", "qzeros": "zeros", "zero_point": "zeros", "g_idx": "order", "weight_shape": "shape",
        "bias": "bias",
    }  # fmt: skip
    return next((kind for ending, kind in endings.items() if last.endswith(ending)), "weight")


def local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Ids of this rank's experts, -1 elsewhere. expert_map: (E) of vLLM, local id or -1; None on one rank."""
    if expert_map is None:
        return topk_ids
    known = topk_ids.clamp(0, expert_map.shape[0] - 1).long()
    return torch.where((topk_ids >= 0) & (topk_ids < expert_map.shape[0]), expert_map[known].to(topk_ids.dtype), -1)


def refuse(moe: Any, limit: float | None, beta: float | None) -> None:
    """Raise UnsupportedError with all unsupported features of a vLLM FusedMoEConfig.

    limit, beta: the clamp of the layer, and what its activation adds to up.
    """
    parallel, reasons = moe.moe_parallel_config, []
    name = moe.activation.value.removesuffix("_no_mul")
    if name not in ACTIVATIONS and name not in CLAMPED:
        reasons.append(f"activation {moe.activation.value!r}; known: {', '.join({**ACTIVATIONS, **CLAMPED})}")
    elif limit is not None and name not in CLAMPED:
        reasons.append(f"a clamp of {limit} with activation {name!r}; known with clamps: {', '.join(CLAMPED)}")
    if beta not in (None, 1.0) and CLAMPED.get(name) == "swiglu_oai":
        reasons.append(f"swiglu_beta={beta}; 1 is added to up")
    if moe.is_lora_enabled:
        reasons.append(LORA)
    if parallel.dp_size > 1 and not (parallel.use_ep and parallel.ep_size == parallel.dp_size):
        reasons.append(
            f"data parallel size {parallel.dp_size}: use --enable-expert-parallel, and no tensor parallelism"
        )
    if parallel.dp_size > 1 and moe.num_experts % parallel.ep_size:
        reasons.append(f"data parallelism with {moe.num_experts} experts on {parallel.ep_size} ranks: unequal parts")
    if parallel.enable_eplb:
        reasons.append("EPLB: it exchanges weights between ranks and would not update the converted copy")
    if reasons:
        raise UnsupportedError(
            "moe_mk does not support this model in vLLM", [*reasons, "leave moe_mk out of VLLM_PLUGINS"]
        )


_GROUPS: WeakKeyDictionary[Any, ParallelGroups] = WeakKeyDictionary()


def _groups() -> ParallelGroups:
    """vLLM's ranks that share out the experts: one object, so that all layers share what transports keep open."""
    from vllm.distributed import get_ep_group

    return _GROUPS.setdefault(group := get_ep_group(), ParallelGroups(ep=group.cpu_group))


def _settings() -> tuple[dict[str, Any], bool]:
    """The kernel settings in vLLM's `--additional-config`, and whether vLLM's weights are freed."""
    from vllm.config import get_current_vllm_config

    stated = (get_current_vllm_config().additional_config or {}).get(NAME, {})
    if not isinstance(stated, dict):
        raise ConfigError(f"additional_config[{NAME!r}] is {stated!r}, expected a table of kernel settings")
    settings = dict(stated)
    return settings, bool(settings.pop(RELEASE, True))
