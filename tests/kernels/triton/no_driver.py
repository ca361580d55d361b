"""Launches at the sizes of DeepSeek-V3 without a driver: what Triton asks one before it compiles, and empty experts."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS
from moe_mk.kernels.triton.tile import Tile

SLOTS, HIDDEN, INNER, ROWS, TOP_K = 4, 7168, 2048, 7, 2
FP8 = torch.float8_e4m3fn
UNSEEN_DEVICES = count(1000)
"""Devices for which no test of this process has compiled a kernel."""


class NoDriver:
    """device: its number; kernels are cached by it."""

    def __init__(self, device: int = 0) -> None:
        self.device = device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def count_multiprocessors(patch: pytest.MonkeyPatch) -> None:
    """Those of an H200."""
    from moe_mk_contrib.gluon import gluon_gemms

    from moe_mk.kernels.triton import grouped_w2, grouped_w13

    for module in (grouped_w13, grouped_w2, gluon_gemms):
        patch.setattr(module, "resident_programs", lambda device: 132)


def watch_compiler(patch: pytest.MonkeyPatch, compiled: Callable[..., None]) -> None:
    """Call `compiled` in place of the compiler, on a device for which nothing has been compiled."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    count_multiprocessors(patch)
    patch.setattr(JITFunction, "_do_compile", compiled)
    patch.setattr(driver, "_active", NoDriver(next(UNSEEN_DEVICES)))


def empty_experts(format: str = "fp8", **more: Any) -> Any:
    from moe_mk.kernels.triton.experts import Experts

    layout = KERNEL_FORMATS[format]
    plain = FP8 if "fp8" in format else torch.bfloat16 if format == "plain" else torch.int8
    dtype = torch.uint8 if layout.per_byte > 1 else plain

    def blocks(rows: int, columns: int) -> Tensor:
        return torch.empty((SLOTS, rows // 128, columns // 128))

    def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
        scales = blocks(rows, columns) if "fp8" in format else None
        if layout.group:
            scales = torch.empty((SLOTS, columns // layout.step, rows, layout.groups), dtype=torch.uint8)
        return torch.empty((SLOTS, rows, columns // layout.per_byte), dtype=dtype), scales

    sizes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    above = [torch.empty((SLOTS, rows)) if layout.row_scales else None for rows, _ in sizes]
    if layout.block_scales:
        above = [blocks(*size) for size in sizes]
    w13, w2 = (matrix(*size) for size in sizes)
    return Experts(w13, w2, format=layout, w13_rows=above[0], w2_rows=above[1], **more)


def rows_through(
    experts: Any, tile: Tile, x: Tensor | None = None, scales: Tensor | None = None, *, top_k: int = TOP_K, **more: Any
) -> Tensor:
    from moe_mk.kernels.triton.experts import experts_rows

    x = torch.empty((ROWS, HIDDEN), dtype=torch.bfloat16) if x is None else x
    ids, weights = torch.zeros((ROWS, top_k), dtype=torch.int32), torch.zeros((ROWS, top_k))
    return experts_rows((x, scales), ids, weights, experts, tile, torch.empty, **more)
