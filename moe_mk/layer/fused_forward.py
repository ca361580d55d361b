"""A forward in one call of the experts backend, where nothing between its stages has to be seen.

At a handful of tokens the operators between router and experts cost more than the router: each finds its code and its
tensors swept out of the caches by the weights of the layer before. Whoever listens to stages, takes part in them or
carries tokens gets them one by one, with the same bits.
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
from moe_mk.layer.placement_state import Half
from moe_mk.prepare_finalize.no_ep import NoEP
from moe_mk.quant.plain import BF16
from moe_mk.router.router import Router
from moe_mk.tokens import RowTokens
from moe_mk.trace.ledger import Ledger


@dataclass(frozen=True)
class FusedForward:
    """What a forward was prepared from, and the call; None: this layer's stages run one by one."""

    made_from: tuple[object, ...]
    call: FusedCall | None
    kernel: Any
    load_shape: torch.Size
    gate_at: tuple[int, int]

    def made_of(self, parts: tuple[object, ...], gate: Gate) -> bool:
        """Whether these are the very parts it was prepared from, and the gate's memory is where it was."""
        return all(map(is_, self.made_from, parts)) and self.gate_at == _addresses(gate)

    def takes(self, x_TH: Tensor, load_E: Tensor) -> bool:
        """Whether the call may read and count where these point to; stages heed strides, and refuse what is wrong."""
        dense = x_TH.is_contiguous() and load_E.is_contiguous()
        counter = type(load_E) is Tensor and load_E.dtype is torch.int64 and load_E.is_cpu
        return dense and counter and load_E.shape == self.load_shape

    def run(self, call: FusedCall, x_TH: Tensor, load_E: Tensor, ledger: Ledger) -> Tensor:
        """One forward, noted as its stages would be."""
        y_TH = call(x_TH, load_E)
        carrier, rows, out = type(self.kernel.prepare_finalize), x_TH.nbytes, y_TH.nbytes
        ledger.ran("dispatch", carrier, rows)
        ledger.ran("experts", type(self.kernel.experts), rows + out)
        ledger.ran("combine", carrier, out)
        return y_TH


def build_fused_forward(
    half: Half, together: Any, gate: Gate, router: Router, made_from: tuple[object, ...]
) -> FusedForward:
    """Prepare a forward. together: the experts, with the shared ones if there are any; None if those run apart."""
    kernel = half.kernel
    call = None
    if together is not None and type(kernel) is FusedMoEKernel and _nothing_between(half, kernel):
        gating = gate.gating(router)
        if gating is not None:
            call = kernel.experts.fuse_router(together, gating, half.tables, half.grid.ep.rank)
    load_shape = torch.Size((half.expert_map.num_experts,))
    return FusedForward(made_from, call, kernel, load_shape, _addresses(gate))


def _nothing_between(half: Half, kernel: FusedMoEKernel) -> bool:
    """Whether rows reach the experts as they are and come back as the layer's output."""
    transport = kernel.prepare_finalize
    alone = half.grid.ep.size == 1 and half.grid.tp.size == 1
    as_they_are = type(transport) is NoEP and transport.context.wire == BF16
    return alone and half.lost is None and as_they_are and kernel.experts.traits.consumes[0] is RowTokens


def _addresses(gate: Gate) -> tuple[int, int]:
    """Where the gate's numbers lie: a tensor stays the same when its memory is replaced, or shared with processes."""
    weight_EH, bias_E = gate.weight_EH, gate.bias_E
    return 0 if weight_EH is None else weight_EH.data_ptr(), 0 if bias_E is None else bias_E.data_ptr()


def is_untraced(x_TH: Tensor) -> bool:
    """Whether this is a plain tensor that nobody traces or transforms: else the forward has to be an operator."""
    if type(x_TH) is not Tensor or torch.compiler.is_compiling():
        return False
    followed = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
    return not followed and torch._C._functorch.peek_interpreter_stack() is None
