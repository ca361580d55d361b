"""Prepared calls: what does not change between calls is checked and written into the arguments of a kernel once.

    RouteCall    hidden states to router logits, and to top-k experts and weights
    ExpertsCall  rows to the weighted sum of their experts
    ProductCall  rows times one matrix

A call passes addresses of its tensors and a number of threads. Calls may run concurrently. A whole layer is one call
as well, see `layer.py`. Below them are functions for one call: fused experts on packed weights (w13, bias, activation,
w2, bias, routing weights, sum over k).
"""

from __future__ import annotations

import copy
import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding, check_call, check_shared, wrong_formats
from moe_mk.kernels.native.instruction_set import isa_of
from moe_mk.kernels.native.layout import SCALE_BLOCK, STEP, Format, PartScales
from moe_mk.kernels.native.library import CExperts, CMatrix, CRoute, Isa, Native, Status
from moe_mk.kernels.native.packed import PackedMatrix
from moe_mk.shapes import expect


class Scoring(IntEnum):
    """C enumeration `Scoring` of csrc/abi.h."""

    SOFTMAX = 0
    SIGMOID = 1


@dataclass(frozen=True)
class RouteMode:
    """The choice and the weights of experts.

    num_groups, top_groups: only experts of the best groups can be chosen; 1, 1: no groups. The score of a group is the
    sum of its two best scores with a bias, its best one without. scale multiplies the weights after renormalisation.
    """

    top_k: int
    scoring: Scoring = Scoring.SIGMOID
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0


def route_block(
    native: Native, gate_EH: torch.Tensor, bias_E: torch.Tensor | None, mode: RouteMode, isa: Isa | None = None
) -> CRoute:
    """The arguments of a call that do not depend on its tokens; raises ShapeError unless gate and bias are dense."""
    if not is_dense(gate_EH, bias_E):
        strides = gate_EH.stride(), None if bias_E is None else bias_E.stride()
        raise ShapeError(f"cpu route: strides {strides} of gate and bias, expected contiguous ones; call .contiguous()")
    return CRoute(
        gate=gate_EH.data_ptr(), bias=None if bias_E is None else bias_E.data_ptr(), gate_stride=gate_EH.stride(0),
        hidden=gate_EH.shape[1], num_experts=gate_EH.shape[0], top_k=mode.top_k, num_groups=mode.num_groups,
        top_groups=mode.top_groups, scoring=int(mode.scoring), renormalize=mode.renormalize,
        gate_f32=gate_EH.dtype == torch.float32, scale=mode.scale, isa=int(native.isa_or_best(isa)),
    )  # fmt: skip


def is_dense(gate_EH: torch.Tensor, bias_E: torch.Tensor | None) -> bool:
    """Whether a prepared call can read them where they are."""
    return gate_EH.is_contiguous() and (bias_E is None or bias_E.is_contiguous())


def check_gate(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, mode: RouteMode) -> None:
    """Raise ShapeError with everything wrong with a tensor, ConfigError for groups and choices that do not fit."""
    cpu = torch.device("cpu")
    expect("cpu route: x", x, "T H", torch.bfloat16, cpu)
    expect("cpu route: gate", gate, "E H", (torch.bfloat16, torch.float32), cpu, H=x.shape[1])
    if bias is not None:
        expect("cpu route: bias", bias, "E", torch.float32, cpu, E=gate.shape[0])
    num_experts, groups = gate.shape[0], mode.num_groups
    if groups < 1 or num_experts % groups or not 1 <= mode.top_groups <= groups:
        raise ConfigError(f"{num_experts} experts do not make {groups} groups of which {mode.top_groups} are chosen")
    reachable = num_experts // groups * mode.top_groups
    if not 1 <= mode.top_k <= reachable:
        raise ConfigError(f"top_k={mode.top_k}, but {mode.top_groups} of {groups} groups hold {reachable} experts")


