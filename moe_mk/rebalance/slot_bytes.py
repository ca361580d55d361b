"""One expert as bytes and back: every tensor it has, values and scales, in one fixed order.

A backend's own layout is made anew from what arrives, so that nothing derived from old weights can be left behind.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.expert_weights import SlotBiases, SlotWeights


def tensors_of(slot: SlotWeights) -> list[Tensor]:
    """All tensors of an expert, in the order they travel."""
    matrices = [q for q in (slot.gate_IH, slot.up_IH, slot.down_HI) if q is not None]
    biases = () if slot.biases is None else slot.biases.tensors
    return [*(t for q in matrices for t in (q.values, q.scales, q.zeros, q.global_scale) if t is not None), *biases]


def num_bytes(slot: SlotWeights) -> int:
    """Bytes of one expert; the same for all experts of a layer."""
    return sum(t.numel() * t.element_size() for t in tensors_of(slot))


def read_bytes(slot: SlotWeights, start: int, stop: int) -> Tensor:
    """Bytes [start, stop) of an expert, copied."""
    pieces = []
    for tensor in tensors_of(slot):
        size = tensor.numel() * tensor.element_size()
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
        self.slot = SlotWeights(
            None if like.gate_IH is None else _empty(like.gate_IH),
            _empty(like.up_IH),
            _empty(like.down_HI),
            None if like.biases is None else _empty_biases(like.biases),
        )
        self.received = 0

    def write(self, piece: Tensor) -> None:
        start = self.received
        stop = start + len(piece)
        for tensor in tensors_of(self.slot):
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


def _empty_biases(like: SlotBiases) -> SlotBiases:
    gate_I = None if like.gate_I is None else torch.empty_like(like.gate_I)
    return SlotBiases(gate_I, torch.empty_like(like.up_I), torch.empty_like(like.down_H))


def _empty(q: QuantTensor) -> QuantTensor:
    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    values = like(q.values)
    assert values is not None
    return replace(q, values=values, scales=like(q.scales), zeros=like(q.zeros), global_scale=like(q.global_scale))
