"""Backend selection: chooses a transport and an experts backend, and records the reasons against all others."""

from moe_mk.config.problem import Problem
from moe_mk.errors import ConfigError, expect_kind
from moe_mk.oracle import formats
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, Oracle
from moe_mk.oracle.decide import decide, libraries_of
from moe_mk.oracle.trust import is_named
from moe_mk.oracle.verdict import Decision, Verdict

fp8 = gguf = int8 = int_wna16 = mxfp4 = mxfp8 = nvfp4 = unquantized = formats


def select(problem: Problem) -> Decision:
    """Decide with the oracle of the problem's quantisation type; one that `kernel.trust` names comes first.

    Raises ConfigError if no oracle serves the type, UnsupportedError with all reasons if no pair is eligible.
    """
    expect_kind("problem", problem, Problem)
    stored = problem.config.model.quant.weights
    allowed = [name for name in ORACLES if is_named(ORACLES, name, problem)]
    for name in sorted(allowed, key=ORACLES.is_foreign, reverse=True):
        if stored in ORACLES[name].stored:
            return decide(problem, ORACLES[name])
    raise ConfigError(f"no oracle serves experts stored as {stored!r}; registered: {', '.join(ORACLES)}")


__all__ = [
    "ORACLES", "Decision", "Oracle", "Parts", "Problem", "Verdict", "assemble", "decide", "fp8", "gguf",
    "int8", "int_wna16",    "libraries_of", "mxfp4", "mxfp8", "nvfp4", "select", "unquantized",
]  # fmt: skip
