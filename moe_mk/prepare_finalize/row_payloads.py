"""Rows of any wire scheme as the payloads of a library that moves rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.quant.tensor import QuantTensor


def payloads_of(x_TH: QuantTensor) -> list[Tensor]:
    """Values, then scales where the scheme has any: (T, X) each. Elements of one byte go as uint8, which all carry."""
    parts = [part for part in (x_TH.values, x_TH.scales) if part is not None]
    return [(part.view(torch.uint8) if part.element_size() == 1 else part).contiguous() for part in parts]


def rows_of(parts: Sequence[Tensor], like: QuantTensor) -> QuantTensor:
    """The rows that have arrived as `payloads_of(like)` left, in the dtypes of `like`."""
    scales = None if like.scales is None else parts[1].view(like.scales.dtype)
    return replace(like, values=parts[0].view(like.values.dtype), scales=scales)


def expect_room(x_TH: Tensor, context: TransportContext) -> None:
    """Raise ShapeError where a call brings more tokens than the windows of the library hold."""
    if x_TH.shape[0] > context.max_num_tokens:
        raise ShapeError(
            f"x has T={x_TH.shape[0]} tokens, a window holds {context.max_num_tokens} of each rank "
            "[kernel.max_num_tokens]; raise the limit or bring fewer tokens a call"
        )
