"""INT8, symmetric: values from -127 to 127 with an f32 scale for a row (channel, token), a group of it, or a block.

Source: SmoothQuant (arXiv 2211.10438) for W8A8 with scales per channel and per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.kernels.reference.quantize import linear_scales
from moe_mk.quant.blocked import INT8, WHOLE, BlockedScheme
from moe_mk.quant.tensor import QuantTensor

TYPICAL_WIDTH = 8192
"""Values under one scale of a whole row, for the error that is expected of it."""


@dataclass(frozen=True)
class Int8Block(BlockedScheme):
    """INT8 values, one scale for every block of `rows` x `columns`."""

    name: str
    rows: int
    columns: int
    hidden_columns: int | None = None
    """Of activations, where the rows between the two products have other groups; None: the same."""
    family, element, scale_dtype = "int8", INT8, torch.float32

    @property
    def hidden(self) -> Int8Block:
        """This scheme with the groups of the rows between the two products."""
        return self if self.hidden_columns is None else int8_groups(self.hidden_columns)

    @property
    def relative_rms(self) -> float:
        """The spacing is amax / 127 for all values of a block.

        Gated hidden rows are products of two normals, whose tail falls like exp(-x): the largest of n is about ln n.
        """
        crest = math.log(min(self.rows, TYPICAL_WIDTH) * min(self.columns, TYPICAL_WIDTH))
        return crest / INT8.largest / math.sqrt(12.0)

    def quantize(self, x: Tensor) -> QuantTensor:
        return self.by_amax(x, lambda amax: linear_scales(amax, INT8.largest))


INT8_CHANNEL = Int8Block("int8_channel", 1, WHOLE)
"""Weights: one scale per output channel."""
INT8_TOKEN = Int8Block("int8_token", 1, WHOLE)
"""Activations: one dynamic scale per token."""
INT8_128x128 = Int8Block("int8_128x128", 128, 128)


def int8_groups(columns: int, hidden_columns: int | None = None) -> Int8Block:
    """Activations: one dynamic scale for each group of columns of a token, as the groups of its weights.

    hidden_columns: the groups of the rows between the two products, where down projections have others.
    """
    if hidden_columns in (None, columns):
        return Int8Block(f"int8_1x{columns}", 1, columns)
    return Int8Block(f"int8_1x{columns}_1x{hidden_columns}", 1, columns, hidden_columns)
