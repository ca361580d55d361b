"""`nccl.ep.Handle` and what its calls are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_mk_contrib.emulated.nccl.core import NcclInvalid
from moe_mk_contrib.emulated.nccl.ep import high_throughput, low_latency
from moe_mk_contrib.emulated.nccl.ep.enums import (
    CombineQuantizationRecipe,
    DispatchQuantizationRecipe,
    ExpertIdKind,
    PassDir,
)
from moe_mk_contrib.emulated.nccl.ep.state import HandleState
from moe_mk_contrib.emulated.nccl.ep.tensor import Tensor


@dataclass(kw_only=True)
class HandleConfig:
    """Of a handle."""

    dispatch_output_per_expert_alignment: int = 0


@dataclass(kw_only=True)
class DispatchConfig:
    """Of a dispatch."""

    send_only: int = 0
    round_scales: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: DispatchQuantizationRecipe = DispatchQuantizationRecipe.NONE


@dataclass(kw_only=True)
class CombineConfig:
    """Of a combine."""

    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: CombineQuantizationRecipe = CombineQuantizationRecipe.NONE


@dataclass(kw_only=True)
class LayoutInfo:
    """Counters that the library writes, and how it numbers ids."""

    expert_counters: Tensor | None = None
    src_rank_counters: Tensor | None = None
    expert_offsets: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(kw_only=True)
class DispatchInputs:
    """What is sent."""

    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class DispatchOutputs:
    """Where it arrives."""

    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass(kw_only=True)
class CombineInputs:
    """What is sent back."""

    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class CombineOutputs:
    """Where sums arrive."""

    tokens: Tensor | None = None
    topk_weights: Tensor | None = None


def bound(state: HandleState, topk_idx: Tensor, layout_info: LayoutInfo | None) -> HandleState:
    """A handle's state with another routing."""
    state.update(topk_idx, layout_info)
    if not state.group.low_latency:
        high_throughput.exchange_routing(state, layout_info)
    return state


class Handle:
    """The routing of a dispatch and its combine. Here its state takes the place of an address."""

    def __init__(self, ptr: Any) -> None:
        self._ptr = ptr

    def _check_valid(self, operation: str) -> None:
        if not self._ptr:
            raise NcclInvalid(f"Cannot {operation}: Handle is not initialized or has been destroyed")

    @property
    def ptr(self) -> Any:
        """The address of the handle."""
        self._check_valid("read ptr")
        return self._ptr

    def update(self, topk_idx: Tensor, *, layout_info: LayoutInfo | None = None, stream: Any) -> None:
        """Another routing in the same buffers; every rank at once in high throughput."""
        del stream
        self._check_valid("update")
        bound(self._ptr, topk_idx, layout_info)

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        config: DispatchConfig | None = None,
        stream: Any,
    ) -> None:
        """Send tokens to the ranks of their experts."""
        del stream
        self._check_valid("dispatch")
        kernels = low_latency if self._ptr.group.low_latency else high_throughput
        kernels.dispatch(self._ptr, inputs, outputs, layout_info, config or DispatchConfig())

    def combine(
        self, inputs: CombineInputs, outputs: CombineOutputs, *, config: CombineConfig | None = None, stream: Any
    ) -> None:
        """Return rows to their tokens, by the handle of the dispatch."""
        del stream
        self._check_valid("combine")
        kernels = low_latency if self._ptr.group.low_latency else high_throughput
        kernels.combine(self._ptr, inputs, outputs, config or CombineConfig())

    def complete(self, *, config: int = 0, stream: Any) -> None:
        """The second half of an operation with `send_only`."""
        del config, stream
        self._check_valid("complete")
        self._ptr.complete()

    def destroy(self) -> None:
        """Release the handle."""
        self._ptr = 0
