"""The bits of inputs and outputs of a backend, to check that inputs are unchanged and that two calls agree."""

from __future__ import annotations

import torch
from torch import Tensor


def bits_of(*holders: object) -> tuple[bytes, ...]:
    """The bytes of tensors, and of every tensor in dataclasses, nested ones included."""
    found: list[bytes] = []
    for holder in holders:
        if isinstance(holder, Tensor):
            flat = holder.detach().contiguous().flatten().view(torch.uint8)
            found.append(bytes(flat.cpu().numpy().tobytes()))
        elif hasattr(holder, "__dataclass_fields__"):
            found += bits_of(*vars(holder).values())
    return tuple(found)


def equal_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal one by one."""
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
