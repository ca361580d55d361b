"""Backend selection: chooses a transport and an experts backend, and records the reasons against all others."""

from types import ModuleType

from moe_mk.config.problem import Problem
from moe_mk.errors import expect_kind
from moe_mk.oracle import formats
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, Oracle
from moe_mk.oracle.decide import decide, libraries_of
from moe_mk.oracle.trust import is_named
from moe_mk.oracle.verdict import Decision, Verdict


def __getattr__(name: str) -> ModuleType:
    """`oracle.fp8`, and so on for every built-in oracle."""
    if name in formats.BUILT_IN:
        return formats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def select(problem: Problem) -> Decision:
    """Decide with the oracle of the problem's quantisation type; one that `kernel.trust` names comes first.

    Raises UnsupportedError with all reasons if no pair is eligible.
    """
    expect_kind("problem", problem, Problem)
    stored = problem.config.model.quant.weights
    allowed = [name for name in ORACLES if is_named(ORACLES, name, problem)]
    for name in sorted(allowed, key=ORACLES.is_foreign, reverse=True):
        if stored in ORACLES[name].stored:
            return decide(problem, ORACLES[name])
    return decide(problem, formats.declared(stored, {stored}))  # a number format of another distribution


__all__ = [
    "ORACLES", "Decision", "Oracle", "Parts", "Problem", "Verdict", "assemble", "decide",
    "libraries_of", "select",
]  # fmt: skip
