"""The interface of a compute backend: w13 -> activation -> w2 over the experts of one rank.

A backend is independent of communication. To add one, register a class:

    @EXPERTS.register("my_experts")
    class MyExperts(FusedExperts):
        traits = ExpertsTraits(summary="...", emits={RowTokens: OutputStage.REDUCED}, ...)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from moe_mk.config.moe import KernelConfig, ResidencyConfig
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.traits import Traits, common_reasons
from moe_mk.experts.residency import ResidencyPool
from moe_mk.external.device import without_autocast
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import AFFINE, GROUPED
from moe_mk.quant.kinds import FORMATS, KINDS, PLAIN_KINDS, WEIGHT_ONLY_KINDS
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import Registry
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.trace.recorder import Spans
from moe_mk.weights.expert_weights import CANONICAL, MAPPED, Weights, on_device
from moe_mk.weights.scan import Progress

if TYPE_CHECKING:
    from moe_mk.kernels.native.layer import PreparedExperts

QUANTISED = tuple(kind for kind in KINDS if kind not in PLAIN_KINDS)
"""Every weight format with scales, without the weight-only ones."""
WEIGHT_ONLY = WEIGHT_ONLY_KINDS


@dataclass(frozen=True, kw_only=True)
class ExpertsTraits(Traits):
    """Static properties of an experts backend."""

    emits: Mapping[type, OutputStage]
    """The supported token layouts, best first, each with the stage of its output."""
    weights: frozenset[str]
    """Supported weight formats: "plain", or a value of model.quant.weights such as "fp8_block"."""
    decodes: bool = False
    """Whether weights are read through their scheme (`QuantTensor.dequantize`), so that number formats of other
    distributions are supported as well."""
    mixed_weights: bool = False
    """Whether the down projection may have another of these formats than gate and up (model.quant.down)."""
    computes: tuple[str, ...]
    """Activation formats of the products, best first: "plain" (the layer's dtype), or the family of a checkpoint's
    activations ("fp8", "int8", "mxfp8", ...)."""
    weight_only_computes: tuple[str, ...] = ("plain",)
    """The same for weights without activations of their own: integers in groups, and blocks of GGUF."""
    layouts: frozenset[str] = frozenset({CANONICAL, MAPPED})
    """Weight layouts that `relayout` accepts."""
    activations: frozenset[str] = frozenset({"silu", "gelu", "gelu_tanh", "relu2"})
    biases: bool = False
    """Whether expert biases are supported."""
    dtypes: frozenset[str] = frozenset({"bf16", "fp16", "fp32"})
    block_sides: frozenset[int] = frozenset()
    """Supported side lengths of FP8 blocks; empty: any."""
    bandwidth: float = 0.01
    """Estimated fraction of the device's memory bandwidth reached when reading weights; used until measured. The
    defaults of estimates are those of the reference."""
    compute: float = 0.02
    """Estimated fraction of the device's matrix throughput; used until measured."""
    definition: bool = False
    """Whether it is a reference implementation, which is ignored when a fallback weight format is considered."""
    batch_invariant: bool = False
    """Whether the result of a row is bit-identical in every batch when kernel.batch_invariant is set."""
    copies_weights: bool = False
    """Whether `relayout` copies expert by expert on the host, so that one expert is held twice at a time."""
    pages: bool = False
    """Whether experts may be larger than memory, `kernel.residency`."""
    launches: int = 12
    """Operator calls per run, or per active expert if `per_expert`."""
    per_expert: bool = True
    estimate: str = "model"
    """The source of its estimated time; other words for what was never measured."""

    def computes_with(self, weights: str) -> tuple[str, ...]:
        """Activation formats of the products with a weight format, best first. weights: as of model.quant.weights."""
        return self.weight_only_computes if weights in WEIGHT_ONLY else self.computes

    @property
    def consumes(self) -> tuple[type, ...]:
        """The supported token layouts, best first."""
        return tuple(self.emits)


@dataclass(frozen=True)
class ExpertsContext:
    """The arguments of an experts backend."""

    dtype: Plain
    """The output dtype, also the compute dtype of "plain"."""
    compute: QuantScheme
    """The scheme activations are quantised to before each GEMM; the dtype itself means no quantisation."""
    activation: str
    """The activation function between the products, a name of `ExpertsTraits.activations`."""
    num_slots: int
    """L, the physical experts of this rank."""
    hidden_size: int
    """H, the width of rows."""
    intermediate_size: int
    """I, of this rank where TP ranks share it out."""
    device: torch.device
    """Where tokens and weights are."""
    spans: Spans = field(default_factory=Spans)
    """Records times of stages: `with self.context.spans.span("name")`."""
    batch_invariant: bool = False
    """Whether the result of a row must not depend on the other rows of its batch."""
    own_threads: bool = False
    """Whether native CPU kernels use threads of their own, not those of torch."""
    instruction_set: str = "auto"
    """Of native CPU kernels, see `KernelConfig`."""
    cache_dir: Path | None = None
    """The folder of compiled CPU kernels; None: as in `KernelConfig`."""
    tuned_dir: Path | None = None
    """The folder of tuned parameters; None: as in `KernelConfig`."""
    residency: ResidencyConfig | None = None
    """Slots and store of experts larger than memory; None: all are in memory."""
    pool: ResidencyPool | None = None
    """Where their memory is from; None: a pool of this layer alone."""
    timeout_s: float = KernelConfig().timeout_s
    """How long a call waits for an expert that is read, or for another call of its layer."""
    swiglu_limit: float | None = None
    """Clamp limit of the clamped activations."""
    swiglu_alpha: float = 1.0
    """Factor inside the sigmoid of the clamped activations."""
    weights: QuantScheme | None = None
    """Scheme of the weights; set only for `tuning_space`, which is called without weights."""
    top_k: int | None = None
    """Experts per token; set only for `tuning_space`."""


class FusedExperts(ABC):
    """A compute backend: multiplies the rows of this rank by its experts."""

    traits: ClassVar[ExpertsTraits]

    def __init__(self, context: ExpertsContext) -> None:
        self.context = context

    @without_autocast
    def __call__(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """`run` outside of autocast, recorded by class: a backend that calls another one is visible in the report."""
        output = self.run(tokens, weights)
        if isinstance(tokens, RowTokens):
            x = tokens.x_RH
        else:
            x = tokens.x_NH if isinstance(tokens, GroupedTokens) else tokens.x_LSH
        num_bytes = x.values.nbytes if x.scales is None else x.num_bytes
        self.context.spans.ledger.ran("experts", type(self), num_bytes + output.y.nbytes)
        return output

    @abstractmethod
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Apply the experts to their tokens. weights: as returned by `relayout`. Padding is never read."""

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """Convert canonical or mapped weights to the layout that `run` reads, on its device. Never mutates them.

        on_progress: called with ("pack", bytes done, total bytes) by backends that convert on the host.
        """
        return on_device(weights, self.context.device)

    def parameters(self) -> str:
        """How the kernel parameters in use were chosen, for the decision. "": there are none, or before `relayout`."""
        return ""

    def numerics(self, weights: Weights) -> str:
        """Name the choice of this machine on which bits depend, and the setting that pins it; "" without one.

        weights: as returned by `relayout`. Ranks whose texts differ raise CommError.
        """
        return ""

    def fuse_shared_experts(self, weights: Weights, shared: Weights) -> Weights | None:
        """Weights with which `run` on RowTokens also adds the shared experts (one slot, weight 1); None: not supported.

        weights, shared: as returned by `relayout`. Called only if the rows are this rank's own tokens, each once.
        """
        return None

    def fuse_layer(self, weights: Weights, top_k: int) -> PreparedExperts | None:
        """The experts for one call of a whole layer on rows with `top_k` choices each; None: not supported.

        Called only if the class of the backend defines it itself; `explain()` names derived classes that do not.
        Bit-identical to `run`. weights: of `relayout` or `fuse_shared_experts`.
        """
        return None

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """All reasons why this backend cannot run the problem; empty if it can."""
        return reasons_of_traits(cls.traits, problem)

    @classmethod
    def priced(cls, problem: Problem, compute: QuantScheme) -> tuple[float | None, str]:
        """Measured microseconds of a run or None, and the source of the estimate."""
        return None, cls.traits.estimate

    @classmethod
    def slot_bytes(cls, problem: Problem) -> int:
        """Bytes of one slot of `kernel.residency`; only of backends that support it."""
        raise NotImplementedError(f"{cls.__name__} keeps all experts in memory")

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Upper bound of the bytes one run allocates for `rows` received rows, beyond its inputs and weights."""
        return default_workspace_bytes(problem, rows)


def default_workspace_bytes(problem: Problem, rows: int) -> int:
    """The row, the intermediates and the output of every assignment, in f32 and at the same time."""
    assignments = rows * problem.config.router.top_k
    width = 2 * problem.config.model.hidden_size + 3 * problem.intermediate
    return assignments * width * 4


def reasons_of_traits(traits: ExpertsTraits, problem: Problem) -> list[Reason]:
    """All reasons against a problem that follow from the traits of an experts backend."""
    return [*common_reasons(traits, problem), *_format_reasons(traits, problem)]


def _format_reasons(traits: ExpertsTraits, problem: Problem) -> list[Reason]:
    model, reasons = problem.config.model, []
    held = {model.quant.kind, model.quant.kind if model.quant.down is None else model.quant.down}
    read = {*traits.weights, *(PLAIN_KINDS if "plain" in traits.weights else ())}
    if any(kind in FORMATS.built_in or not traits.decodes for kind in held - read):
        stored = problem.weights.name if model.quant.down is None else " and ".join(sorted(held))
        reasons.append(Reason("weights", f"reads {_kinds(traits.weights)} weights, the experts are {stored}"))
    elif len(held) > 1 and not traits.mixed_weights:
        text = f"reads one format for all projections, the experts have {' and '.join(sorted(held))}"
        reasons.append(Reason("weights", text))
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
    kernel = problem.config.kernel
    if (kernel.batch_invariant or kernel.invariant) and not traits.batch_invariant:
        asked = "batch_invariant" if kernel.batch_invariant else "invariant"
        text = "gives a row other bits in other batches"
        reasons.append(Reason("batch_invariant", text, f"kernel.{asked} = false"))
    if kernel.residency is not None and not traits.pages:
        text = "keeps all experts in memory, and kernel.residency asks for a part of them"
        reasons.append(Reason("residency", text, "kernel.experts = cpu_native or triton, or kernel.residency = null"))
    wish = problem.config.kernel.activations
    rounded = "plain" if problem.activations is None else problem.activations.family
    needed = {"plain": {"plain"}, "auto": {rounded, "plain"}}.get(wish, {rounded})
    computes = traits.computes_with(model.quant.weights)
    if not needed & set(computes):
        only = ", ".join(name if name == "plain" else name.upper() for name in computes)
        fix = "" if wish == "auto" else "kernel.activations = auto"
        reasons.append(Reason("activations", f"multiplies with {only} activations only", fix))
    return reasons


def _kinds(weights: frozenset[str]) -> str:
    """Formats of weights in short: all weight-only ones as two words."""
    named = {"GGUF": frozenset(GGUF), "grouped integer": frozenset(GROUPED) - AFFINE, "affine integer": AFFINE}
    short = {word for word, kinds in named.items() if kinds <= weights}
    return _listed(weights - {kind for word in short for kind in named[word]} | short)


def _listed(names: frozenset[str] | frozenset[int]) -> str:
    return ", ".join(str(name) for name in sorted(names))


EXPERTS: Registry[type[FusedExperts]] = Registry("experts backend", FusedExperts, group="moe_mk.experts")
