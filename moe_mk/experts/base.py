"""The contract of a compute backend: w13 -> activation -> w2 over the experts of one rank.

It knows nothing of communication. One file, one class, one decorator make a backend:

    @EXPERTS.register("my_experts")
    class MyExperts(FusedExperts):
        traits = ExpertsTraits(summary="...", emits={RowTokens: OutputStage.REDUCED}, ...)
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.config.problem import Problem, Reason
from moe_mk.config.traits import Traits, common_reasons
from moe_mk.kernels.native import Gating
from moe_mk.placement.expert_map import PlacementTables
from moe_mk.quant.kinds import KINDS, PLAIN_KINDS
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import Registry
from moe_mk.tokens import ExpertOutput, OutputStage, Tokens
from moe_mk.trace.recorder import Spans
from moe_mk.weights.expert_weights import CANONICAL, MAPPED, Weights, on_device
from moe_mk.weights.scan import Progress

QUANTISED = tuple(kind for kind in KINDS if kind not in PLAIN_KINDS)
"""Every weight format with scales."""


@dataclass(frozen=True, kw_only=True)
class ExpertsTraits(Traits):
    """Facts of an experts backend."""

    emits: Mapping[type, OutputStage]
    """The layouts it reads, best first, and how far the output of each comes."""
    weights: frozenset[str]
    """Weight formats it reads: "plain", or a value of model.quant.weights such as "fp8_block"."""
    computes: tuple[str, ...]
    """What it multiplies with, best first: "plain" (the layer's dtype), or the family of a checkpoint's activations
    ("fp8", "int8", "mxfp8", "nvfp4")."""
    layouts: frozenset[str] = frozenset({CANONICAL, MAPPED})
    """Weight layouts its `relayout` takes."""
    activations: frozenset[str] = frozenset({"silu", "gelu", "gelu_tanh", "relu2"})
    biases: bool = False
    """Whether it adds biases to the products of an expert."""
    dtypes: frozenset[str] = frozenset({"bf16", "fp16", "fp32"})
    block_sides: frozenset[int] = frozenset()
    """Sides of FP8 blocks it can read; empty is any."""
    bandwidth: float = 0.5
    """Share of the device's memory bandwidth it reaches on weights, for ranking until it is measured."""
    compute: float = 0.5
    """Share of the device's matrix rate it reaches, likewise."""
    definition: bool = False
    """Whether it is there to define what is right, not to serve: it never stands in the way of a fallback."""
    batch_invariant: bool = False
    """Whether it can give a row the same bits in any company, and does so with kernel.batch_invariant."""
    copies_weights: bool = False
    """Whether `relayout` copies on the host, expert by expert, so that one expert is there twice while it does."""
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
    batch_invariant: bool = False
    """Whether a row must get the same bits in any batch."""
    swiglu_limit: float | None = None
    """Where the clamped activations clamp."""
    swiglu_alpha: float = 1.0
    weights: QuantScheme | None = None
    """Said to `tuning_space` alone, before there are weights: of which type they will be."""
    top_k: int | None = None
    """Likewise: experts of a token."""


class FusedExperts(ABC):
    """One compute backend."""

    traits: ClassVar[ExpertsTraits]

    def __init_subclass__(cls, **settings: object) -> None:
        """Wrap the methods that a backend overrides.

        `run` records which class ran, so that a backend which delegates to another is visible in the report. A
        `relayout(self, weights)` without `on_progress` gets that parameter; it is not passed on.
        """
        super().__init_subclass__(**settings)
        if "run" in vars(cls):
            cls.run = _noted(cls.run)  # type: ignore[assignment]
        if "relayout" in vars(cls) and not _takes_progress(cls.relayout):
            cls.relayout = _with_progress(cls.relayout)  # type: ignore[method-assign]

    def __init__(self, context: ExpertsContext) -> None:
        self.context = context

    @abstractmethod
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Multiply tokens by their experts. `weights` is what `relayout` gave; padding is never read."""

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """Convert canonical or mapped weights to the layout that `run` reads, on its device. Never mutates them.

        on_progress: called with ("pack", bytes done, total bytes) by backends that convert on the host. An override
        may omit the parameter.
        """
        return on_device(weights, self.context.device)

    def fuse_shared_experts(self, weights: Weights, shared: Weights) -> Weights | None:
        """Weights with which `run` on rows adds the shared experts (one slot, weight 1) in the same pass; None: cannot.

        Both as `relayout` gave them. Only asked for where the rows are this rank's own tokens, each of them once.
        """
        return None

    def fuse_router(self, weights: Weights, gating: Gating, tables: PlacementTables, rank: int) -> FusedCall | None:
        """A call that routes, counts and multiplies at once, with the bits of the parts one by one; None: cannot.

        weights: of `relayout` or `fuse_shared_experts`. Called only where the rows are this rank's own bf16 tokens.
        """
        return None

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Every reason why this backend cannot serve the problem; empty if it can."""
        return reasons_of_traits(cls.traits, problem)

    @classmethod
    def priced(cls, problem: Problem, compute: QuantScheme) -> tuple[float | None, str]:
        """Measured microseconds of a run where there are any, and what the price rests on."""
        return None, "model"

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """The most bytes one run allocates for `rows` received rows, beyond its inputs and weights."""
        return default_workspace_bytes(problem, rows)


Run = Callable[[FusedExperts, Tokens, Weights], ExpertOutput]
FusedCall = Callable[[Tensor, Tensor], Tensor]
"""(T, H) and the load of the logical experts, int64 [E], which it adds to; to (T, H)."""


def _noted(run: Run) -> Run:
    """A `run` that notes which class ran; of a class that extends another's, only the last one."""

    @wraps(run)
    def noted(self: FusedExperts, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = run(self, tokens, weights)
        if type(self).run is noted:
            x = vars(tokens)[next(name for name in vars(tokens) if name.startswith("x_"))]
            self.context.spans.ledger.ran("experts", type(self), x.num_bytes + output.y.nbytes)
        return output

    return noted


def _takes_progress(relayout: Callable[..., Weights]) -> bool:
    """Whether a `relayout` can be called with on_progress."""
    parameters = inspect.signature(relayout).parameters.values()
    return any(each.name == "on_progress" or each.kind is each.VAR_KEYWORD for each in parameters)


def _with_progress(relayout: Callable[[FusedExperts, Weights], Weights]) -> Callable[..., Weights]:
    """A `relayout` that accepts on_progress and ignores it."""

    @wraps(relayout)
    def accepting(self: FusedExperts, weights: Weights, on_progress: Progress | None = None) -> Weights:
        return relayout(self, weights)

    return accepting


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
    if model.quant.kind not in traits.weights:
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
    if model.expert_bias and not traits.biases:
        reasons.append(Reason("bias", "adds no biases, the experts have them"))
    if problem.dtype.name not in traits.dtypes:
        reasons.append(Reason("dtype", f"computes in {_listed(traits.dtypes)}, the layer is {problem.dtype.name}"))
    if problem.config.kernel.batch_invariant and not traits.batch_invariant:
        said = "gives a row other bits in other batches"
        reasons.append(Reason("batch_invariant", said, "kernel.batch_invariant = false"))
    wish = problem.config.kernel.activations
    rounded = "plain" if problem.activations is None else problem.activations.family
    needed = {"checkpoint": {rounded}, "plain": {"plain"}, "auto": {rounded, "plain"}}[wish]
    if not needed & set(traits.computes):
        only = ", ".join(name if name == "plain" else name.upper() for name in traits.computes)
        fix = "" if wish == "auto" else "kernel.activations = auto"
        reasons.append(Reason("activations", f"multiplies with {only} activations only", fix))
    return reasons


def _listed(names: frozenset[str] | frozenset[int]) -> str:
    return ", ".join(str(name) for name in sorted(names))


EXPERTS: Registry[type[FusedExperts]] = Registry("experts backend", FusedExperts, group="moe_mk.experts")
