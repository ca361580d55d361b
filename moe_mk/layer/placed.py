"""The placement of a layer as seen from outside: which experts lie where, and how that changes while it serves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import FallbackWarning, WeightError
from moe_mk.flight import Flight
from moe_mk.kernel import FusedMoEKernel
from moe_mk.layer.gate import Gate
from moe_mk.layer.placement_state import Frame, Half, build_half, check_sizes, shown, try_out, with_experts
from moe_mk.layer.report import RunReport, run_report
from moe_mk.layer.settings import layer_spec_of
from moe_mk.layer.shared import SharedExperts
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.runner.monolithic import MonolithicKernel
from moe_mk.trace.recorder import Spans
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.source import TensorSource


class PlacedLayer(nn.Module):
    """What every layer with experts on several ranks has: a half that serves, and a way to another one."""

    name: str
    device: torch.device
    config: MoEConfig
    decision: Decision
    spans: Spans
    groups: ParallelGroups
    _half: Half
    _gate: Gate
    _shared: SharedExperts | None
    _source: tuple[TensorSource, int] | None = None
    """Where the weights were read, and the number of the layer there."""
    _dropped: Tensor | None = None
    """int64 scalar on the device: assignments to lost experts that were left out."""

    @property
    def weights(self) -> LayerWeights:
        """What was loaded; raises WeightError before that."""
        if self._half.weights is None:
            raise WeightError(f"layer {self.name!r} has no weights yet; call load_from_safetensors(path, layer=N)")
        return self._half.weights

    @property
    def expert_map(self) -> ExpertMap:
        """Which rank holds which expert, now."""
        return self._half.expert_map

    @property
    def kernel(self) -> FusedMoEKernel | MonolithicKernel:
        """The transport and the experts backend that serve, now."""
        return self._half.kernel

    @property
    def epoch(self) -> int:
        """How many placements there were before this one."""
        return self._half.epoch

    @property
    def ep(self) -> Communicator:
        """The ranks that share out the experts."""
        return self._half.grid.ep

    @property
    def tp(self) -> Communicator:
        """The ranks that hold slices of the same experts."""
        return self._half.grid.tp

    @property
    def dp(self) -> Communicator:
        """The ranks whose expert loads are added up."""
        return self._half.grid.dp

    @property
    def on_lost_expert(self) -> str:
        """What calls do about experts without a live copy: `parallel.on_lost_expert`."""
        return self.config.parallel.on_lost_expert

    @property
    def dropped_assignments(self) -> int:
        """Assignments of this rank's tokens to lost experts, left out since the last reset; asks the device."""
        return 0 if self._dropped is None else int(self._dropped)

    def report(self) -> RunReport:
        """What really ran at each stage since the last reset, on how many bytes, beside what was decided."""
        sent = self.ep.traffic.bytes_by_phase + self.tp.traffic.bytes_by_phase
        report = run_report(self.decision, self.spans.ledger, sent)
        lost = tuple(sorted(self.expert_map.lost))
        return replace(
            report,
            lost_experts=lost,
            on_lost_expert=self.on_lost_expert,
            dropped_assignments=self.dropped_assignments,
        )

    def reset_report(self) -> None:
        """Forget what ran."""
        self.spans.ledger.clear()
        if self._dropped is not None:
            self._dropped.zero_()

    def export_slot(self, slot: int) -> SlotWeights:
        """The weights of one of this rank's slots as the checkpoint holds them, as views."""
        return self.weights.experts.slots[slot]

    def read_expert(self, expert: int) -> SlotWeights:
        """Any expert from where the layer was loaded, for one whose last copy was lost. Raises WeightError."""
        if self._source is None:
            raise WeightError(f"layer {self.name!r} was given its weights by take(), so nothing can be read again")
        source, layer = self._source
        prefix, tp = self.weights.facts.prefix, self.tp
        return load_layer(
            source, layer, layer_spec_of(self.config), owned=[expert], tp_rank=tp.rank, tp_size=tp.size, prefix=prefix
        ).experts.slots[0]

    @property
    def can_read_experts(self) -> bool:
        """Whether `read_expert` has where to read from."""
        return self._source is not None

    def read_from(self, source: TensorSource, layer: int) -> None:
        """Where `read_expert` reads, for a layer that was given its weights by take(). layer: its number there."""
        self._source = source, layer

    def stage(
        self,
        expert_map: ExpertMap,
        arrived: Mapping[int, SlotWeights] | None = None,
        *,
        ep: Communicator | None = None,
        epoch: int | None = None,
    ) -> Half:
        """Build everything for another placement beside what serves; only `flip` makes it serve.

        arrived: weights by slot of this rank for experts it does not hold yet. ep: another group of ranks, after one
        was lost or has joined: transport and experts are decided anew for its size. epoch: the number of the placement,
        the same on all ranks; None counts on. Raises ConfigError for a map of other sizes and for experts whose weights
        are nowhere, UnsupportedError where nothing serves a group of that size.
        """
        grid = self._half.grid.renewed(ep)
        check_sizes(expert_map, self.expert_map, grid.ep)
        frame = None if ep is None else self._frame_for(expert_map, ep)
        decision = self.decision if frame is None else frame.decision
        number = self.epoch + 1 if epoch is None else epoch
        half = replace(build_half(decision, expert_map, grid, self.device, self.spans, number), frame=frame)
        return half if self._half.weights is None else with_experts(half, self._half, arrived or {})

    def try_out(self, half: Half) -> Flight[None]:
        """Run a staged half once without tokens, on all ranks of its group; raises CommError where that fails."""
        frame = half.frame
        gate, decision = (self._gate, self.decision) if frame is None else (frame.gate, frame.decision)
        yield from try_out(half, decision, gate, self.device)

    def _frame_for(self, expert_map: ExpertMap, ep: Communicator) -> Frame:
        """What the layer is beside its placement in another group."""
        raise NotImplementedError

    def flip(self, half: Half) -> Half:
        """Serve from a staged half from the next forward on; returns what served. All ranks flip at one step."""
        old, self._half = self._half, half
        if half.frame is not None:
            old = replace(old, frame=Frame(self.config, self.decision, self.groups, self._gate, self._shared))
            self.config, self.decision, self.groups = half.frame.config, half.frame.decision, half.frame.groups
            self._gate, self._shared = half.frame.gate, half.frame.shared
            self.spans.ledger.clear()  # what ran before would be compared with what is decided now
        lost = half.lost
        if lost is not None and self._dropped is None:
            with torch.inference_mode(False):
                self._dropped = torch.zeros((), dtype=torch.int64, device=self.device)
        if lost is not None and lost.policy != "raise" and half.expert_map.lost != old.expert_map.lost:
            warnings.warn(
                f"layer {self.name!r}: {shown(lost.experts)} no live copy; parallel.on_lost_expert = {lost.policy}, so "
                "that outputs are served without their part until they are repaired",
                FallbackWarning,
                stacklevel=2,
            )
        return old

    def set_placement(self, expert_map: ExpertMap, arrived: Mapping[int, SlotWeights] | None = None) -> None:
        """Stage and flip: for a layer without weights, for new shares, or where the weights are at hand."""
        self.flip(self.stage(expert_map, arrived))
