"""One expert as bytes and back: every tensor it has, values and scales, in one fixed order.

A backend's own layout is made anew from what arrives, so that nothing derived from old weights can be left behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.weights.expert_weights import SlotWeights


def read_bytes(slot: SlotWeights, start: int, stop: int) -> Tensor:
    """Bytes [start, stop) of an expert, copied."""
    pieces = []
    for tensor in slot.tensors:
        size = tensor.nbytes
        if start < size and stop > 0:
            pieces.append(flat_bytes(tensor)[max(start, 0) : stop])
        start, stop = start - size, stop - size
    return torch.cat(pieces)


def flat_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as uint8, a view where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


class ReceivedExpert:
    """Memory of its own for an expert that is arriving piece by piece."""

    def __init__(self, like: SlotWeights) -> None:
        """like: any expert of the layer; gives shapes and formats."""
        self.slot = like.changed(lambda part: torch.empty(part.shape, dtype=part.dtype, device=part.device))
        self.received = 0

    def write(self, piece: Tensor) -> None:
        start = self.received
        stop = start + len(piece)
        for tensor in self.slot.tensors:
            target = flat_bytes(tensor)
            low, high = max(start, 0), min(stop, len(target))
            if low < high:
                target[low:high] = piece[low - start : high - start].to(target.device)
            start, stop = start - len(target), stop - len(target)
        self.received += len(piece)


def checksum(data: Tensor) -> int:
    """64 bits that change when any byte does, or when two words trade places. Reads the result on the host."""
    padded = torch.zeros(-(-len(data) // 8) * 8, dtype=torch.uint8, device=data.device)
    padded[: len(data)] = data
    words = padded.view(torch.int64)
    odd = 2 * torch.arange(len(words), dtype=torch.int64, device=data.device) + 1
    # Odd factors can be undone modulo 2^64, so that no single change cancels; the constant distinguishes lengths.
    return int((words * odd * 0x5851F42D4C957F2D).sum()) ^ len(data)
