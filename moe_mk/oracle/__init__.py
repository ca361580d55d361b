"""Backend selection: chooses a transport and an experts backend, and records the reasons against all others."""

from moe_mk.config.problem import Problem
from moe_mk.errors import ConfigError
from moe_mk.oracle import formats
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.base import ORACLES, Oracle
from moe_mk.oracle.decide import decide, libraries_of
from moe_mk.oracle.verdict import Decision, Verdict

fp8 = gguf = int8 = int_wna16 = mxfp4 = mxfp8 = nvfp4 = unquantized = formats


def select(problem: Problem) -> Decision:
    """Decide with the oracle of the problem's quantisation type.

    Raises ConfigError if no oracle serves the type, UnsupportedError with all reasons if no pair is eligible.
    """
    stored = problem.config.model.quant.weights
    for _, oracle in ORACLES.items():
        if stored in oracle.stored:
            return decide(problem, oracle)
    raise ConfigError(f"no oracle serves experts stored as {stored!r}; registered: {', '.join(ORACLES)}")


__all__ = [
    "ORACLES", "Decision", "Oracle", "Parts", "Problem", "Verdict", "assemble", "decide", "fp8", "gguf",
    "int8", "int_wna16",    "libraries_of", "mxfp4", "mxfp8", "nvfp4", "select", "unquantized",
]  # fmt: skip
