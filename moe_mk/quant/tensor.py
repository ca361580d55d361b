"""A quantised tensor: values, scales and scheme. Its shape is logical, independent of packing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor


class QuantScheme(ABC):
    """A conversion of numbers to bytes and back. Schemes with the same name are equal."""

    name: str
    has_global_scale: ClassVar[bool] = False
    """Whether the matrix has an additional global f32 scale."""

    @property
    def family(self) -> str:
        """The format family: such as plain, fp8, int8, mxfp8, wna16 or gguf."""
        return "plain"

    @property
    def per_byte(self) -> int:
        """Values along a row that share whole elements of the tensor that holds them: 2 for four-bit formats."""
        return 1

    def held_columns(self, columns: int) -> int:
        """Elements of a row of the tensor that holds a row of this many columns."""
        return columns // self.per_byte

    def logical_columns(self, held: int) -> int:
        """Columns of a row of which the tensor holds this many elements."""
        return held * self.per_byte

    @property
    @abstractmethod
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) that share a scale; None without scales."""

    @property
    @abstractmethod
    def relative_rms(self) -> float:
        """Root mean square of the relative rounding error of one element, for limits derived from the format."""

    @property
    def hidden(self) -> QuantScheme:
        """The scheme of the rows between the two products, for experts that quantise their input to this scheme."""
        return self

    @abstractmethod
    def quantize(self, x: Tensor) -> QuantTensor:
        """Quantise the last two dimensions (rows, columns)."""

    @abstractmethod
    def dequantize(self, q: QuantTensor, dtype: torch.dtype) -> Tensor:
        """Convert values to `dtype`, rounding once."""

    @abstractmethod
    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of values and scales of a (rows, columns) tensor."""


@dataclass(frozen=True)
class QuantTensor:
    """Values, scales and scheme. Leading dimensions (experts, rows of a batch) index values and scales alike."""

    values: Tensor
    """Values in the dtype of a plain scheme, or codes; `dequantize(dtype)` gives numbers."""
    scales: Tensor | None
    """Scales of blocks, groups, rows or columns, by the scheme; None for plain values."""
    scheme: QuantScheme
    """How values and scales make numbers."""
    global_scale: Tensor | None = None
    """f32, (..., P, 1): one for each of P equal parts of the rows; None where the scheme has none."""
    zeros: Tensor | None = None
    """Of the shape of the scales: the code of zero in each group, uint8, or of affine groups the bias; None without."""

    @property
    def shape(self) -> torch.Size:
        held = self.values.shape
        columns = self.scheme.logical_columns(held[-1])
        return held if columns == held[-1] else torch.Size((*held[:-1], columns))

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def num_bytes(self) -> int:
        """Bytes of values, scales and zero points, each element counted once."""
        return sum(part.nbytes for part in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Values, then what there is of scales, global scales and zero points."""
        return tuple(part for part in self._parts().values() if part is not None)

    def changed(self, change: Callable[[Tensor], Tensor]) -> QuantTensor:
        """A copy with each of its tensors changed."""
        made = {name: None if part is None else change(part) for name, part in self._parts().items()}
        return replace(self, **made)  # type: ignore[arg-type]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The tensor in `dtype`; plain values of that dtype come back as they are."""
        return self.scheme.dequantize(self, dtype)

    def __getitem__(self, index: int | slice | Tensor) -> QuantTensor:
        """Pick along the first dimension: an expert of a stack, or rows by index. Rows of a block cannot be picked."""
        assert all(len(part) == len(self.values) for part in self.tensors), "the first dimension is cut into blocks"
        return self.changed(lambda part: part[index])

    def to(self, device: torch.device) -> QuantTensor:
        return self.changed(lambda part: part.to(device))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the elements, as bytes: a view would include the whole mapped file, and torch 2.13 writes FP8
        tensors that it cannot read.
        """
        parts = {name: None if part is None else (_as_bytes(part), part.dtype) for name, part in self._parts().items()}
        return _from_parts, (parts, self.scheme)

    def __deepcopy__(self, memo: dict[int, object]) -> QuantTensor:
        """Copy only the elements, not the storage behind a view."""
        return self.changed(Tensor.clone)

    def _parts(self) -> dict[str, Tensor | None]:
        return {"values": self.values, "scales": self.scales, "global_scale": self.global_scale, "zeros": self.zeros}


def _as_bytes(part: Tensor) -> Tensor:
    """A copy of the elements of a tensor as bytes, with one more dimension."""
    copied = part.clone(memory_format=torch.contiguous_format)
    return copied.view(torch.uint8).view(*part.shape, part.element_size())


def _from_parts(parts: dict[str, tuple[Tensor, torch.dtype] | None], scheme: QuantScheme) -> QuantTensor:
    tensors = {
        name: None if part is None else part[0].view(part[1]).reshape(part[0].shape[:-1])
        for name, part in parts.items()
    }
    return QuantTensor(scheme=scheme, **tensors)  # type: ignore[arg-type]
