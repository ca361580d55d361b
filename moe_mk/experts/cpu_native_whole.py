"""The native experts with the router before them, in one call: for tokens that stay on their rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_mk.experts.cpu_native.weights import PackedExpertWeights
from moe_mk.kernels.native import ExpertsMode, Gating, Native, Places, Stack, WholeLayer
from moe_mk.placement.expert_map import PlacementTables
from moe_mk.quant.tensor import QuantScheme

ModeOfRows = Callable[[QuantScheme, int, int], ExpertsMode]
"""How so many rows of a scheme's weights are multiplied that visit so many experts each."""


@dataclass(frozen=True)
class WholePass:
    """A prepared layer: a block of arguments for each way to compute, of which tuning alone makes more than one."""

    native: Native
    mode_of_rows: ModeOfRows
    scheme: QuantScheme
    gating: Gating
    places: Places
    stack: Stack
    of_mode: dict[ExpertsMode, WholeLayer] = field(default_factory=dict)
    of_rows: dict[int, WholeLayer] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        native: Native,
        mode_of_rows: ModeOfRows,
        weights: PackedExpertWeights,
        gating: Gating,
        tables: PlacementTables,
        rank: int,
    ) -> WholePass | None:
        """None where experts have replicas to choose from, and for a gate that does not lie row by row."""
        gate_EH, bias_E = gating.gate_EH, gating.bias_E
        if not tables.one_to_one or gate_EH.stride(1) != 1 or (bias_E is not None and not bias_E.is_contiguous()):
            return None
        places = Places(tables.choice_X, tables.rank_of_P, tables.slot_of_P, rank)
        shared = None if weights.shared is None else (weights.shared.w13, weights.shared.w2)
        return cls(native, mode_of_rows, weights.scheme, gating, places, Stack(weights.w13, weights.w2, shared))

    def __call__(self, x_TH: Tensor, load_E: Tensor) -> Tensor:
        """Route and multiply bf16 (T, H), dense; load_E counts the choices."""
        layer = self.of_rows.get(x_TH.shape[0]) or self._prepared(x_TH.shape[0])
        return layer(x_TH, load_E, torch.get_num_threads())

    def _prepared(self, rows: int) -> WholeLayer:
        mode = self.mode_of_rows(self.scheme, rows, self.gating.mode.top_k)
        if mode not in self.of_mode:
            self.of_mode[mode] = WholeLayer(self.native, self.gating, self.places, self.stack, mode)
        self.of_rows[rows] = self.of_mode[mode]
        return self.of_mode[mode]
