"""What a backend of FlashInfer serves of one type of weights, and every reason that follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_mk.config.problem import Problem, Reason
from moe_mk.quant.fp8_whole import Fp8Static
from moe_mk.quant.plain import Plain

Arch = tuple[int, int]


@dataclass(frozen=True)
class Served:
    """One type of weights as a library serves it, with its limits."""

    activations: tuple[str, ...]
    """Families the products can have: "plain", or what tokens are rounded to."""
    multiple: int
    """The hidden and the intermediate size are multiples of this."""
    oldest: Arch = (9, 0)
    newest: Arch | None = None
    """First and last compute capability with kernels for it; None: all newer ones."""
    calibrated: bool = False
    """Whether activations need a scale that is known beforehand."""
    flags: Mapping[str, bool] | None = None
    """What a call says beside the tensors."""


def reasons_of_served(problem: Problem, served: Served) -> Iterator[Reason]:
    """Of architecture, plain weights, activations and sizes, in this order."""
    yield from _arch_reasons(problem, served)
    if isinstance(problem.weights, Plain) and problem.weights != problem.dtype:
        text = f"reads plain weights in the layer's {problem.dtype.name} alone, the experts are {problem.weights.name}"
        yield Reason("weights", text)
    yield from _activation_reasons(problem, served)
    for name, size in (("hidden", problem.config.model.hidden_size), ("intermediate", problem.intermediate)):
        if size % served.multiple:
            text = f"needs sizes that are multiples of {served.multiple} for {problem.weights.name} weights"
            yield Reason("shape", f"{text}, the {name} size is {size}")


def _arch_reasons(problem: Problem, served: Served) -> Iterator[Reason]:
    """Why a CUDA device has no kernels for the weights; a profile without a compute capability is not asked."""
    arch, name = problem.device.arch, problem.weights.name
    if problem.device.kind != "cuda" or arch is None:
        return
    if arch < served.oldest:
        text = f"has {name} kernels from sm_{_digits(served.oldest)} on, this device is sm_{_digits(arch)}"
        yield Reason("arch", text)
    if served.newest is not None and arch > served.newest:
        text = f"has {name} kernels up to sm_{_digits(served.newest)}, this device is sm_{_digits(arch)}"
        yield Reason("arch", text)


def _activation_reasons(problem: Problem, served: Served) -> Iterator[Reason]:
    given, wants_plain = problem.activations, problem.config.kernel.activations == "plain"
    family = "plain" if given is None or wants_plain else given.family
    if family not in served.activations:
        only = " or ".join(each.upper() if each != "plain" else each for each in served.activations)
        text = f"multiplies {problem.weights.name} weights with {only} activations only"
        yield Reason("activations", text, "kernel.activations = auto" if wants_plain and given is not None else "")
    elif served.calibrated and not isinstance(given, Fp8Static):
        text = "needs a calibrated scale of activations, the checkpoint finds one a token"
        yield Reason("activations", text, "model.quant.input_scale = ...")


def _digits(arch: Arch) -> str:
    return "".join(map(str, arch))
