"""Ways in which the values of a tensor that something was prepared from change."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _put(owner: Any, name: str, tensor: Tensor) -> None:
    """Replace an attribute by another object, of the same kind."""
    is_parameter = isinstance(getattr(owner, name), nn.Parameter)
    if isinstance(owner, nn.Module):
        delattr(owner, name)
        if is_parameter:
            setattr(owner, name, nn.Parameter(tensor, requires_grad=False))
        else:
            owner.register_buffer(name, tensor)
    else:
        setattr(owner, name, tensor)


def _in_memory(memory: bytearray, like: Tensor, values: Tensor) -> Tensor:
    """A tensor at a fixed address, of version 0, with a storage of its own."""
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=values.nbytes)
    flat.copy_(values.to(like.dtype).contiguous().view(-1).view(torch.uint8))
    del flat
    return torch.frombuffer(memory, dtype=like.dtype, count=values.numel()).view(like.shape)


def _spread(values: Tensor) -> Tensor:
    """The same values, every other element of a tensor that is twice as wide."""
    wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 1e3, dtype=values.dtype, device=values.device)
    wide[..., ::2] = values
    return wide[..., ::2]


def _twice(put: Callable[[Any, str, Tensor], None]) -> Callable[[Any, str, Tensor, Callable[[], object]], None]:
    """Put tensors at one address one after the other, with a call of what is prepared in between."""

    def change(owner: Any, name: str, values: Tensor, call: Callable[[], object]) -> None:
        held = getattr(owner, name)
        memory = bytearray(values.nbytes + 64)
        put(owner, name, _in_memory(memory, held, held.detach().clone()))
        call()
        address = getattr(owner, name).data_ptr()
        put(owner, name, torch.empty_like(values))  # frees the storage, not the memory
        put(owner, name, _in_memory(memory, held, values))
        assert getattr(owner, name).data_ptr() == address

    return change


def _strides(owner: Any, name: str, values: Tensor, call: Callable[[], object]) -> None:
    """The same address, with other strides."""
    held = getattr(owner, name)
    wide = _spread(values)._base
    assert wide is not None
    held.data = wide.as_strided(values.shape, values.stride())
    call()
    held.data = wide[..., ::2]
    assert held.data_ptr() == wide.data_ptr()


def _data(owner: Any, name: str, tensor: Tensor) -> None:
    getattr(owner, name).data = tensor


def _shared(owner: Any, name: str, values: Tensor, call: Callable[[], object]) -> None:
    call()
    held = getattr(owner, name)
    held.detach().copy_(values)
    held.share_memory_()


Change = Callable[[Any, str, Tensor, Callable[[], object]], None]
CHANGES: dict[str, Change] = {
    "write": lambda owner, name, values, call: getattr(owner, name).detach().copy_(values),
    "object": lambda owner, name, values, call: _put(owner, name, values.clone()),
    "object_at_the_address": _twice(_put),
    "data": lambda owner, name, values, call: _data(owner, name, values.clone()),
    "data_at_the_address": _twice(_data),
    "strided_object": lambda owner, name, values, call: _put(owner, name, _spread(values)),
    "strided_data": lambda owner, name, values, call: _data(owner, name, _spread(values)),
    "other_strides": _strides,
    "shared_memory": _shared,
}
"""change(owner, name, values, call): give the tensor `owner.name` these values. call: uses what was prepared before."""
