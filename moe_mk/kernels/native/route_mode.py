"""Gate, scores, bias, grouped top-k and weights of a batch of tokens in one native call, on raw tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.native.library import CRoute, Isa, Native
from moe_mk.shapes import expect


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
