"""Launch parameters: number of persistent programs, and tensors as raw pointers or as TMA boxes.

Programmatic dependent launch: kernels of one chain start while the previous one drains.

Each kernel waits until the previous one has finished and its writes are visible, then allows the next one to start.
Before the wait a kernel may access only memory that no kernel of the chain writes, and results of kernels before the
previous one, which were complete when the previous one allowed this launch. After the wait it may read all earlier
results. Source: CUDA programming guide, programmatic dependent launch (`griddepcontrol`, sm_90).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_mk.kernels.triton.numerics import INTERPRETED

CHAINED = tl.constexpr(not INTERPRETED)


def chained() -> dict[str, Any]:
    """Launch options that allow an early start."""
    return {} if INTERPRETED else {"launch_pdl": True}


@triton.jit
def after_the_one_before():
    """Wait for the previous kernel, then allow the next one to start; no effect in the interpreter."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


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
