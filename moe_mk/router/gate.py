"""The gate: hidden states to router logits, in the precision asked for, by the best tier that applies.

Precision is a setting and not a detail: in bf16 and in f32 the same gate chooses different experts for several percent
of the tokens. "float32" is what transformers computes; "model" is what DeepSeek's own inference code computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.external.device import without_autocast
from moe_mk.registry import did_you_mean
from moe_mk.shapes import expect

RouterDtype = Literal["float32", "model"]
GateTier = Literal["native", "small_m", "bf16_to_fp32", "plain"]

SMALL_M_LIBRARY, SMALL_M_MAX_TOKENS = "triton", 16
"""Of the kernel in `kernels.triton.gate_logits`. vLLM's dsv3_router_gemm serves as many tokens."""


@dataclass(frozen=True)
class GateChoice:
    """Which tier computes the logits, and why each other one does not."""

    tier: GateTier
    reasons: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Every reason against every tier but the chosen one; never an empty tuple."""

    def __str__(self) -> str:
        return "\n".join([f"gate: {self.tier}", *(f"  {tier}: {'; '.join(why)}" for tier, why in self.reasons.items())])


def choose_gate_tier(
    arch: tuple[int, int] | None, num_tokens: int, dtype: torch.dtype, router_dtype: str, available: frozenset[str]
) -> GateChoice:
    """Choose the gate's tier for one device and token count, from plain data only.

    arch: CUDA compute capability, (9, 0) for sm_90; None is any device without one.
    dtype: of hidden states and gate weight. available: specialised gate kernels that can be used here ("small_m" with
    triton, and "native" where the experts run in native CPU code, the settings let the router do so as well and it can
    score so).
    """
    check_router_dtype(router_dtype)
    against: dict[GateTier, list[str]] = {
        "native": _against_native(arch, dtype, router_dtype, available),
        "small_m": _against_small_m(arch, num_tokens, dtype, router_dtype, available),
        "bf16_to_fp32": _against_mixed_output(arch, (8, 0), dtype, router_dtype),
        "plain": [],
    }
    chosen = next(tier for tier, reasons in against.items() if not reasons)
    outranked = f"applies, but the more specialised {chosen} comes first"
    return GateChoice(chosen, {tier: tuple(why) or (outranked,) for tier, why in against.items() if tier != chosen})


def _against_native(
    arch: tuple[int, int] | None, dtype: torch.dtype, router_dtype: str, available: frozenset[str]
) -> list[str]:
    """Gate, scores and choice in one call, `moe_mk.kernels.native.RouteCall`."""
    reasons = [] if arch is None else [f"needs a CPU, this device is sm_{arch[0]}{arch[1]}"]
    if dtype is not torch.bfloat16:
        reasons.append(f"reads torch.bfloat16, hidden states are {dtype}")
    if router_dtype != "float32":
        reasons.append(f"scores in float32, router_dtype={router_dtype!r} asks for scores in the model dtype")
    if "native" not in available:
        scored = "sigmoid or softmax scores"
        reasons.append(f"comes with experts in native CPU code and {scored}, unless kernel.fused_router = false")
    return reasons


def _against_small_m(
    arch: tuple[int, int] | None, num_tokens: int, dtype: torch.dtype, router_dtype: str, available: frozenset[str]
) -> list[str]:
    reasons = _against_mixed_output(arch, (9, 0), dtype, router_dtype)
    if num_tokens > SMALL_M_MAX_TOKENS:
        reasons.append(f"serves at most {SMALL_M_MAX_TOKENS} tokens, got {num_tokens}")
    if "small_m" not in available:
        reasons.append(f"{SMALL_M_LIBRARY} is not installed")
    return reasons


def _against_mixed_output(
    arch: tuple[int, int] | None, least: tuple[int, int], dtype: torch.dtype, router_dtype: str
) -> list[str]:
    """Requirements of both tiers that read bf16 and write f32."""
    reasons: list[str] = []
    if arch is None:
        reasons.append(f"needs a CUDA device of sm_{least[0]}{least[1]} or newer, this one has no compute capability")
    elif arch < least:
        reasons.append(f"needs sm_{least[0]}{least[1]} or newer, got sm_{arch[0]}{arch[1]}")
    if dtype is not torch.bfloat16:
        reasons.append(f"reads torch.bfloat16, hidden states and gate weight are {dtype}")
    if router_dtype != "float32":
        reasons.append(f"writes float32 logits, router_dtype={router_dtype!r} asks for logits in the model dtype")
    return reasons


@without_autocast
def gate_logits(x_TH: Tensor, weight_EH: Tensor, router_dtype: str = "float32", tier: str = "plain") -> Tensor:
    """Compute router logits [T, E]: f32 for router_dtype "float32", x's dtype for "model".

    weight_EH: under "float32" and tier "plain" it may be f32 while x is not. A caller without a mixed-precision GEMM
    converts the weight once and passes that; any other weight is converted on every call.
    Raises ShapeError for tensors, ConfigError for unknown names, UnsupportedError for a tier that cannot serve them.
    """
    check_router_dtype(router_dtype)
    expect("x", x_TH, "T H", (torch.float32, torch.bfloat16, torch.float16))
    weight_dtypes = (x_TH.dtype,) if router_dtype == "model" else (x_TH.dtype, torch.float32)
    expect("gate weight", weight_EH, "E H", weight_dtypes, x_TH.device, H=x_TH.shape[1])
    if tier == "plain":
        return linear(x_TH, weight_EH) if router_dtype == "model" else linear(x_TH.float(), weight_EH.float())
    if tier in ("bf16_to_fp32", "small_m"):
        if problems := tier_problems(tier, x_TH, weight_EH, router_dtype):
            raise UnsupportedError(f"gate tier {tier!r} cannot run", problems)
        return mixed_gemm(x_TH, weight_EH) if tier == "bf16_to_fp32" else small_m_gemm(x_TH, weight_EH)
    if tier == "native":
        reason = "it chooses in the same call, which a layer makes; use tier='plain'"
        raise UnsupportedError("gate tier 'native' gives no logits alone", [reason])
    raise ConfigError(f"gate tier {tier!r} is unknown{did_you_mean(tier, get_args(GateTier))}")


def tier_problems(tier: str, x_TH: Tensor, weight_EH: Tensor, router_dtype: str) -> list[str]:
    """List why these tensors cannot take a tier that reads bf16 and writes f32."""
    reasons: list[str] = []
    if x_TH.device.type != "cuda":
        kernel = "its kernel" if tier == "small_m" else "torch.mm(out_dtype=)"
        reasons.append(f"{kernel} needs a CUDA device, x is on {x_TH.device}; use tier='plain'")
    if tier == "small_m" and x_TH.shape[0] > SMALL_M_MAX_TOKENS:
        reasons.append(f"serves at most {SMALL_M_MAX_TOKENS} tokens, got {x_TH.shape[0]}; use tier='bf16_to_fp32'")
    for name, tensor in () if tier == "small_m" else (("x", x_TH), ("gate weight", weight_EH)):
        if tensor.dtype is not torch.bfloat16:
            reasons.append(f"reads torch.bfloat16, {name} is {tensor.dtype}; use tier='plain'")
    if router_dtype != "float32":
        reasons.append(f"writes float32 logits, router_dtype is {router_dtype!r}; use tier='plain'")
    return reasons


def mixed_gemm(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """Multiply bf16 by bf16 and keep the f32 accumulator: one GEMM, no f32 copy of either operand."""
    return torch.mm(x_TH, weight_EH.T, out_dtype=torch.float32)


def small_m_gemm(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """f32 logits of few tokens by the Triton kernel; tensors that it cannot read take the mixed-precision GEMM.

    Those are tensors that are traced, of a subclass, strided or with a gradient.
    """
    if type(x_TH) is not Tensor or type(weight_EH) is not Tensor or torch.compiler.is_compiling():
        return mixed_gemm(x_TH, weight_EH)
    from moe_mk.kernels.triton import gate_logits as few

    return few.gate_logits(x_TH, weight_EH) if few.serves(x_TH, weight_EH) else mixed_gemm(x_TH, weight_EH)


def check_router_dtype(router_dtype: str) -> None:
    """Raise ConfigError unless the router dtype is a known one."""
    if router_dtype not in get_args(RouterDtype):
        raise ConfigError(
            f"router_dtype={router_dtype!r} is unknown{did_you_mean(router_dtype, get_args(RouterDtype))}"
        )
