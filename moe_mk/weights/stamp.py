"""Whether tensors are still those that something was prepared from: the rule for everything kept between calls.

An address alone is not enough: freed memory is used again, and a tensor there may have the same shape and version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Stamp:
    """The memory, the shape and the version of tensors, for what was computed from their values.

    The tensors are not kept alive. A weak reference to a storage keeps its number from being given to another one.
    Writes through `.data` and to inference tensors are not seen: torch does not count them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._parts = [_part(tensor) for tensor in tensors]
        """Of each: a weak reference to its storage, address, dtype, shape, strides and version."""

    def __reduce__(self) -> tuple[type[Stamp], tuple[tuple[Tensor, ...]]]:
        """A copy is a stamp of no tensors: it cannot count as another reference to a storage."""
        return Stamp, ((),)

    @property
    def is_gone(self) -> bool:
        """Whether the memory of one of the tensors was freed."""
        return any(storage.expired() for storage, *_ in self._parts)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, neither replaced nor moved, cast or written to."""
        if len(tensors) != len(self._parts):
            return False
        for tensor, (storage, *place) in zip(tensors, self._parts, strict=True):  # at every call: no frames of its own
            now = [tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()]
            if now != place[:-1] or tensor.untyped_storage()._cdata != storage.cdata:
                return False
            if place[-1] != (0 if tensor.is_inference() else tensor._version):
                return False
        return True


def _part(tensor: Tensor) -> tuple[Any, ...]:
    storage: object = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    version = 0 if tensor.is_inference() else tensor._version
    return storage, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version


def storages_of(held: object) -> set[int]:
    """The addresses of the storages of all tensors in the fields of an object, in any layout of weights."""
    if isinstance(held, Tensor):
        return set() if held.device.type == "meta" else {held.untyped_storage().data_ptr()}
    inner: Sequence[object] = held if isinstance(held, tuple | list) else ()
    if is_dataclass(held):
        inner = [getattr(held, field.name) for field in fields(held)]
    return {address for each in inner for address in storages_of(each)}
