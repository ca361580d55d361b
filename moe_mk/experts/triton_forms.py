"""Which form the Triton kernels give to a type of weights, and which sizes they read."""

from __future__ import annotations

from moe_mk.config.problem import Problem, Reason
from moe_mk.kernels.triton.form import FORMS, Form
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.int8 import Int8Block
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
    if isinstance(weights, Int8Block):
        name = "int8" if weights.columns == WHOLE else "int8_block"
        return FORMS[("w_" if isinstance(compute, Plain) else "") + name]
    return FORMS[f"w_{weights.family}"]


def size_reasons(problem: Problem) -> list[Reason]:
    """Against plain weights in other dtypes than bf16, other INT8 blocks than kernels have, and sizes that fill no
    blocks and boxes.
    """
    model, stored, reasons = problem.config.model, problem.weights, []
    in_blocks = isinstance(stored, Int8Block) and stored.columns != WHOLE
    if in_blocks and set(model.quant.block) != {BLOCK}:
        sides = "x".join(map(str, model.quant.block))
        reasons.append(Reason("block", f"reads INT8 blocks with sides {BLOCK}, the experts have {sides}"))
    if isinstance(stored, Plain) and stored != BF16:
        reasons.append(Reason("weights", f"reads plain weights in bf16 alone, the experts are {stored.name}"))
    if (model.quant.is_fp8 or in_blocks) and problem.intermediate % BLOCK:
        text = f"reads hidden rows in groups of {BLOCK}, a rank has {problem.intermediate} columns of them"
        reasons.append(Reason("shape", text, f"a tp that leaves a multiple of {BLOCK}"))
    width = 2 if isinstance(stored, Plain) or stored.per_byte > 1 else 1  # bytes of what boxes read: rows or weights
    for name, size in (("hidden size", model.hidden_size), ("intermediate size", problem.intermediate)):
        if size * width % BOX_BYTES:
            text = f"reads rows in boxes that start at multiples of {BOX_BYTES} B, a {name} of {size} does not"
            reasons.append(Reason("shape", text))
    return reasons
