"""Weight formats other than the stored one: which are possible, and their cost in memory, speed and accuracy.

Weights that no backend reads as stored are requantised once, at load, unless kernel.fallback is off. The Decision
records the format that is used (`effect`) and every format that was rejected, with the reasons (`passed_over`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from moe_mk.config.problem import Problem
from moe_mk.config.quant import QuantConfig
from moe_mk.experts.base import EXPERTS
from moe_mk.oracle.cost import expert_bytes
from moe_mk.oracle.trust import reasons_of
from moe_mk.quant.gguf import GGUF, Gguf
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme

BLOCK = 128


@dataclass(frozen=True)
class RejectedFormat:
    """A weight format that no backend reads, or that only the reference does, and the reasons."""

    format: str
    why: str

    def __str__(self) -> str:
        return f"not held as {self.format}: {self.why}"


@dataclass(frozen=True)
class Effect:
    """The cost of holding weights in a format other than the stored one."""

    stored: str
    held: str
    memory: float
    """Bytes held over bytes stored."""
    rounding: float
    """Root mean square relative error that requantising adds to a weight; 0 where the new format holds every value."""
    speed: str

    def __str__(self) -> str:
        kept = "no rounding error is added"
        added = kept if self.rounding == 0 else f"rounding adds a relative error of {self.rounding:.1%}"
        return f"{self.stored} weights are held as {self.held}: {self.memory:.2f}x the memory; {added}; {self.speed}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "stored": self.stored, "held": self.held, "memory": round(self.memory, 4),
            "rounding": round(self.rounding, 5), "speed": self.speed,
        }  # fmt: skip


def held_in(quant: QuantConfig, problem: Problem) -> Problem:
    """The problem with the weights in this format."""
    model = problem.config.model.model_copy(update={"quant": quant})
    return replace(problem, config=problem.config.model_copy(update={"model": model}))


def in_native_form(problem: Problem) -> tuple[QuantConfig, ...]:
    """Types of GGUF in others that hold the same values, or on a CPU in bf16, for a backend that reads only those."""
    stored = problem.config.model.quant
    kinds: tuple[str, str] = stored.weights, stored.down or stored.weights
    held = {kind: GGUF[kind].blocks.held for kind in kinds if kind in GGUF and GGUF[kind].blocks.held}
    if not held or (problem.device.kind != "cpu" and "bf16" in held.values()):
        return ()
    first, down = (held.get(kind, kind) for kind in kinds)
    found = QuantConfig.parse({"weights": first, "down": down, "activations": "none"}, "held")
    pin, same = problem.config.kernel.experts, held_in(found, problem)
    able = (name for name in EXPERTS if pin in ("auto", name) and not reasons_of(EXPERTS, name, same))
    return (found,) if any(not EXPERTS[name].traits.weights >= held.keys() for name in able) else ()


def in_fp8(problem: Problem) -> QuantConfig:
    """FP8 in blocks of 128 x 128 with power-of-two scales; activations stay in the layer's dtype.

    Smaller blocks where 128 would not divide the slice of a tensor-parallel rank.
    """
    side = gcd(BLOCK, problem.intermediate) if problem.config.parallel.tp > 1 else BLOCK
    return QuantConfig(weights="fp8_block", block=(side, side), scale="ue8m0", activations="none")


def in_layer_dtype(problem: Problem) -> QuantConfig:
    """Weights dequantised to the layer's dtype at load, for experts that read plain weights."""
    return QuantConfig.parse({"weights": problem.dtype.name}, "a fallback")


def effect_of(problem: Problem, held: Problem) -> Effect | None:
    """The cost of holding the weights of a problem as in `held`; None if that is the stored format."""
    before, after = (each.config.model.quant for each in (problem, held))
    if before == after:
        return None
    stored, name = (" and ".join(dict.fromkeys((q.weight_scheme.name, q.down_scheme.name))) for q in (before, after))
    memory = expert_bytes(held) / expert_bytes(problem)
    if memory <= 1:
        speed = "decode reads no more bytes than in the stored format"
    else:
        speed = f"memory-bound decode takes up to {memory:.2f}x the time of a kernel for {stored}"
    down = added_rounding(before.down_scheme, after.down_scheme)
    rounding = max(added_rounding(problem.weights, held.weights), down)
    return Effect(stored, name, memory, rounding, speed)


def added_rounding(stored: QuantScheme, held: QuantScheme) -> float:
    """The relative RMS error added by requantising; 0 if every stored value is representable in the new format."""
    if stored == held or (isinstance(stored, Gguf) and stored.blocks.held == held.name and held != BF16):
        return 0.0
    if isinstance(held, Plain):
        # Every stored value is a code of at most 8 significant bits times a scale; only a scale that is no power of
        # two needs rounding to bf16.
        exact = stored.family in ("mxfp4", "mxfp8")
        return 0.0 if exact else held.relative_rms
    # e2m1 codes under E8M0 scales are e4m3 numbers under a coarser power of two, unless scales differ by 2^9.
    return 0.0 if stored.family == "mxfp4" else held.relative_rms
