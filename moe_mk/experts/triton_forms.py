"""Which form the Triton kernels give to a type of weights, and which sizes they read."""

from __future__ import annotations

from moe_mk.config.problem import Problem, Reason
from moe_mk.kernels.triton.form import FORMS, Form
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme

BLOCK = 128
BOX_BYTES = 16
"""Rows that the tensor memory accelerator reads start at multiples of this."""


def form_of(weights: QuantScheme, compute: QuantScheme) -> Form:
    """How weights lie: for products of codes where activations are rounded, else weight-only."""
    if isinstance(weights, Plain):
        return FORMS["plain"]
    if isinstance(weights, Fp8Block):
        return FORMS[("w_" if isinstance(compute, Plain) else "") + ("fp8_row" if weights.columns == WHOLE else "fp8")]
    if weights.family == "int8" and not isinstance(compute, Plain):
        return FORMS["int8"]
    return FORMS[f"w_{weights.family}"]


def size_reasons(problem: Problem) -> list[Reason]:
    """Against plain weights in other dtypes than bf16, and against sizes that fill no blocks and boxes."""
    model, stored, reasons = problem.config.model, problem.weights, []
    if isinstance(stored, Plain) and stored != BF16:
        reasons.append(Reason("weights", f"reads plain weights in bf16 alone, the experts are {stored.name}"))
    if model.quant.is_fp8 and problem.intermediate % BLOCK:
        text = f"reads hidden rows in groups of {BLOCK}, a rank has {problem.intermediate} columns of them"
        reasons.append(Reason("shape", text, f"a tp that leaves a multiple of {BLOCK}"))
    width = 2 if isinstance(stored, Plain) or stored.per_byte > 1 else 1  # bytes of what boxes read: rows or weights
    for name, size in (("hidden size", model.hidden_size), ("intermediate size", problem.intermediate)):
        if size * width % BOX_BYTES:
            text = f"reads rows in boxes that start at multiples of {BOX_BYTES} B, a {name} of {size} does not"
            reasons.append(Reason("shape", text))
    return reasons
