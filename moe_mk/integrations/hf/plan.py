"""The plan of one experts module: backend, decision, and weights in the layout of the backend.

A plan belongs to one module and is discarded when the module's tensors change. Modules have a number in a weak
table, because a torch operator takes tensors and numbers only.

`ModuleExperts` computes features of a module between its GEMMs: custom gate, biases, norm.

It is used for modules that no registered backend supports, and is never registered.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S
from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import KernelConfig
from moe_mk.config.problem import Reason
from moe_mk.config.traits import DEVICES
from moe_mk.errors import ConfigError, FallbackWarning, UnsupportedError
from moe_mk.experts.base import ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.experts.residency import ResidencyPool
from moe_mk.integrations.hf.modules import Act, ModuleFacts, facts_of, free_weights, tensors_of, weights_of
from moe_mk.layer.experts_of_rank import ExpertsOfRank
from moe_mk.layer.grid import Grid
from moe_mk.oracle.decide import check_pins
from moe_mk.oracle.verdict import Verdict
from moe_mk.registry import did_you_mean
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, Tokens
from moe_mk.weights.expert_weights import CANONICAL, MAPPED, ExpertWeights, Weights
from moe_mk.weights.scan import Progress
from moe_mk.weights.stamp import Stamp

NAME = "module_loop"


class ModuleExperts(FusedExperts):
    """A loop over experts, on rows sorted by expert."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="a loop over experts around the gate, the biases and the norm of a transformers module",
        kinds=DEVICES,
        emits={GroupedTokens: OutputStage.RAW},
        weights=frozenset({"plain", "fp8_block"}),
        computes=("plain",),
        graph_safe=False,
        deterministic=True,
        bandwidth=0.5,
        compute=0.5,
        launches=4,
    )

    def __init__(self, context: ExpertsContext, module: nn.Module, facts: ModuleFacts) -> None:
        super().__init__(context)
        self._module, self.facts = ref(module), facts

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """Returns the weights unchanged; they are read from the module."""
        return weights

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Multiply each expert's rows; experts without rows are not touched."""
        assert isinstance(tokens, GroupedTokens)
        dtype = self.context.dtype.dtype
        x_NH = tokens.x_NH.dequantize(dtype)
        y_NH = torch.empty((x_NH.shape[0], self.context.hidden_size), dtype=dtype, device=x_NH.device)
        start = 0
        for slot, num_rows in enumerate(tokens.counts_L.tolist()):
            if num_rows:
                rows = slice(start, start + num_rows)
                y_NH[rows] = self._ffn(x_NH[rows], slot, weights)
            start += num_rows
        return ExpertOutput(y_NH, OutputStage.RAW)

    def _ffn(self, x: Tensor, slot: int, weights: Weights) -> Tensor:
        module, facts = self._module(), self.facts
        assert module is not None
        w13, w2 = _matrices(weights, slot, x.dtype)
        h = functional.linear(x, w13, self._bias(module, "gate_up_proj" if facts.gated else "up_proj", slot))
        h = module._apply_gate(h) if facts.gated else module.act_fn(h)  # type: ignore[operator]
        y: Tensor = functional.linear(h.to(x.dtype), w2, self._bias(module, "down_proj", slot))
        return module.post_expert_norm(y) if facts.post_norm else y  # type: ignore[operator]

    def _bias(self, module: nn.Module, name: str, slot: int) -> Tensor | None:
        if not self.facts.biased:
            return None
        held = getattr(module, f"{name}_bias")
        assert isinstance(held, Tensor)
        return held[slot].to(self.context.dtype.dtype)


