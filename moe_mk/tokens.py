"""Data types between router, transport and experts: `Routing`, three token layouts, `ExpertOutput`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor, dtype

from moe_mk.quant.tensor import QuantTensor


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one rank go, and how much each destination counts."""

    ids_TK: Tensor
    """int32, or int64 of a router with that ids_dtype. ids_TK[t, k] is the k-th expert of token t; -1 goes nowhere."""
    weights_TK: Tensor
    """f32, already renormalised and scaled; of an id of -1 any number, which does not count."""
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    """f32 scalars by name, only while training."""
    logits_TE: Tensor | None = None
    """f32, or the layer's dtype with router_dtype = "model"; always set by `MoELayer.route`."""
    input_weights_T1: Tensor | None = None
    """f32, by which the layer's input is multiplied and added to the output: the sums of the weights of experts that
    return it, whose ids are -1 here. None: there are no such experts."""
    bias_E: Tensor | None = None
    """f32, added to scores for the choice of experts; only for kernels that route inside, with the logits."""

    @property
    def num_tokens(self) -> int:
        return self.ids_TK.shape[0]


class OutputStage(IntEnum):
    """How far an expert output has come; a stage can be advanced, never undone."""

    RAW = 0
    """One row an assignment, as the last GEMM left it."""
    WEIGHTED = 1
    """One row an assignment, times its routing weight."""
    REDUCED = 2
    """One row a received token, (R, H), summed over this rank's experts."""


@dataclass(frozen=True)
class RowTokens:
    """One row per received token ("standard" activation format)."""

    x_RH: QuantTensor
    """The received tokens, in the wire scheme or the layer's dtype; rows may lie apart in memory."""
    ids_RK: Tensor
    """int32. Local slot in [0, num_slots); -1 is not mine."""
    weights_RK: Tensor
    """f32; of an id of -1 any number, which does not count."""
    num_slots: int
    """L, the physical experts of this rank."""
    handle: object = None
    """State that the transport needs for combine; opaque to all other code."""
    out_RH: Tensor | None = None
    """Where the transport would have the REDUCED output, in the layer's dtype: memory that peers read. An output
    written there is not copied again; one that is elsewhere is as good. None: anywhere."""
    expected_N: float | None = None
    """Assignments to expect under uniform routing, from shapes only. Most ids may be -1, and rows of a window may be
    unfilled. None: about as many as there are ids."""
    most_K: int | None = None
    """The most ids of a row that are not -1, from shapes only; sizes of workspaces follow from it. None: K."""


@dataclass(frozen=True)
class GroupedTokens:
    """One row per assignment, sorted by local expert, keeping row order inside one (contiguous grouped GEMM)."""

    x_NH: QuantTensor
    """A row for each assignment, those of expert 0 first."""
    counts_L: Tensor
    """int64. Assignments of each local expert; sums to N, or to less: rows behind them are padding, NaN included."""
    row_N: Tensor
    """int64. The received row that an assignment came from, in [0, num_rows)."""
    weights_N: Tensor
    """f32."""
    num_rows: int
    """R, the received rows behind the assignments."""
    handle: object = None
    """As of RowTokens."""
    out_RH: Tensor | None = None
    """As of RowTokens."""
    expected_N: float | None = None
    """As of RowTokens, where there are more rows than assignments; None: about as many."""
    position_RK: Tensor | None = None
    """int32. The row of the k-th assignment of received row r, -1: dropped; None: to be found from `row_N`."""


@dataclass(frozen=True)
class RowsOfSlots:
    """Which received row fills each slot of a batch: the way back for a permuted batch."""

    row_LS: Tensor
    """int64; -1 is padding."""
    weights_LS: Tensor
    """f32; 0 on padding."""
    num_rows: int
    out_RH: Tensor | None = None
    """As of RowTokens."""


@dataclass(frozen=True)
class BatchedTokens:
    """One padded block per local expert ("batched experts" format, masked grouped GEMM). Padding is never read."""

    x_LSH: QuantTensor
    """A block of S slots for each expert."""
    counts_L: Tensor
    """int64. The first counts_L[l] slots of block l are tokens, the others anything at all, NaN included."""
    home: RowsOfSlots | None
    """None: the transport weighs and sums in its combine, and wants the output RAW."""
    handle: object = None
    """As of RowTokens."""
    expected_N: float | None = None
    """As of RowTokens: blocks may be mostly padding. None: unknown."""


Tokens = RowTokens | GroupedTokens | BatchedTokens

LAYOUT_NAMES: Mapping[type, str] = {RowTokens: "rows", GroupedTokens: "grouped", BatchedTokens: "batched"}


@dataclass(frozen=True)
class ExpertOutput:
    """Output of the experts, and the stage it has reached: raw, weighted or reduced."""

    y: Tensor
    """RAW, WEIGHTED: (N, H) or (L, S, H) like the tokens. REDUCED: (R, H)."""
    stage: OutputStage
    """RAW, WEIGHTED or REDUCED, as `ExpertsTraits.emits` states for the layout."""

    @classmethod
    def reduced(cls, y_RH: Tensor, dtype: dtype, out_RH: Tensor | None = None) -> ExpertOutput:
        """REDUCED rows rounded to a dtype, in `out_RH` if the transport has set it."""
        return cls(y_RH.to(dtype) if out_RH is None else out_RH.copy_(y_RH), OutputStage.REDUCED)
