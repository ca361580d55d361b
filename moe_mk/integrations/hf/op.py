"""The experts of a transformers module as one torch operator, so that `torch.compile` sees one node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.engine_experts import LORA
from moe_mk.integrations.hf.modules import tensors_of
from moe_mk.integrations.hf.plan import (
    NUMBER,
    ROUTING_NAMES,
    Settings,
    check_settings,
    enter,
    held_plan,
    module_of,
    plan_of,
)
from moe_mk.layer.checks import expect_routing
from moe_mk.layer.custom_op import is_untraced, like_first, refuse_gradients
from moe_mk.shapes import expect
from moe_mk.weights.packed_layouts import FLOATS

# Imported before there is a group, see `moe_mk.layer.custom_op`. Operators of `torch.library.custom_op` would import it
# at their first call; those of a Library do not.
if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
    import torch.distributed.nn

_LIBRARY: Any = torch.library.Library("moe_mk", "FRAGMENT")  # type: ignore[no-untyped-call]


def _run(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, tensors: Sequence[Tensor], number: int, settings: str
) -> Tensor:
    """Run the experts of a module on (T, H), (T, K) ids and (T, K) weights; ids outside its experts are skipped."""
    module = module_of(number)
    check_tensors(module, tensors)
    return plan_of(module, hidden_states.dtype, json.loads(settings)).of_rank.run(hidden_states, topk_weights, topk_ids)


_LIBRARY.define(
    "hf_experts(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor[] tensors, int number, "
    "str settings) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("hf_experts", _run, "CompositeExplicitAutograd")
torch.library.register_fake("moe_mk::hf_experts", like_first, lib=_LIBRARY)
refuse_gradients("hf_experts", "experts_implementation='moe_mk'", "train with experts_implementation='grouped_mm'")
hf_experts: Any = torch.ops.moe_mk.hf_experts.default
"""The operator of `_run`."""


class ExpertsFunction:
    """The entry of a transformers registry, called like the forward of an experts module."""

    def __init__(self, name: str, settings: Settings) -> None:
        check_settings(settings)
        self.name, self.settings = name, dict(settings)
        self._settings_json = json.dumps(self.settings)

    def __call__(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """(T, H) to (T, H). top_k_weights must be renormalised and scaled; they are not scaled again."""
        # The operator is for graphs and gradients; with its checks it costs as much as the router.
        is_plain = not (args or kwargs or torch.is_grad_enabled()) and is_untraced(hidden_states)
        if is_plain and (held := held_plan(module, hidden_states.dtype, self.settings)) is not None:
            return held.of_rank.run(hidden_states, top_k_weights, top_k_index)
        if torch.compiler.is_compiling():  # no tables while tracing: the number 0 is rejected when the graph runs
            number = getattr(module, NUMBER, 0)
        else:
            if args or kwargs:
                what = f"{type(module).__name__} is called with more than tokens, ids and weights"
                raise UnsupportedError(what, [f"{args} {kwargs}"])
            expect("hidden_states", hidden_states, "T H", FLOATS)
            expect_routing(hidden_states, top_k_weights, top_k_index, names=ROUTING_NAMES)
            number = enter(module)
        tensors = tensors_of(module)
        out: Tensor = hf_experts(hidden_states, top_k_index, top_k_weights, tensors, number, self._settings_json)
        return out


def check_tensors(module: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Raise UnsupportedError if a graph compiled for one module is run with the tensors of another."""
    pairs = list(zip(tensors_of(module), tensors, strict=True))
    if any(own.data_ptr() != given.data_ptr() and not torch.equal(own, given) for own, given in pairs):
        raise UnsupportedError(
            f"this graph was compiled for another {type(module).__name__}", ["call prepare(model) on the copy first"]
        )


def fp8_registry() -> Any:
    """The registry of FP8 experts, or None."""
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:
        return None
    return FP8ExpertsInterface


def parallel_registry() -> Any:
    """The registry of expert parallelism, or None: 5.19 has none."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return None
    return EPImplementationInterface


def function_of(module: nn.Module, name: str) -> ExpertsFunction | None:
    """The entry of a name in the registry of a module; None if it is not of moe_mk."""
    registry = fp8_registry() if hasattr(module, "down_proj_scale_inv") else moe.ExpertsInterface
    function = registry._global_mapping.get(name) if registry is not None else None
    return function if isinstance(function, ExpertsFunction) else None


def refuse_others(module: nn.Module) -> None:
    """Restrict the module to this library, and disable saving.

    Its parameters are on the meta device, with which torch 2.13 computes arbitrary numbers without an error.
    """
    module.register_forward_pre_hook(_must_be_ours)
    module.register_state_dict_pre_hook(_cannot_be_saved)  # type: ignore[no-untyped-call]


def refuse_where_freed(model: nn.Module, name: object) -> None:
    """Raise UnsupportedError if experts of another implementation are selected for a module that `refuse_others`."""
    for module in model.modules():
        if _must_be_ours in module._forward_pre_hooks.values():
            _refuse(module, name)


def _must_be_ours(module: nn.Module, args: object) -> None:
    del args
    if any(parameter is not None and not parameter.is_meta for parameter in module._parameters.values()):
        raise UnsupportedError(
            f"{type(module).__name__} has freed its weights for moe_mk, and has others or empty ones since",
            ["load the model again; prepare(model) without in_place keeps the weights"],
        )
    _refuse(module, getattr(getattr(module, "config", None), "_experts_implementation", None))


def _refuse(module: nn.Module, name: object) -> None:
    if not isinstance(name, str) or function_of(module, name) is None:
        raise UnsupportedError(
            f"{type(module).__name__} has freed its weights for moe_mk, but has experts_implementation={name!r}",
            ["set_experts_implementation back to moe_mk, or load the model again"],
        )


def refuse_adapters(block: nn.Module) -> None:
    """Raise UnsupportedError at a forward if a part was wrapped, as peft does, while the block is patched or freed."""
    if _has_no_adapters not in block._forward_pre_hooks.values():
        block.register_forward_pre_hook(_has_no_adapters)


def _has_no_adapters(block: nn.Module, args: object) -> None:
    del args
    for name, child in block.named_children():
        base = getattr(child, "base_layer", None)
        if base is not None and ("forward" in vars(block) or not tensors_of(base)):
            held = f"{name} of {type(block).__name__} was wrapped in {type(child).__name__}"
            raise UnsupportedError(f"{held}, but moe_mk holds its weights in another layout", [LORA])


def _cannot_be_saved(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    del keep_vars
    raise UnsupportedError(
        f"{prefix}{type(module).__name__} has freed its weights for moe_mk and cannot be saved",
        ["load the model again; prepare(model) without in_place keeps the weights"],
    )