def _matrices(weights: Weights, slot: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return both matrices of an expert, gate and up in the order the module holds them."""
    if isinstance(weights, ExpertWeights):
        return weights.w13[slot].dequantize(dtype), weights.w2[slot].dequantize(dtype)
    expert = weights.slot(slot)
    parts = [q.dequantize(dtype) for q in (expert.gate_IH, expert.up_IH) if q is not None]
    return torch.cat(parts), expert.down_HI.dequantize(dtype)


ROUTING_NAMES = "top_k_weights", "top_k_index"
"""Of the arguments, as transformers calls them."""
NUMBER = "_moe_mk_number"
Settings = Mapping[str, Any]
"""Keys of MoEConfig.kernel, for instance experts="torch_cpu"."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that share the experts, and whether all have the same tokens."""

    grid: Grid
    replicated: bool = False


ALONE = Ranks(Grid(ParallelGroups(), DEFAULT_TIMEOUT_S, ""))


class ModulePlan:
    """The experts of one module."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, settings: Settings, ranks: Ranks) -> None:
        """Select a backend and convert weights; raises UnsupportedError with every reason, before any work."""
        self.facts, self.ranks, self.settings = (facts := facts_of(module)), ranks, dict(settings)
        of_layer, pool = pooled(settings)
        if pool is not None:
            pool = _pools.setdefault(repr(settings), pool)
        if facts.unsupported:
            if (pin := of_layer.get("experts", "auto")) != "auto":
                has = f"{facts.name} has {', '.join(facts.unsupported)}"
                raise UnsupportedError(f"{pin} cannot compute {facts.name}", [f"{has}; use experts='auto'"])
            # Only the transport is needed; the reference works wherever torch does.
            of_layer |= {"experts": "reference", "activations": "plain", "wire": "plain"}
            _warn_of_a_loop(facts.name, facts.unsupported)
        self.of_rank = ExpertsOfRank.of_engine(
            weights_of(module, facts),
            ranks.grid,
            model_settings(facts),
            top_k=top_k_of(module),
            dtype=dtype,
            device=facts.device,
            settings=of_layer,
            tokens="replicated" if ranks.replicated else "sharded",
            pool=pool,
            unregistered=partial(ModuleExperts, module=module, facts=facts) if facts.unsupported else None,
            routing_names=ROUTING_NAMES,
        )
        self.dtype = dtype
        self.stamp = Stamp(tensors_of(module))

    @property
    def experts(self) -> str:
        return NAME if self.facts.unsupported else self.of_rank.decision.chosen.experts

    @property
    def because(self) -> str:
        if self.facts.unsupported:
            return _loop_reason(self.facts.unsupported)
        chosen, verdicts = self.of_rank.decision.chosen, self.of_rank.decision.verdicts
        pin = self.settings.get("experts", "auto")
        if pin != "auto":
            return f"pinned by experts={pin!r}"
        able = [v for v in verdicts if v.prepare_finalize == chosen.prepare_finalize and not v.reasons]
        return f"lowest cost of {len(able)} eligible" if len(able) > 1 else "the only eligible one"

    @property
    def others(self) -> tuple[Verdict, ...]:
        """The experts backends that do not run, each with its cost or the reasons against it."""
        decision = self.of_rank.decision
        able = [v for v in decision.verdicts if v.prepare_finalize == decision.chosen.prepare_finalize]
        if not self.facts.unsupported:
            return tuple(verdict for verdict in able if not verdict.chosen)
        reason = Reason("module", _loop_reason(self.facts.unsupported))
        return tuple(replace(each, reasons=(reason,), cost_us=None, chosen=False) for each in able)


def _loop_reason(unsupported: tuple[str, ...]) -> str:
    return f"the module has {', '.join(unsupported)}, which no registered backend computes"


@cache
def _warn_of_a_loop(name: str, unsupported: tuple[str, ...]) -> None:
    """Warn once for each class."""
    warnings.warn(
        f"experts_implementation='moe_mk' computes {name} in a Python loop over its experts, no faster than "
        f"transformers does: {_loop_reason(unsupported)}; leave the setting out, or see explain(model)",
        FallbackWarning,
        stacklevel=2,
    )


_numbers = count(1)
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_plans: WeakKeyDictionary[nn.Module, ModulePlan] = WeakKeyDictionary()
_pools: WeakValueDictionary[str, ResidencyPool] = WeakValueDictionary()
"""By settings: all modules that are registered with them share one."""


def enter(module: nn.Module) -> int:
    """The number of a module; a copy of a module gets a new one."""
    number = getattr(module, NUMBER, 0)
    if _modules.get(number) is not module:
        number = next(_numbers)
        setattr(module, NUMBER, number)
        _modules[number] = module
    return number


def module_of(number: int) -> nn.Module:
    """The module of a number; raises UnsupportedError for one that was never entered, or is gone."""
    if number == 0:
        raise UnsupportedError(
            "a model was compiled before prepare(model)",
            ["call moe_mk.integrations.transformers.prepare(model) before torch.compile"],
        )
    if number not in _modules:
        raise UnsupportedError("the experts module of a compiled graph is gone", ["compile the new model again"])
    return _modules[number]


def plan_of(
    module: nn.Module, dtype: torch.dtype, settings: Settings, ranks: Ranks = ALONE, *, again: bool = False
) -> ModulePlan:
    """The plan of a module, recreated if its tensors, contents, dtype or settings changed, or with `again`."""
    held = None if again else held_plan(module, dtype, settings, ranks)
    if held is not None:
        return held
    _plans[module] = made = ModulePlan(module, dtype, settings, ranks)
    return made


def held_plan(module: nn.Module, dtype: torch.dtype, settings: Settings, ranks: Ranks = ALONE) -> ModulePlan | None:
    """The plan of a module if it has one and nothing that it depends on has changed."""
    held = _plans.get(module)
    same = held is not None and (held.dtype, held.settings, held.ranks) == (dtype, settings, ranks)
    return held if held is not None and same and held.stamp.is_of(tensors_of(module)) else None


def forget_plan(module: nn.Module) -> None:
    """Free the plan of a module, with its copy of the weights; the next forward makes it again."""
    _plans.pop(module, None)


def keep_only_plan(module: nn.Module, plan: ModulePlan) -> bool:
    """Free the module's tensors if the plan holds a copy in another layout; returns whether it did."""
    if plan.of_rank.weights.layout in (CANONICAL, MAPPED):
        return False
    free_weights(module)
    plan.stamp = Stamp(tensors_of(module))
    return True


def model_settings(facts: ModuleFacts) -> dict[str, Any]:
    """`MoEConfig.model` of a module's experts."""
    scheme = facts.scheme
    quant: dict[str, Any] = {"weights": scheme.name}
    if scheme.block is not None:
        scale = "ue8m0" if "ue8m0" in scheme.name else "float32"
        quant = {"weights": "fp8_block", "block": scheme.block, "scale": scale}
    return {
        "name": facts.name,
        "hidden_size": facts.hidden_size,
        "moe_intermediate_size": facts.intermediate_size,
        "num_experts": facts.num_experts,
        "expert_bias": facts.biased and not facts.unsupported,
        **(facts.activation or Act("silu")).settings(),
        "quant": quant,
    }


def top_k_of(module: nn.Module) -> int:
    """Experts per token in the model's configuration; used for the cost estimate only."""
    config = getattr(module, "config", None)
    for name in ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "top_k"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2


def pooled(settings: Settings) -> tuple[dict[str, Any], ResidencyPool | None]:
    """The settings of each layer, and what `residency.bytes` is of: the pool of all layers of a model."""
    residency = dict(settings.get("residency") or {})
    if (num_bytes := residency.pop("bytes", None)) is None:
        return dict(settings), None
    return dict(settings) | {"residency": residency}, ResidencyPool(num_bytes)


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for unknown kernel settings, invalid values and backends that are not registered."""
    for key in sorted(set(settings) - set(KernelConfig.model_fields)):
        raise ConfigError(f"unknown kernel setting {key!r}{did_you_mean(key, list(KernelConfig.model_fields))}")
    check_pins(KernelConfig.parse(settings, "register"))
