"""Launch parameters: number of persistent programs, and tensors as raw pointers or as TMA boxes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_mk.kernels.triton.numerics import INTERPRETED


def resident_programs(device: torch.device) -> int:
    """Programs of a persistent kernel: one per multiprocessor; two in the interpreter, to test the loop."""
    return 2 if INTERPRETED else _multiprocessors(device.index or 0)


@cache
def _multiprocessors(index: int) -> int:
    """Multiprocessors of a device. A query of the driver takes microseconds and every launch needs the number."""
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["multiprocessor_count"])


def readable_scales(scales: Tensor) -> Tensor:
    """Scales as a kernel reads them: f32, or UE8M0 as bytes."""
    return scales.view(torch.uint8) if scales.element_size() == 1 else scales


def boxes(matrix: Tensor, rows: int, columns: int) -> Any:
    """A row-major matrix (m, k) as boxes of rows x columns that the tensor memory accelerator copies.

    Elements beyond an edge read as zero. Rows must start at multiples of 16 bytes.
    """
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])
