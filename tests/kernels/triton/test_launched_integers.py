"""What the tests compile is what is launched: every integer of the GEMMs is as aligned as in a launch, and no more."""

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS
from moe_mk.kernels.triton.tile import Tile
from tests.kernels.triton.sm90_gemms import ANY, SIXTEENTH, Integers, integers, integers_by_hand
from tests.kernels.triton.test_launches import FP8, HIDDEN, INNER, ROWS, SLOTS, TOP_K, NoDriver

pytestmark = pytest.mark.sm90

TILE = Tile(16, True, 4, 5)
Launched = list[tuple[str, Integers]]


UNSEEN_DEVICES = count(2000)
"""Devices for which no test of this process has compiled a kernel."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The GEMMs that were launched, with what their integers are specialised to."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from moe_mk.kernels.triton import gluon_gemms, grouped_w2, grouped_w13

    seen: Launched = []

    def compiled(kernel: Any, key: str, signature: Any, device: Any, constants: Any, options: Any, *rest: Any) -> None:
        attributes, found = rest[0], dict[str, int | str]()
        for place, name in enumerate(kernel.arg_names):
            if signature[name] == "i32":
                found[name] = SIXTEENTH if attributes.get((place,)) else ANY
            elif name.islower() and constants.get((place,)) == 1:
                found[name] = 1
        if kernel.fn.__name__ in ("_w13", "_w2", "_by_hand"):
            seen.append((kernel.fn.__name__, found))

    for module in (grouped_w13, grouped_w2, gluon_gemms):
        monkeypatch.setattr(module, "resident_programs", lambda device: 132)
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(driver, "_active", NoDriver(next(UNSEEN_DEVICES)))
    return seen


def launch(format: str, tile: Tile) -> None:
    from moe_mk.kernels.triton.experts import Experts, experts_rows

    given = KERNEL_FORMATS[format]
    dtype = {"plain": torch.bfloat16, "int8": torch.int8, "mxfp4": torch.uint8}.get(format, FP8)

    def blocks(rows: int, columns: int) -> Tensor:
        return torch.empty((SLOTS, rows // 128, columns // 128))

    def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
        scales = blocks(rows, columns) if "fp8" in format else None
        if given.groups:
            scales = torch.empty((SLOTS, columns // given.step, rows, given.groups), dtype=torch.uint8)
        return torch.empty((SLOTS, rows, columns // given.per_byte), dtype=dtype), scales

    rows = [torch.empty((SLOTS, n)) if given.row_scales else None for n in (2 * INNER, HIDDEN)]
    if given.block_scales:
        rows = [blocks(2 * INNER, HIDDEN), blocks(HIDDEN, INNER)]
    experts = Experts(matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER), "silu", True, False, given, *rows)
    ids, x = torch.zeros((ROWS, TOP_K), dtype=torch.int32), torch.empty((ROWS, HIDDEN), dtype=torch.bfloat16)
    experts_rows((x, None), ids, torch.zeros((ROWS, TOP_K)), experts, tile, torch.empty)


@pytest.mark.parametrize("format", ["fp8", "plain", "int8", "w_fp8", "mxfp4"])
def test_triton_gemms_are_compiled_as_they_are_launched(format: str, launched: Launched) -> None:
    launch(format, TILE)
    assert launched == [(name, integers(name, format)) for name in ("_w13", "_w2")]


@pytest.mark.parametrize("tile", [Tile(8, True, 4, 6, "gluon"), Tile(64, False, 4, 5, "gluon")])
def test_gluon_gemms_are_compiled_as_they_are_launched(tile: Tile, launched: Launched) -> None:
    launch("fp8", tile)
    assert launched == [("_by_hand", integers_by_hand(second=second)) for second in (False, True)]
