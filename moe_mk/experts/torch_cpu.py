"""Experts on a CPU with torch alone: matrix units through `torch.mm`, FP8 weights decoded block by block in cache.

Use it where native kernels cannot be compiled. Holds the experts in memory in the format of the checkpoint, and
multiplies in the layer's dtype (more accurate than FP8 activations).

torch converts FP8 one element at a time. An e4m3 code moved to the exponent and mantissa of a bf16 is that number times
2^-120, subnormals included, so three integer operations and the multiplication by the scale decode it at vector speed.
NaN codes would be decoded as numbers; loading rejects checkpoints that contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from moe_mk.config.problem import Problem
from moe_mk.errors import ShapeError
from moe_mk.experts.base import EXPERTS, QUANTISED, WEIGHT_ONLY, ExpertsTraits, FusedExperts
from moe_mk.external.device import without_autocast
from moe_mk.kernels.reference.activation import ACTIVATIONS, CLAMPED, activation
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import (
    CANONICAL,
    MAPPED,
    ExpertWeights,
    MappedExpertWeights,
    SlotWeights,
    Weights,
    on_device,
)
from moe_mk.weights.scan import Progress
from moe_mk.weights.source import in_memory

if TYPE_CHECKING:
    from moe_mk.kernels.native.layer import Gating, LayerCall, PreparedExperts

Apply = Callable[[Tensor, int], Tensor]
"""Rows (n, H) and the slot of an expert, to its outputs (n, H)."""
E4M3_IN_BF16 = 0x87F0 - 0x10000
"""Sign, four exponent bits and three mantissa bits of an e4m3 code shifted into a bf16, as int16."""
REBIAS = 2.0**120
"""The exponent bias of bf16 is 127, of e4m3 it is 7."""
LARGEST_SCALE = 2.0**7
"""Times REBIAS this is still an f32."""


@EXPERTS.register("torch_cpu")
class TorchCpuExperts(FusedExperts):
    """torch.mm per expert over its rows."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="torch on a CPU, weights decoded expert by expert; where native kernels cannot be built",
        kinds=frozenset({"cpu"}),
        emits={RowTokens: OutputStage.REDUCED, GroupedTokens: OutputStage.RAW},
        weights=frozenset({"plain", *QUANTISED, *WEIGHT_ONLY}),
        decodes=True,
        mixed_weights=True,
        computes=("plain",),
        activations=frozenset({*ACTIVATIONS, *CLAMPED}),
        biases=True,
        graph_safe=False,
        deterministic=True,
        bandwidth=0.1,
        compute=0.4,
        launches=10,
        per_expert=True,
    )

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Rows sorted by expert and their outputs, at most K per row, and the intermediates of one expert."""
        hidden, inner, width = problem.config.model.hidden_size, problem.intermediate, problem.sums.dtype.itemsize
        return rows * (problem.config.router.top_k * 2 * hidden + 3 * inner) * width

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """Experts of files are read; views of each expert of a stack are made once, which is not copied."""
        weights = on_device(weights, self.context.device)
        if isinstance(weights, MappedExpertWeights):
            return weights.changed(in_memory) if weights.of_file else weights
        if not isinstance(weights, ExpertWeights) or weights.layout != CANONICAL:
            return weights
        return MappedExpertWeights(tuple(map(weights.slot, range(weights.num_slots))), weights.scheme)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Apply each expert to its rows; weights of experts without rows are not read."""
        if isinstance(tokens, RowTokens):
            y_RH = self._rows(tokens, weights)
            return ExpertOutput.reduced(y_RH, self.context.dtype.dtype, tokens.out_RH)
        assert isinstance(tokens, GroupedTokens)
        x_NH = tokens.x_NH.dequantize(self.context.dtype.dtype)
        y_NH = torch.empty((x_NH.shape[0], self.context.hidden_size), dtype=x_NH.dtype, device=x_NH.device)
        start = 0
        for slot, count in enumerate(tokens.counts_L.tolist()):
            if count:
                rows = slice(start, start + count)
                y_NH[rows] = self._ffn(x_NH[rows], weights.slot(slot))
            start += count
        return ExpertOutput(y_NH, OutputStage.RAW)

    def fuse_layer(self, weights: Weights, top_k: int) -> RoutedRows | None:
        """The rows, without the stages around them."""
        return None if weights.layout != MAPPED else RoutedRows(self, self.ffn_of(weights))

    def _rows(self, tokens: RowTokens, weights: Weights) -> Tensor:
        x_RH = tokens.x_RH.dequantize(self.context.dtype.dtype)
        return self.sums(x_RH, tokens.ids_RK, tokens.weights_RK, lambda x, slot: self._ffn(x, weights.slot(slot)))

    @without_autocast
    def sums(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, ffn: Apply) -> Tensor:
        """Weighted sums of every row in f32, added in the order of the slots as `permute` and `weight_and_reduce` do.

        Rows without an expert are not read. ffn: one expert, by its slot.
        """
        total_RH = torch.zeros((x_RH.shape[0], self.context.hidden_size), dtype=torch.float32, device=x_RH.device)
        if x_RH.shape[0] == 1:  # every expert reads the one row
            factors = weights_RK.flatten().tolist()
            chosen = sorted(pair for pair in zip(ids_RK.flatten().tolist(), factors, strict=True) if pair[0] >= 0)
            if len(dict(chosen)) == len(chosen):
                for slot, factor in chosen:
                    total_RH += ffn(x_RH, slot).to(torch.float32).mul_(factor)
                return total_RH
        order_N, slots, counts = by_slot(ids_RK)
        row_N, factors_N1 = order_N // max(ids_RK.shape[1], 1), weights_RK.flatten()[order_N].unsqueeze(1)
        for slot, row_X, factors_X1 in zip(
            slots, torch.split(row_N, counts), torch.split(factors_N1, counts), strict=True
        ):
            y_XH = ffn(x_RH.index_select(0, row_X), slot)
            total_RH.index_add_(0, row_X, y_XH.to(torch.float32).mul_(factors_X1))
        return total_RH

    def ffn_of(self, weights: Weights) -> Apply:
        """Each expert by its slot, with transposed views of plain matrices made once."""
        slots = [weights.slot(index) for index in range(weights.num_slots)]
        if not all(map(self._is_plain, slots)):
            return lambda x, slot: self._ffn(x, slots[slot])
        views = [tuple(q.values.T for q in (slot.gate_IH, slot.up_IH, slot.down_HI) if q is not None) for slot in slots]
        name, alpha, limit = self.context.activation, self.context.swiglu_alpha, self.context.swiglu_limit

        def ffn(x: Tensor, slot: int) -> Tensor:
            gate_HI, up_HI, down_IH = views[slot]
            return activation(name, x @ gate_HI, x @ up_HI, alpha=alpha, limit=limit) @ down_IH

        return ffn

    def _is_plain(self, slot: SlotWeights) -> bool:
        dtype = self.context.dtype.dtype
        matrices = (slot.gate_IH, slot.up_IH, slot.down_HI)
        as_is = all(q is not None and q.scales is None and q.values.dtype is dtype for q in matrices)
        return as_is and slot.biases is None

    def _ffn(self, x: Tensor, slot: SlotWeights) -> Tensor:
        c = self.context
        gate = None if slot.gate_IH is None else _multiply(x, slot.gate_IH, slot.bias("gate"))
        up = _multiply(x, slot.up_IH, slot.bias("up"))
        h = activation(c.activation, gate, up, alpha=c.swiglu_alpha, limit=c.swiglu_limit)
        return _multiply(h, slot.down_HI, slot.bias("down"))


