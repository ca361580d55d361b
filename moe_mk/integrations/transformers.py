"""Hugging Face transformers: `from_pretrained(path, experts_implementation="moe_mk")`.

    from moe_mk.integrations.transformers import explain, register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_mk")
    print(explain(model))

Tested with transformers 5.16 and 5.24; features are detected, versions are not compared. Inference only: a backward
pass through the experts raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations import moe

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import FallbackWarning, UnsupportedError
from moe_mk.integrations.hf.blocks import LAYER, PatchedForward, blocks_of, layer_of
from moe_mk.integrations.hf.fp8 import cpu_fp8
from moe_mk.integrations.hf.linears import pack_linears
from moe_mk.integrations.hf.modules import reasons_against, save_whole_or_nothing, tensors_of
from moe_mk.integrations.hf.op import (
    ExpertsFunction,
    fp8_registry,
    function_of,
    parallel_registry,
    refuse_adapters,
    refuse_others,
    refuse_where_freed,
)
from moe_mk.integrations.hf.packed import PackedModule, PackedReport, experts_of, replace_experts
from moe_mk.integrations.hf.plan import ModulePlan, enter, keep_only_plan, plan_of, pooled
from moe_mk.integrations.hf.without_experts import model_without_experts
from moe_mk.oracle.verdict import Verdict, explain_pairs
from moe_mk.text import WIDTH, amount, terminal_width
from moe_mk.weights.expert_weights import CANONICAL, MAPPED
from moe_mk.weights.packed_layouts import FLOATS


@dataclass(frozen=True)
class ModuleReport:
    """Report on one experts module of a model."""

    path: str
    cls: str
    backend: str
    because: str
    scheme: str
    num_bytes: int
    """Of the weights in the layout of the backend."""
    copied: bool
    """Whether these bytes are in addition to the module's parameters."""
    others: tuple[Verdict, ...]
    """Of the other experts backends."""

    def as_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key != "others"}
        return plain | {"others": [verdict.as_dict() for verdict in self.others]}


@dataclass(frozen=True)
class ModelReport:
    """All experts modules of a model."""

    model: str
    modules: tuple[ModuleReport, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.model, "modules": [module.as_dict() for module in self.modules]}

    def __str__(self) -> str:
        """One line per module, and reasons against others below the first module of each class."""
        width = (terminal_width() or WIDTH) - 4
        lines, seen = [f"{self.model}: {len(self.modules)} experts modules by moe_mk"], set()
        for module in self.modules:
            copied = ", in addition to the module's weights" if module.copied else ""
            lines.append(f"{module.path} ({module.cls}): {module.backend}, {module.because}")
            lines.append(f"    {module.scheme}, {amount(module.num_bytes)}{copied}")
            if (module.cls, module.backend) not in seen:
                lines += [f"    {line}" for each in explain_pairs(module.others, width) for line in each.splitlines()]
            seen.add((module.cls, module.backend))
        return "\n".join(lines)


def report_of(path: str, plan: ModulePlan, held_bytes: int) -> ModuleReport:
    """The report of one plan. held_bytes: of the module's parameters, 0 if they were freed."""
    return ModuleReport(
        path=path,
        cls=plan.facts.name,
        backend=plan.experts,
        because=plan.because,
        scheme=plan.facts.scheme.name,
        num_bytes=plan.of_rank.weights.num_bytes,
        copied=plan.of_rank.weights.layout not in (CANONICAL, MAPPED) and held_bytes > 0,
        others=plan.others,
    )


__all__ = [
    "ModelReport", "ModuleReport", "PackedModule", "PackedReport", "config_from_hf", "cpu_fp8", "explain",
    "model_without_experts", "pack_linears", "patch_blocks", "patched_blocks", "prepare", "register",
    "replace_experts", "unpatch_blocks",
]  # fmt: skip


def register(name: str = "moe_mk", **settings: Any) -> tuple[str, ...]:
    """Register `experts_implementation=name` for bf16 and FP8 experts, and `ep_implementation=name`.

    settings: of MoEConfig.kernel by key, for instance experts="torch_cpu" or activations="checkpoint"; `bytes` of
    residency are for all layers together, of each model for `patch_blocks` and `replace_experts`.
    Returns the names of the registries; a second call with other settings replaces them. Raises ConfigError for an
    unknown setting.
    """
    function, entered = ExpertsFunction(name, settings), ["experts"]
    _warn_where_it_is_ignored()
    moe.ExpertsInterface.register(name, function)
    fp8 = fp8_registry()
    if fp8 is not None:
        fp8.register(name, function)
        entered.append("fp8 experts")
    parallel = parallel_registry()
    if parallel is not None:
        from moe_mk.integrations.hf.parallel import ep_class

        parallel.register(name, ep_class(settings))
        entered.append("expert parallel")
    return tuple(entered)


COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Attributes of configurations of models with experts."""


def _warn_where_it_is_ignored() -> None:
    """Warn where a model with experts is built with an implementation that its class never calls, and refuse to select
    another one for a model whose weights were freed.

    transformers 5.24 checks the name for every model, but dispatches only experts with @use_experts_implementation;
    those of Llama 4 have none.
    """
    chosen = getattr(PreTrainedModel, "get_correct_experts_implementation", None)
    if chosen is None or hasattr(chosen, "__wrapped__"):
        return

    @wraps(chosen)
    def checked(self: PreTrainedModel, requested_experts: str | None) -> str:
        name: str = chosen(self, requested_experts)
        ours = isinstance(moe.ExpertsInterface._global_mapping.get(name), ExpertsFunction)
        refuse_where_freed(self, name)
        if (
            ours
            and not self._can_set_experts_implementation()
            and any(getattr(self.config, count, 0) for count in COUNTS)
        ):
            warnings.warn(
                f"experts_implementation={name!r} has no effect on {type(self).__name__}: transformers does not "
                "dispatch its experts; load the checkpoint's layers with MoELayer, or leave the setting out",
                FallbackWarning,
                stacklevel=2,
            )
        return name

    PreTrainedModel.get_correct_experts_implementation = checked  # type: ignore[method-assign]


def prepare(model: nn.Module, name: str = "moe_mk", *, in_place: bool = False) -> ModelReport:
    """Select backends and convert weights now instead of at the first forward pass; needed before `torch.compile`.

    A later call converts again, for weights that were written through `.data`, which torch does not track; any
    other change of a weight is detected at the next forward pass.
    in_place: if a backend keeps the weights in its own layout, free the module's parameters. The model then
    runs only with this library, and can neither be saved nor switched to other experts without loading it again.
    Raises UnsupportedError with every unsupported module and all reasons, before any is converted.
    """
    return _planned(model, name, in_place=in_place, again=True)


def explain(model: nn.Module, name: str = "moe_mk") -> ModelReport:
    """Report the backend of every experts module, and the reasons against others. Print it, or use `as_dict()`."""
    return _planned(model, name, in_place=False, again=False)


def _planned(model: nn.Module, name: str, *, in_place: bool, again: bool) -> ModelReport:
    found = experts_of(model, "its experts were replaced; replace_experts returned their report")
    refused = [
        f"{path} ({type(module).__name__}): {reason}"
        for path, module in found.items()
        for reason in (reasons_against(module) if tensors_of(module) else [])
    ]
    if refused:
        raise UnsupportedError(f"moe_mk does not support {type(model).__name__}", refused)
    modules = []
    for path, module in found.items():
        enter(module)
        forget = again and bool(tensors_of(module))
        if (function := function_of(module, name)) is None:
            raise UnsupportedError(
                f"experts implementation {name!r} is not one of moe_mk", [f"call register({name!r}) first"]
            )
        plan = plan_of(module, _dtype_of(model, module), function.settings, again=forget)
        if in_place and tensors_of(module) and keep_only_plan(module, plan):
            refuse_others(module)
            refuse_adapters(model.get_submodule(path.rpartition(".")[0]))
            save_whole_or_nothing(model)
        modules.append((path, plan, sum(t.nbytes for t in tensors_of(module))))
    return ModelReport(type(model).__name__, tuple(report_of(*each) for each in modules))


def config_from_hf(config: PretrainedConfig | dict[str, Any], **overrides: Any) -> MoEConfig:
    """The settings of a MoE layer from a transformers configuration; raises ConfigError for a model without one."""
    from moe_mk.config.hf import settings_from_hf

    text = config.get_text_config().to_dict() if isinstance(config, PretrainedConfig) else dict(config)
    where = str(text.get("_name_or_path") or text.get("model_type") or "config")
    return MoEConfig.parse(settings_from_hf(text, where), where).with_(**overrides)


def patch_blocks(model: nn.Module, **settings: Any) -> dict[str, Any]:
    """Compute every block of a gate, experts and perhaps shared experts in a `MoELayer`, in one call.

    Returns the layers by path. Routing is in f32, also where the block's gate works in bf16. All blocks are checked
    before any is changed. Router logits are recorded as before.
    Raises UnsupportedError for a model without such blocks, and for blocks with a different result.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UnsupportedError(
            f"{type(model).__name__} has no block of a gate, experts and nothing else but shared experts",
            ["use experts_implementation='moe_mk', which supports the experts of every family"],
        )
    settings, pool = pooled(settings)
    layers, refused = {}, []
    for path, block in blocks.items():
        if LAYER in vars(block):
            continue
        try:
            layers[path] = layer_of(path, block, settings, pool)
        except UnsupportedError as problem:
            refused.append(str(problem).replace("\n  - ", ": "))
    if refused:
        raise UnsupportedError(f"blocks of {type(model).__name__} cannot be patched", refused)
    for path, layer in layers.items():
        # Not through nn.Module.__setattr__: the layer's counter and views are not part of the model's state.
        vars(blocks[path])[LAYER] = layer
        vars(blocks[path])["forward"] = PatchedForward(blocks[path], layer)
        refuse_adapters(blocks[path])
    return layers


def unpatch_blocks(model: nn.Module) -> int:
    """Restore the forward methods of patched blocks; returns their number."""
    patched = [block for block in model.modules() if LAYER in vars(block)]
    for block in patched:
        del vars(block)[LAYER], vars(block)["forward"]
    return len(patched)


@contextmanager
def patched_blocks(model: nn.Module, **settings: Any) -> Iterator[dict[str, Any]]:
    """Patch blocks inside a `with` statement."""
    try:
        yield patch_blocks(model, **settings)
    finally:
        unpatch_blocks(model)


def _dtype_of(model: nn.Module, module: nn.Module) -> torch.dtype:
    """The dtype of tokens: that of the weights, or for an FP8 model that of its first wider parameter."""
    if not hasattr(module, "down_proj_scale_inv") and isinstance(module.down_proj, torch.Tensor):
        return module.down_proj.dtype
    stated: object = getattr(model, "dtype", None)
    if isinstance(stated, torch.dtype) and stated in FLOATS:
        return stated
    return next((p.dtype for p in model.parameters() if p.dtype in FLOATS), torch.bfloat16)
