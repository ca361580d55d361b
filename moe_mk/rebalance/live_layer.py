"""The interface of a layer that can be rebalanced while it serves; `MoELayer` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.flight import Flight
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.weights.expert_weights import SlotWeights


class LiveLayer(Protocol):
    """One layer on one rank."""

    name: str
    device: torch.device
    expert_load: Tensor
    """int64 [E], grows with every forward."""

    @property
    def expert_map(self) -> ExpertMap:
        """What serves now."""

    @property
    def epoch(self) -> int:
        """Placements before this one."""

    @property
    def generation(self) -> tuple[int, int]:
        """Changes whenever weights are loaded or backends replaced."""

    @property
    def ep(self) -> Communicator:
        """The ranks that share out the experts."""

    @property
    def tp(self) -> Communicator:
        """The ranks that hold slices of the same experts."""

    @property
    def on_lost_expert(self) -> str:
        """raise, drop or renormalise: what calls do while an expert has no live copy."""

    @property
    def dropped_assignments(self) -> int:
        """Assignments of this rank's tokens that were left out for that."""

    @property
    def can_read_experts(self) -> bool:
        """Whether `read_expert` has where to read from."""

    def export_slot(self, slot: int) -> SlotWeights:
        """Weights of one of this rank's slots, as views."""

    def read_expert(self, expert: int) -> SlotWeights:
        """Any expert, from host memory or the checkpoint; may be slow, is called off the serving thread."""

    # What is staged is the layer's own affair: it is handed back to the same layer unread.

    def stage(
        self,
        expert_map: ExpertMap,
        arrived: Mapping[int, SlotWeights] | None = None,
        *,
        ep: Communicator | None = None,
        epoch: int | None = None,
    ) -> Any:
        """Build another placement while the current one serves. arrived: by slot. ep: another group of ranks."""

    def try_out(self, state: Any) -> Flight[None]:
        """Run what was staged once without tokens, on all ranks of its group."""

    def flip(self, state: Any) -> Any:
        """Serve what was staged from the next forward on."""
