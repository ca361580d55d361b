"""`nccl.ep.Tensor`: a descriptor of memory, which is an address, sizes and a type. Strides are not part of it."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import torch

from moe_mk_contrib.emulated.nccl.core import NcclDataType, NcclInvalid, data_type

FREED = "CUDA error: an illegal memory access was encountered (a tensor was freed before the library was done with it)"


class Tensor:
    """Describes a torch tensor, and keeps it alive. The library reads it as contiguous, whatever its strides."""

    def __init__(
        self,
        buffer: Any,
        *,
        dtype: NcclDataType | int | None = None,
        shape: tuple[int, ...] | None = None,
        window: Any = None,
        window_offset: int | None = None,
    ) -> None:
        if isinstance(buffer, int) and not isinstance(buffer, bool):
            if dtype is None or shape is None:
                raise ValueError("Raw integer pointer requires `dtype` and `shape` kwargs")
            raise NotImplementedError("raw pointers are not emulated")
        if dtype is not None or shape is not None:
            raise ValueError("`dtype`/`shape` are only valid with a raw integer pointer")
        if not isinstance(buffer, torch.Tensor):
            raise NcclInvalid(f"Cannot resolve {type(buffer).__name__!r}: expected torch.Tensor")
        if window is None and window_offset is not None:
            raise NcclInvalid("`window_offset` is only valid when `window` is provided")
        if window is not None:
            raise NotImplementedError("windows are not emulated")
        self._buffer, self._sizes, self._datatype = buffer, tuple(buffer.shape), data_type(buffer.dtype)
        if not self._sizes:
            raise ValueError("Tensor requires at least one dimension")

    @property
    def ptr(self) -> int:
        """The address of the descriptor."""
        return id(self)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes."""
        return self._sizes

    @property
    def datatype(self) -> NcclDataType:
        """The element type."""
        return self._datatype

    @property
    def data(self) -> int:
        """The address of the memory."""
        return self._buffer.data_ptr()

    @property
    def buffer(self) -> torch.Tensor:
        """What was given."""
        return self._buffer


class Address:
    """What the library keeps of a descriptor between calls: the memory, which it does not keep alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.sizes, self.datatype = tensor.sizes, tensor.datatype
        self._buffer = weakref.ref(tensor.buffer)

    def read(self) -> torch.Tensor:
        """The memory as the library reads it: contiguous from its first element on."""
        buffer = self._buffer()
        if buffer is None:
            raise RuntimeError(FREED)
        strides = [prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes))]
        end = buffer.storage_offset() + prod(self.sizes)
        if end * buffer.element_size() > buffer.untyped_storage().nbytes():
            raise RuntimeError("CUDA error: an illegal memory access was encountered (a view ends behind its storage)")
        return buffer.as_strided(self.sizes, strides)


def read(tensor: Tensor) -> torch.Tensor:
    """The memory of a descriptor as the library reads it."""
    return Address(tensor).read()
