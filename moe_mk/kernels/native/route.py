"""Gate, scores, bias, grouped top-k and weights of a batch of tokens in one native call, on raw tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.native.library import CRoute, Isa, Native


class Scoring(IntEnum):
    """`Scoring` of csrc/abi.h."""

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


def route(
    native: Native,
    x_TH: torch.Tensor,
    gate_EH: torch.Tensor,
    bias_E: torch.Tensor | None,
    mode: RouteMode,
    *,
    threads: int = 1,
    isa: Isa | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose each token's experts: ids [T, K] int32, weights [T, K] f32, logits [T, E] f32.

    x_TH: bf16. gate_EH: bf16 or f32; products and sums are f32. bias_E: f32, affects the choice, not the weights.
    Ties go to the lower index. A token with a NaN among its biased scores is dropped (ids -1, weights 0); a choice with
    a biased score of -inf is dropped, as in router.grouped_topk.
    """
    check_gate(x_TH, gate_EH, bias_E, mode)
    gate_EH = gate_EH if gate_EH.stride(1) == 1 else gate_EH.contiguous()
    bias_E = None if bias_E is None else bias_E.contiguous()
    return RouteCall(native, gate_EH, bias_E, mode, isa)(x_TH, threads)


class RouteCall:
    """`route` with the gate, the bias and the mode fixed: they are checked and written into the arguments once.

    gate_EH has dense rows, bias_E is dense; their values are read at every call. Calls may run concurrently.
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
        self._block = route_block(native, gate_EH, bias_E, mode, isa)

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
        call.threads = threads
        self._native.call("route", ctypes.byref(call))
        return ids_TK, weights_TK, logits_TE


def route_block(
    native: Native, gate_EH: torch.Tensor, bias_E: torch.Tensor | None, mode: RouteMode, isa: Isa | None = None
) -> CRoute:
    """The arguments of a call that do not depend on its tokens. The rows of the gate and the bias are contiguous."""
    return CRoute(
        gate=gate_EH.data_ptr(),
        bias=None if bias_E is None else bias_E.data_ptr(),
        gate_stride=gate_EH.stride(0),
        hidden=gate_EH.shape[1],
        num_experts=gate_EH.shape[0],
        top_k=mode.top_k,
        num_groups=mode.num_groups,
        top_groups=mode.top_groups,
        scoring=int(mode.scoring),
        renormalize=mode.renormalize,
        gate_f32=gate_EH.dtype == torch.float32,
        scale=mode.scale,
        isa=int(native.isa_or_best(isa)),
    )


def check_gate(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, mode: RouteMode) -> None:
    """Raise ShapeError with everything wrong with the tensors, ConfigError for groups and choices that do not fit."""
    wrong = []
    if x.dtype != torch.bfloat16:
        wrong.append(f"x is {x.dtype}, expected bfloat16")
    if gate.dtype not in (torch.bfloat16, torch.float32) or gate.shape[1] != x.shape[1]:
        wrong.append(f"gate is {tuple(gate.shape)} {gate.dtype}, expected (E, {x.shape[1]}) bfloat16 or float32")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != gate.shape[:1]):
        wrong.append(f"bias is {tuple(bias.shape)} {bias.dtype}, expected ({gate.shape[0]},) float32")
    if wrong:
        raise ShapeError("cpu route: " + "; ".join(wrong))
    num_experts, groups = gate.shape[0], mode.num_groups
    if groups < 1 or num_experts % groups or not 1 <= mode.top_groups <= groups:
        raise ConfigError(f"{num_experts} experts do not make {groups} groups of which {mode.top_groups} are chosen")
    reachable = num_experts // groups * mode.top_groups
    if not 1 <= mode.top_k <= reachable:
        raise ConfigError(f"top_k={mode.top_k}, but {mode.top_groups} of {groups} groups hold {reachable} experts")
