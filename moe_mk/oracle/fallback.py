"""The forms that weights may be held in, and what a form other than the stored one costs: memory, speed, accuracy.

Weights that no backend reads as they are stored are requantised once at load: never silently, and never if
kernel.fallback is off. A Decision lists every form that was passed over, and why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from moe_mk.config.problem import Problem
from moe_mk.config.quant import QuantConfig
from moe_mk.oracle.cost import expert_bytes
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme

BLOCK = 128


@dataclass(frozen=True)
class Form:
    """One way to hold the weights of a problem."""

    quant: QuantConfig
    stored: QuantConfig

    @property
    def is_stored(self) -> bool:
        """Whether nothing is requantised."""
        return self.quant == self.stored

    def of(self, problem: Problem) -> Problem:
        """The problem as it would be with the weights held in this form."""
        if self.is_stored:
            return problem
        model = problem.config.model.model_copy(update={"quant": self.quant})
        return replace(problem, config=problem.config.model_copy(update={"model": model}))


@dataclass(frozen=True)
class PassedOver:
    """A form that was not taken."""

    form: str
    why: str

    def __str__(self) -> str:
        return f"not held as {self.form}: {self.why}"


@dataclass(frozen=True)
class Effect:
    """What holding weights in another form than the stored one does."""

    stored: str
    held: str
    memory: float
    """Bytes held, relative to those stored."""
    rounding: float
    """Root mean square relative error that requantising adds to a weight; 0 where the new format holds every value."""
    speed: str

    def __str__(self) -> str:
        kept = "no rounding is added to weights"
        added = kept if self.rounding == 0 else f"weights are rounded once more, by {self.rounding:.1%}"
        return f"{self.stored} weights are held as {self.held}: {self.memory:.2f}x the memory; {added}; {self.speed}"

    def as_dict(self) -> dict[str, Any]:
        """The effect as JSON."""
        return {
            "stored": self.stored, "held": self.held, "memory": round(self.memory, 4),
            "rounding": round(self.rounding, 5), "speed": self.speed,
        }  # fmt: skip


def as_stored(problem: Problem) -> Form:
    """Nothing is changed."""
    quant = problem.config.model.quant
    return Form(quant, quant)


def in_fp8(problem: Problem) -> Form:
    """FP8 in blocks of 128 x 128 with power-of-two scales; activations stay in the layer's dtype.

    Smaller blocks where 128 would not divide the slice of a tensor-parallel rank.
    """
    side = gcd(BLOCK, problem.intermediate) if problem.config.parallel.tp > 1 else BLOCK
    quant = QuantConfig(weights="fp8_block", block=(side, side), scale="ue8m0", activations="none")
    return Form(quant, problem.config.model.quant)


def in_layer_dtype(problem: Problem) -> Form:
    """Decoded once, for experts that read plain weights."""
    return Form(QuantConfig.parse({"weights": problem.dtype.name}, "a fallback"), problem.config.model.quant)


def effect_of(form: Form, problem: Problem) -> Effect | None:
    """What a form does to a problem of the stored type; None where nothing is changed."""
    if form.is_stored:
        return None
    held = form.of(problem)
    memory = expert_bytes(held) / expert_bytes(problem)
    if memory <= 1:
        speed = "decoding reads no more bytes than before"
    else:
        stored = problem.weights.name
        speed = f"a decode that is bound by memory takes up to {memory:.2f}x the time of a kernel for {stored}"
    return Effect(problem.weights.name, held.weights.name, memory, added_rounding(problem.weights, held.weights), speed)


def added_rounding(stored: QuantScheme, held: QuantScheme) -> float:
    """The error of requantising: none where four-bit floats or FP8 codes times powers of two stay what they are."""
    if isinstance(held, Plain):
        # Every stored value is a code of at most 8 significant bits times a scale; only a scale that is no power of
        # two needs rounding to bf16.
        exact = stored.family in ("mxfp4", "mxfp8")
        return 0.0 if exact else held.relative_rms
    # e2m1 codes under E8M0 scales are e4m3 numbers under a coarser power of two, unless scales differ by 2^9.
    return 0.0 if stored.family == "mxfp4" else held.relative_rms
