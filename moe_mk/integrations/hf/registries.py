"""The tables of transformers that an experts implementation is entered in, as far as the installed version has them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.integrations import moe

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.op import ExpertsFunction


def fp8_registry() -> Any:
    """The table of FP8 experts, or None."""
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:
        return None
    return FP8ExpertsInterface


def parallel_registry() -> Any:
    """The table of expert parallelism, or None: 5.19 has none."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return None
    return EPImplementationInterface


def function_of(module: nn.Module, name: str) -> ExpertsFunction | None:
    """What a name stands for in the table that this module asks; None if it is not ours."""
    registry = fp8_registry() if hasattr(module, "down_proj_scale_inv") else moe.ExpertsInterface
    function = registry._global_mapping.get(name) if registry is not None else None
    return function if isinstance(function, ExpertsFunction) else None


def refuse_others(module: nn.Module) -> None:
    """From now on the module computes by this library alone, and cannot be saved.

    Its parameters are on the meta device: torch 2.13 multiplies with those and gives arbitrary numbers, not an error.
    """
    module.register_forward_pre_hook(_must_be_ours)
    module.register_state_dict_pre_hook(_cannot_be_saved)  # type: ignore[no-untyped-call]


def _must_be_ours(module: nn.Module, args: object) -> None:
    del args
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not isinstance(name, str) or function_of(module, name) is None:
        raise UnsupportedError(
            f"{type(module).__name__} gave up its weights to moe_mk and is asked for experts_implementation={name!r}",
            ["set_experts_implementation back to moe_mk, or load the model again"],
        )


def _cannot_be_saved(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    del keep_vars
    raise UnsupportedError(
        f"{prefix}{type(module).__name__} gave up its weights to moe_mk and cannot be saved",
        ["load the model again; prepare(model) without in_place keeps the weights"],
    )
