"""The contract of a compute backend: w13 -> activation -> w2 over the experts of one rank.

It knows nothing of communication. One file, one class, one decorator make a backend:

    @EXPERTS.register("my_experts")
    class MyExperts(FusedExperts):
        traits = ExpertsTraits(summary="...", emits={RowTokens: OutputStage.REDUCED}, ...)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from moe_mk.config.problem import Problem, Reason
from moe_mk.config.traits import Traits, common_reasons
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import Registry
from moe_mk.tokens import ExpertOutput, OutputStage, Tokens
from moe_mk.trace.recorder import Spans
from moe_mk.weights.expert_weights import CANONICAL, MAPPED, Weights, on_device


@dataclass(frozen=True, kw_only=True)
class ExpertsTraits(Traits):
    """Facts of an experts backend."""

    emits: Mapping[type, OutputStage]
    """The layouts it reads, best first, and how far the output of each comes."""
    weights: frozenset[str]
    """Weight formats it reads: "plain", "fp8_block"."""
    computes: tuple[str, ...]
    """What it multiplies with, best first: "plain" (the layer's dtype), "fp8" (the checkpoint's activations)."""
    layouts: frozenset[str] = frozenset({CANONICAL, MAPPED})
    """Weight layouts its `relayout` takes."""
    activations: frozenset[str] = frozenset({"silu", "gelu", "gelu_tanh", "relu2"})
    dtypes: frozenset[str] = frozenset({"bf16", "fp16", "fp32"})
    block_sides: frozenset[int] = frozenset()
    """Sides of FP8 blocks it can read; empty is any."""
    bandwidth: float = 0.5
    """Share of the device's memory bandwidth it reaches on weights, for ranking until it is measured."""
    compute: float = 0.5
    """Share of the device's matrix rate it reaches, likewise."""
    launches: int = 4
    """Operator calls of one run, and per expert that is hit if `per_expert`."""
    per_expert: bool = False

    @property
    def consumes(self) -> tuple[type, ...]:
        """The layouts it reads, best first."""
        return tuple(self.emits)


@dataclass(frozen=True)
class ExpertsContext:
    """What an experts backend is built from."""

    dtype: Plain
    """What comes out, and what "plain" computes with."""
    compute: QuantScheme
    """What the activations are rounded to before each GEMM; the dtype itself means no rounding."""
    activation: str
    num_slots: int
    hidden_size: int
    intermediate_size: int
    device: torch.device
    spans: Spans = field(default_factory=Spans)


class FusedExperts(ABC):
    """One compute backend."""

    traits: ClassVar[ExpertsTraits]

    def __init__(self, context: ExpertsContext) -> None:
        self.context = context

    @abstractmethod
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Multiply tokens by their experts. `weights` is what `relayout` gave; padding is never read."""

    def relayout(self, weights: Weights) -> Weights:
        """Bring canonical or mapped weights into the layout that `run` reads, on its device. Never mutates them."""
        return on_device(weights, self.context.device)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Every reason why this backend cannot serve the problem; empty if it can."""
        return reasons_of_traits(cls.traits, problem)

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """The most bytes one run allocates for `rows` received rows, beyond its inputs and weights."""
        return default_workspace_bytes(problem, rows)


def default_workspace_bytes(problem: Problem, rows: int) -> int:
    """Every assignment's row, its intermediates and its output, in f32 and all at once."""
    assignments = rows * problem.config.router.top_k
    width = 2 * problem.config.model.hidden_size + 3 * problem.intermediate
    return assignments * width * 4


def reasons_of_traits(traits: ExpertsTraits, problem: Problem) -> list[Reason]:
    """Everything the traits of an experts backend say against a problem."""
    return [*common_reasons(traits, problem), *_format_reasons(traits, problem)]


def _format_reasons(traits: ExpertsTraits, problem: Problem) -> list[Reason]:
    model, reasons = problem.config.model, []
    stored = "fp8_block" if model.quant.is_fp8 else "plain"
    if stored not in traits.weights:
        reasons.append(
            Reason("weights", f"reads {_listed(traits.weights)} weights, the experts are {problem.weights.name}")
        )
    if model.quant.is_fp8 and traits.block_sides and not set(model.quant.block) <= traits.block_sides:
        sides = "x".join(map(str, model.quant.block))
        reasons.append(
            Reason("block", f"reads FP8 blocks with sides {_listed(traits.block_sides)}, the experts have {sides}")
        )
    if model.activation not in traits.activations:
        reasons.append(Reason("activation", f"has {_listed(traits.activations)}, the model needs {model.activation}"))
    if problem.dtype.name not in traits.dtypes:
        reasons.append(Reason("dtype", f"computes in {_listed(traits.dtypes)}, the layer is {problem.dtype.name}"))
    wish = problem.config.kernel.activations
    if wish == "checkpoint" and model.quant.is_fp8 and "fp8" not in traits.computes:
        reasons.append(Reason("activations", "multiplies with plain activations only", "kernel.activations = auto"))
    if wish == "plain" and "plain" not in traits.computes:
        reasons.append(Reason("activations", "multiplies with FP8 activations only", "kernel.activations = auto"))
    return reasons


def _listed(names: frozenset[str] | frozenset[int]) -> str:
    return ", ".join(str(name) for name in sorted(names))


EXPERTS: Registry[type[FusedExperts]] = Registry("experts backend", FusedExperts, group="moe_mk.experts")