_DISPATCH = 2
"""`Stage.DISPATCH` of a `LayerCall`, from which on ids are physical."""


def by_slot(ids_RK: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Numbers of the assignments sorted by slot, those of a slot in their order; the hit slots, and their counts."""
    ids_N = ids_RK.numpy().ravel()
    order_N = np.argsort(ids_N, kind="stable")
    order_N = order_N[np.count_nonzero(ids_N < 0) :]
    slots, counts = np.unique(ids_N[order_N], return_counts=True)
    return torch.from_numpy(order_N), slots.tolist(), counts.tolist()


@dataclass(frozen=True)
class RoutedRows:
    """The experts on tokens that are routed: `PreparedExperts`, and their `LayerCall`."""

    experts: TorchCpuExperts
    ffn: Apply
    tables: Any = None
    ran: Any = None
    routes: bool = False

    def alone(self, shared: PreparedExperts | None, gating: Gating | None, tables: Any, ran: Any) -> LayerCall | None:
        """Without router; None where shared experts are to be added."""
        return replace(self, tables=tables, ran=ran) if shared is None else None

    def is_ready(self, num_tokens: int) -> bool:
        return True

    def __call__(
        self, x_TH: Tensor, load_E: Tensor | None, routing: tuple[Tensor, Tensor] | None = None, first: int = 0, *,
        skip: bool = False, routed: Callable[[], None] | None = None, shared_weights_T: Tensor | None = None,
        captured: int | None = None,
    ) -> Tensor:  # fmt: skip
        assert routing is not None and shared_weights_T is None and captured is None, "there is no router"
        ids_TK, weights_TK = routing
        placed = first >= _DISPATCH  # replicas are chosen, and counted as their expert
        e, ids_N = len(self.tables.rank_of_P) if placed else self.tables.num_experts, ids_TK.numpy().ravel()
        if ids_N.size and not -1 <= ids_N.min() <= ids_N.max() < e:
            if not skip:
                raise ShapeError(f"ids of experts out of range (0 <= id < {e}, or -1 for none)")
            ids_TK = ids_TK.masked_fill((ids_TK < 0) | (ids_TK >= e), -1)
            ids_N = ids_TK.numpy().ravel()
        slots_TK = ids_TK
        if not self.tables.is_identity:
            slots_TK = self.tables.local_slots(ids_TK if placed else self.tables.to_physical(ids_TK, 0), 0)
        with torch.no_grad():
            x = x_TH.to(self.experts.context.dtype.dtype)
            y_TH = self.experts.sums(x, slots_TK, weights_TK, self.ffn).to(x_TH.dtype)
        if load_E is not None and not placed:
            load_E += torch.from_numpy(np.bincount(ids_N + 1, minlength=e + 1)[1:])
        for work in (0, 2, 3):  # dispatch, experts and combine of `LayerWork`
            self.ran[2 * work] += 1
            self.ran[2 * work + 1] += len(x_TH)
        if routed is not None:
            routed()
        return y_TH


def _multiply(x: Tensor, weight_nk: QuantTensor, bias_n: Tensor | None) -> Tensor:
    """x (m, k) times a weight (n, k) transposed, plus a bias; FP8 blocks are decoded one row of blocks at a time."""
    if weight_nk.scales is None and weight_nk.values.dtype is x.dtype:
        y = x @ weight_nk.values.T
    elif not isinstance(weight_nk.scheme, Fp8Block) or weight_nk.scheme.rows in (1, WHOLE):
        y = x @ weight_nk.dequantize(x.dtype).T
    else:
        y = torch.cat([x @ block.T for block in decoded_block_rows(weight_nk, x.dtype)], dim=1)
    return y if bias_n is None else y + bias_n.to(x.dtype)


def decoded_block_rows(weight_nk: QuantTensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Decode the rows of blocks in order: values times scale in f32, rounded once."""
    scheme = weight_nk.scheme
    assert isinstance(scheme, Fp8Block) and weight_nk.scales is not None
    k = weight_nk.shape[1]
    for block_row, scales in enumerate(weight_nk.scales.to(torch.float32)):
        codes = weight_nk.values[block_row * scheme.rows : (block_row + 1) * scheme.rows]
        # int8 to int16 repeats the sign above the seven bits of the code; shift them into place and drop the repeats.
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(E4M3_IN_BF16)
        wide = bits.view(torch.bfloat16).to(torch.float32)
        if float(scales.max()) > LARGEST_SCALE:
            wide *= REBIAS
        else:
            scales = scales * REBIAS
        yield (wide * scales.repeat_interleave(scheme.columns)[:k]).to(dtype)
