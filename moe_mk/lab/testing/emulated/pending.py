"""Tensors that a library has not delivered yet: NaN until they may be read."""

from __future__ import annotations

import torch
from torch import Tensor


def poison(tensor: Tensor) -> Tensor:
    """Fill in place with poison: NaN where there is one, else the most absurd number of the dtype."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        return tensor.fill_(torch.nan)
    if tensor.dtype.itemsize == 1 and tensor.dtype not in (torch.bool, torch.int8):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in e4m3fn, e5m2 and e8m0
        return tensor
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)
