"""A forward as one call of the experts backend, used where nothing has to be observed or moved between its stages.

At a handful of tokens the operators between router and experts cost more than the router itself. Layers that record
spans, report routings, replace lost experts or dispatch tokens to other ranks run stage by stage, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from moe_mk.experts.base import FusedCall
from moe_mk.kernel import FusedMoEKernel
from moe_mk.layer.gate import Gate
from moe_mk.layer.placement_state import PlacementState
from moe_mk.router.router import Router
from moe_mk.trace.ledger import Ledger


@dataclass(frozen=True)
class FusedForward:
    """The call, and the parts that it was prepared from."""

    made_from: tuple[object, ...]
    call: FusedCall | None
    """None: this layer runs stage by stage."""
    kernel: Any
    load_shape: torch.Size
    gate_at: tuple[int, int]

    def is_current(self, parts: tuple[object, ...], gate: Gate) -> bool:
        """Whether these are the same objects that it was prepared from, and the gate's memory was not replaced."""
        return all(map(is_, self.made_from, parts)) and self.gate_at == _addresses(gate)

    def takes(self, x_TH: Tensor, load_E: Tensor) -> bool:
        """Whether the call may use these tensors' memory directly; the stages handle strides and check errors."""
        dense = x_TH.is_contiguous() and load_E.is_contiguous()
        counter = type(load_E) is Tensor and load_E.dtype is torch.int64 and load_E.is_cpu
        return dense and counter and load_E.shape == self.load_shape

    def run(self, call: FusedCall, x_TH: Tensor, load_E: Tensor, ledger: Ledger) -> Tensor:
        """One forward, recorded in the ledger as its stages would be."""
        y_TH = call(x_TH, load_E)
        transport, rows, out = type(self.kernel.prepare_finalize), x_TH.nbytes, y_TH.nbytes
        ledger.ran("dispatch", transport, rows)
        ledger.ran("experts", type(self.kernel.experts), rows + out)
        ledger.ran("combine", transport, out)
        return y_TH


def build_fused_forward(
    state: PlacementState, weights: Any, gate: Gate, router: Router, made_from: tuple[object, ...]
) -> FusedForward:
    """Prepare a forward. weights: of the routed experts, fused with the shared ones if any; None if those run apart."""
    kernel = state.kernel
    call = None
    if weights is not None and isinstance(kernel, FusedMoEKernel) and state.is_direct:
        gating = gate.gating(router)
        if gating is not None:
            call = kernel.experts.fuse_router(weights, gating, state.tables, state.grid.ep.rank)
    load_shape = torch.Size((state.expert_map.num_experts,))
    return FusedForward(made_from, call, kernel, load_shape, _addresses(gate))


def _addresses(gate: Gate) -> tuple[int, int]:
    """Addresses of the gate's tensors: `.data = ` and share_memory_() replace the memory of a tensor object."""
    weight_EH, bias_E = gate.weight_EH, gate.bias_E
    return 0 if weight_EH is None else weight_EH.data_ptr(), 0 if bias_E is None else bias_E.data_ptr()
