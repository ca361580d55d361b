"""What a library has promised but not delivered yet: poison until the moment it may be read."""

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


class Pending:
    """Contents that arrive later: `promise` hands out a poisoned tensor, `reveal` fills all of them, once."""

    def __init__(self) -> None:
        self._promised: list[tuple[Tensor, Tensor]] = []

    @property
    def open(self) -> bool:
        """Whether anything is still to be revealed."""
        return bool(self._promised)

    def promise(self, content: Tensor, into: Tensor | None = None) -> Tensor:
        """A tensor that will hold `content`: `into`, or a new one of its shape and strides; poisoned until then."""
        held = torch.empty_like(content) if into is None else into
        poison(held)
        self._promised.append((held, content))
        return held

    def reveal(self) -> None:
        """Deliver everything promised."""
        for held, content in self._promised:
            held.copy_(content)
        self._promised = []