class RouteCall:
    """The router with gate, bias and mode fixed: they are checked and written into the arguments once.

    gate_EH: bf16 or f32; products and sums are f32. bias_E: f32, affects the choice, not the weights. Both are
    contiguous; their values are read at every call. Ties go to the lower index. A token with a NaN among its biased
    scores is dropped (ids -1, weights 0); a choice with a biased score of -inf is dropped, as in router.grouped_topk.
    Calls may run concurrently.
    """

    def __init__(
        self,
        native: Native,
        gate_EH: torch.Tensor,
        bias_E: torch.Tensor | None,
        mode: RouteMode,
        isa: Isa | None = None,
    ) -> None:
        """Raises ShapeError for tensors that do not fit, ConfigError for groups that do not."""
        nothing_TH = torch.empty((0, gate_EH.shape[1]), dtype=torch.bfloat16, device="cpu")
        check_gate(nothing_TH, gate_EH, bias_E, mode)
        self._native, self._gate_EH, self._bias_E, self._mode = native, gate_EH, bias_E, mode
        self._hidden, self._num_experts = gate_EH.shape[1], gate_EH.shape[0]
        self._block, self._function = route_block(native, gate_EH, bias_E, mode, isa), native.functions["route"]

    def __call__(self, x_TH: torch.Tensor, threads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose the experts of bf16 [T, H]: ids [T, K] int32, weights [T, K] f32, logits [T, E] f32."""
        tokens, top_k = x_TH.shape[0], self._mode.top_k
        if x_TH.dtype is not torch.bfloat16 or x_TH.shape[1] != self._hidden:
            check_gate(x_TH, self._gate_EH, self._bias_E, self._mode)
        x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
        ids_TK = torch.empty(tokens, top_k, dtype=torch.int32, device="cpu")
        weights_TK = torch.empty(tokens, top_k, dtype=torch.float32, device="cpu")
        logits_TE = torch.empty(tokens, self._num_experts, dtype=torch.float32, device="cpu")
        call = CRoute.from_buffer_copy(self._block)
        call.x, call.num_tokens, call.x_stride = x_TH.data_ptr(), tokens, x_TH.stride(0)
        call.ids, call.weights, call.logits = ids_TK.data_ptr(), weights_TK.data_ptr(), logits_TE.data_ptr()
        call.threads = self._native.threads(threads)
        status = self._function(ctypes.byref(call))
        if status != Status.OK:
            self._native.check("route", status)
        return ids_TK, weights_TK, logits_TE


class ExpertsCall:
    """`experts_rows` with the weights and the mode fixed: they are written into the arguments once.

    The packed values are read at every call; the caller keeps the matrices alive. Calls may run concurrently.
    """

    def __init__(
        self,
        native: Native,
        w13: PackedMatrix,
        w2: PackedMatrix,
        shared: tuple[PackedMatrix, PackedMatrix] | None,
        mode: ExpertsMode,
        isa: Isa | None = None,
    ) -> None:
        """Raises ShapeError for shared experts and biases that do not fit."""
        if shared is not None:
            check_shared(shared, w13, w2)
        self._native, self._mode, self._matrices = native, mode, (w13, w2, *(shared or ()))
        self._hidden, self._num_outputs = w13.layout.num_inputs, w2.layout.num_outputs
        self._isa = isa
        self._block, self._function = experts_block(native, w13, w2, shared, mode, isa), native.functions["experts"]
        self._checked = False

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertsCall:
        """A copy reads the copied matrices: the arguments hold addresses."""
        w13, w2, *shared = copy.deepcopy(self._matrices, memo)
        return ExpertsCall(self._native, w13, w2, (shared[0], shared[1]) if shared else None, self._mode, self._isa)

    def __call__(
        self,
        x_RH: torch.Tensor,
        x_scales_RX: torch.Tensor | None,
        ids_RK: torch.Tensor,
        weights_RK: torch.Tensor | None,
        out_RH: torch.Tensor | None,
        threads: int,
    ) -> torch.Tensor:
        """Run the rows as described in `experts_rows`; returns `out_RH`."""
        rows = x_RH.shape[0]
        plain = x_scales_RX is None and x_RH.dtype is torch.bfloat16 and x_RH.shape[1] == self._hidden
        routed = weights_RK is not None and weights_RK.dtype is torch.float32 and weights_RK.shape == ids_RK.shape
        fits = ids_RK.dtype is torch.int32 and ids_RK.dim() == 2 and ids_RK.shape[0] == rows
        if not (self._checked and plain and routed and fits):
            check_call(self._mode, x_RH, x_scales_RX, ids_RK, weights_RK, self._matrices)
            self._checked = True
        if out_RH is None:
            out_RH = torch.empty(rows, self._num_outputs, dtype=torch.bfloat16, device="cpu")
        x_RH, ids_RK = x_RH if x_RH.stride(-1) == 1 else x_RH.contiguous(), ids_RK.contiguous()
        call = CExperts.from_buffer_copy(self._block)
        call.x, call.ids, call.out = x_RH.data_ptr(), ids_RK.data_ptr(), out_RH.data_ptr()
        call.num_rows, call.top_k, call.threads = rows, ids_RK.shape[1], self._native.threads(threads)
        call.x_stride, call.out_stride = x_RH.stride(0), out_RH.stride(0)
        call.out_f32 = out_RH.dtype == torch.float32
        if weights_RK is not None:
            weights_RK = weights_RK.contiguous()
            call.weights = weights_RK.data_ptr()
        if x_scales_RX is not None:
            x_scales_RX = x_scales_RX if x_scales_RX.stride(-1) == 1 else x_scales_RX.contiguous()
            call.x_scales, call.x_scale_stride = x_scales_RX.data_ptr(), x_scales_RX.stride(0)
        status = self._function(ctypes.byref(call))
        if status != Status.OK:
            self._native.check("experts", status)
        return out_RH


class ProductCall:
    """Rows times one packed matrix, plus its bias: bf16 [R, K] to bf16 [R, N]. Concurrent calls are allowed."""

    def __init__(self, native: Native, matrix: PackedMatrix, *, int8: bool = False) -> None:
        """int8: rows are rounded to INT8, one scale each for weights of INT8 rows, else one for each of their groups.

        Raises ShapeError for a matrix that is not one slot of whole steps of inputs, or has no products with INT8 rows.
        """
        layout = matrix.layout
        if layout.gated or matrix.num_slots != 1 or layout.num_inputs % STEP:
            slots = f"{matrix.num_slots} slots of {layout.num_inputs} inputs, gated={layout.gated}"
            raise ShapeError(f"a product takes one plain matrix with a multiple of {STEP} inputs, not {slots}")
        self._native, self._matrix = native, matrix
        by_row = Rounding.INT8 if layout.format is Format.INT8 else Rounding.INT8_PARTS
        mode = ExpertsMode(quantize=by_row if int8 else Rounding.NONE)
        if wrong := wrong_formats(mode, (matrix,)):
            raise ShapeError("; ".join(wrong))
        self._block = experts_block(native, matrix, matrix, None, mode)
        self._block.top_k, self._block.x_stride, self._block.out_stride = 1, layout.num_inputs, layout.num_outputs
        self._at, self._function = ctypes.byref(self._block), native.functions["product"]

    def __call__(self, x_RK: torch.Tensor, threads: int) -> torch.Tensor:
        """Multiply; raises ShapeError for other rows than bf16 of K columns on the CPU."""
        layout, fits = self._matrix.layout, x_RK.dtype is torch.bfloat16 and x_RK.is_cpu and x_RK.dim() == 2
        if not fits or x_RK.shape[1] != layout.num_inputs:
            given = f"{tuple(x_RK.shape)} {x_RK.dtype} on {x_RK.device}"
            raise ShapeError(f"x is {given}, expected (R, {layout.num_inputs}) bfloat16 on the CPU")
        x_RK = x_RK.contiguous()
        out_RN = torch.empty((x_RK.shape[0], layout.num_outputs), dtype=torch.bfloat16, device="cpu")
        threads = self._native.threads(threads)
        status = self._function(self._at, x_RK.data_ptr(), x_RK.shape[0], out_RN.data_ptr(), threads)
        if status != Status.OK:
            self._native.check("product", status)
        return out_RN


def experts_block(
    native: Native,
    w13: PackedMatrix,
    w2: PackedMatrix,
    shared: tuple[PackedMatrix, PackedMatrix] | None,
    mode: ExpertsMode,
    isa: Isa | None = None,
) -> CExperts:
    """The arguments of a call that do not depend on its rows. isa: None: chosen for the format of w13."""
    block = CExperts(
        num_slots=w13.num_slots, w13=_matrix(w13), w2=_matrix(w2), gated=w13.layout.gated,
        activation=int(mode.activation), alpha=mode.alpha, limit=mode.limit, quantize=mode.quantize,
        batch_invariant=mode.batch_invariant,
        isa=int(isa_of(native, w13.layout.format, mode.quantize, isa)), **vars(mode.tuning),
    )  # fmt: skip
    if shared is not None:
        block.shared_w13, block.shared_w2 = _matrix(shared[0]), _matrix(shared[1])
    return block


def _matrix(packed: PackedMatrix) -> CMatrix:
    layout, bias = packed.layout, packed.bias_LX
    parts = layout.parts or PartScales(0, torch.float32)
    if bias is not None:
        wide = layout.num_outputs * (2 if layout.gated else 1)
        if bias.dtype != torch.float32 or tuple(bias.shape) != (len(packed.values_LB), wide) or bias.stride(1) != 1:
            raise ShapeError(
                f"bias is {tuple(bias.shape)} {bias.dtype}, expected {(len(packed.values_LB), wide)} dense float32"
            )
    return CMatrix(
        row_of=_pointer(packed.row_of_L), data=packed.values_LB.data_ptr(), scales=_pointer(packed.scales_LX),
        output_scales=_pointer(packed.output_scales_LX), bias=_pointer(bias), slot_bytes=packed.values_LB.stride(0),
        slot_scales=_slot_size(packed.scales_LX), slot_output_scales=_slot_size(packed.output_scales_LX),
        slot_bias=_slot_size(bias), format=int(layout.format), num_outputs=layout.num_outputs,
        num_inputs=layout.num_inputs, block=SCALE_BLOCK, zeros=_pointer(packed.zeros_LX),
        slot_zeros=_slot_size(packed.zeros_LX), scale_type=parts.type_code, group=parts.group, biased=parts.biases,
    )  # fmt: skip


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _slot_size(tensor_LX: torch.Tensor | None) -> int:
    return 0 if tensor_LX is None else tensor_LX.stride(0)


def experts_rows(
    native: Native,
    x_RH: torch.Tensor,
    ids_RK: torch.Tensor,
    weights_RK: torch.Tensor | None,
    w13: PackedMatrix,
    w2: PackedMatrix,
    *,
    mode: ExpertsMode | None = None,
    shared: tuple[PackedMatrix, PackedMatrix] | None = None,
    x_scales_RX: torch.Tensor | None = None,
    out_RH: torch.Tensor | None = None,
    threads: int = 1,
    isa: Isa | None = None,
) -> torch.Tensor:
    """Run every row through its local experts and return the weighted sum over k, [R, H] in bf16.

    x_RH: bf16, or e4m3 with x_scales_RX (f32, one per 128 of H), or int8 with one per row if the mode quantises to
    INT8. Rows without a local expert are not read. ids_RK: int32 local slots, -1: dropped. weights_RK: f32; None: all
    ones. shared: w13 and w2 of one slot applied to every row with weight 1, in the same call; its I may differ. out_RH:
    the output, bf16 or f32; allocated if None. Bit-equal for any number of threads.
    """
    call = ExpertsCall(native, w13, w2, shared, mode or ExpertsMode(), isa)
    return call(x_RH, x_scales_RX, ids_RK, weights_RK, out_RH, threads)
