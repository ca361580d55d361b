"""Other projects' FP8 experts on the same weights and tokens, where they can be imported; none is a dependency.

Each returns a call on one set of tokens, or raises with the reason why it cannot take part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_mk.kernels.triton.activation_quantize import activation_quantize
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

Call = Callable[[], Tensor]


def deep_gemm_contiguous(weights: ExpertWeights, tokens: RowTokens) -> Call:
    """Both grouped GEMMs of DeepGEMM with our activation and quantisation between them.

    Sorting, padding each expert to the library's alignment, and the sum over choices are outside the clock: this is
    less work than ours does, in the library's favour. Read at sgl-deep-gemm 0.1.5 (deepseek-ai/DeepGEMM).
    """
    import deep_gemm

    alignment = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
    ids = tokens.ids_RK.flatten().long()
    order = torch.argsort(ids, stable=True)
    counts = torch.bincount(ids, minlength=weights.num_slots)
    padded = (counts + alignment - 1) // alignment * alignment
    starts, place = torch.cumsum(padded, 0) - padded, torch.cumsum(counts, 0) - counts
    target = starts[ids[order]] + torch.arange(len(order), device=order.device) - place[ids[order]]
    total, hidden = int(padded.sum()), weights.w13.shape[2]
    row = order // tokens.ids_RK.shape[1]
    x = torch.zeros((total, hidden), dtype=torch.float8_e4m3fn, device=order.device)
    x.view(torch.uint8)[target] = tokens.x_RH.values.view(torch.uint8)[row]
    scales = torch.ones((total, hidden // 128), dtype=torch.float32, device=order.device)
    scales[target] = tokens.x_RH.scales[row]
    scales = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    experts = torch.full((total,), -1, dtype=torch.int32, device=order.device)
    experts[target] = ids[order].int()
    wide = torch.empty((total, weights.w13.shape[1]), dtype=torch.bfloat16, device=order.device)
    y = torch.empty((total, hidden), dtype=torch.bfloat16, device=order.device)

    def call() -> Tensor:
        first, second = (weights.w13.values, weights.w13.scales), (weights.w2.values, weights.w2.scales)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, scales), first, wide, experts)
        values, made = activation_quantize(wide, "silu", 128, column_major=True)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (values, deep_gemm.get_mn_major_tma_aligned_tensor(made)), second, y, experts
        )
        return y

    call.reads = (target, row, tokens, order)  # type: ignore[attr-defined]
    return call


def vllm_triton(weights: ExpertWeights, tokens: RowTokens) -> Call:
    """vLLM's fused_experts, which rounds bf16 tokens itself. Read at vLLM 0.33 (vllm-project/vllm)."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    config = fp8_w8a8_moe_quant_config(weights.w13.scales, weights.w2.scales, block_shape=[128, 128])
    x = tokens.x_RH.dequantize(torch.bfloat16)

    def call() -> Tensor:
        return fused_experts(
            x, weights.w13.values, weights.w2.values, tokens.weights_RK, tokens.ids_RK, quant_config=config
        )

    return call


PEERS: dict[str, Callable[[ExpertWeights, RowTokens], Call]] = {
    "DeepGEMM, GEMMs only": deep_gemm_contiguous,
    "vLLM, Triton": vllm_triton,
}
