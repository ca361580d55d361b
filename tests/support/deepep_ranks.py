"""Questions about the DeepEP family, and its transports on two ranks of threads."""

from typing import Any

from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme
from tests.support.library_ranks import LIBRARIES, ROUTINGS, Ranks, X, problem, small

XB = [x.bfloat16() for x in X]

asked = problem
__all__ = ["LIBRARIES", "ROUTINGS", "XB", "Ranks", "asked", "ranks_of", "small"]


def ranks_of(name: str, wire: QuantScheme = BF16, **more: Any) -> Ranks:
    """Two ranks with two experts each, rows of two bf16 numbers."""
    return Ranks(name, wire=wire, dtype=BF16, **more)
