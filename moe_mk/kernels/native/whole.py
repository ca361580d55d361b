"""A whole layer on raw tensors in one native call: gate, choice, load, logical experts to slots, experts.

For tokens that stay on their rank. What does not differ from call to call is written once into a block of arguments;
the numbers are those of `route` and `experts_rows` one after the other, bit for bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from moe_mk.errors import ShapeError
from moe_mk.kernels.native.experts import experts_block
from moe_mk.kernels.native.experts_mode import ExpertsMode, check_call, check_shared
from moe_mk.kernels.native.library import CLayer, Native
from moe_mk.kernels.native.packed import PackedMatrix
from moe_mk.kernels.native.route import RouteMode, check_gate, route_block


@dataclass(frozen=True)
class Gating:
    """What chooses: gate bf16 or f32 [E, H] with dense rows, an f32 bias [E] of the choice, and how it is made."""

    gate_EH: torch.Tensor
    bias_E: torch.Tensor | None
    mode: RouteMode


@dataclass(frozen=True)
class Places:
    """Where each logical expert lies, int32: read at every call, so they may be rewritten in between."""

    physical_of_E: torch.Tensor
    """-1: nobody holds it."""
    rank_of_P: torch.Tensor
    slot_of_P: torch.Tensor
    rank: int


@dataclass(frozen=True)
class Stack:
    """The experts of this rank, packed, and a slot that every row visits as well."""

    w13: PackedMatrix
    w2: PackedMatrix
    shared: tuple[PackedMatrix, PackedMatrix] | None = None


class WholeLayer:
    """A prepared call; it holds what it points to. Calls may run at once: none writes to the block."""

    def __init__(self, native: Native, gating: Gating, places: Places, stack: Stack, mode: ExpertsMode) -> None:
        """Raises ShapeError for tensors that do not fit, ConfigError for groups that do not."""
        hidden = stack.w13.layout.num_inputs
        nothing_TH = torch.empty((0, hidden), dtype=torch.bfloat16, device="cpu")
        ids_TK = torch.empty((0, gating.mode.top_k), dtype=torch.int32, device="cpu")
        check_gate(nothing_TH, gating.gate_EH, gating.bias_E, gating.mode)
        if stack.shared is not None:
            check_shared(stack.shared, stack.w13, stack.w2)
        check_call(mode, nothing_TH, None, ids_TK, None, (stack.w13, stack.w2, *(stack.shared or ())))
        if stack.w2.layout.num_outputs != hidden:
            raise ShapeError(f"cpu layer: H={hidden} comes in, H={stack.w2.layout.num_outputs} goes out")
        self._held = native, gating, places, stack
        self._block = CLayer(
            route=route_block(native, gating.gate_EH, gating.bias_E, gating.mode),
            experts=experts_block(native, stack.w13, stack.w2, stack.shared, mode),
            physical_of=places.physical_of_E.data_ptr(),
            rank_of=places.rank_of_P.data_ptr(),
            slot_of=places.slot_of_P.data_ptr(),
            num_physical=places.rank_of_P.shape[0],
            rank=places.rank,
        )
        self._at = ctypes.byref(self._block)

    def __call__(self, x_TH: torch.Tensor, load_E: torch.Tensor, threads: int) -> torch.Tensor:
        """Run bf16 [T, H], dense, to bf16 [T, H]; load_E, int64 [E], counts how often each expert was chosen."""
        out_TH = torch.empty_like(x_TH)
        x, load, out = x_TH.data_ptr(), load_E.data_ptr(), out_TH.data_ptr()
        self._held[0].call("layer", self._at, x, x_TH.shape[0], load, out, threads)
        return out_TH
