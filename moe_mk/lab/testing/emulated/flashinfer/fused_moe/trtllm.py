"""The TRT-LLM entry points for tokens that are routed already, imitated: parameters, dtypes, shapes, and refusals.

The first weight holds up rows, then gate rows; hidden rows are rounded as the kernels round them, outputs of an expert
to bf16, and their weighted sum is f32. Experts outside [offset, offset + local) add nothing; an id that is no expert's
is an error here and undefined there. Source: flashinfer-ai/flashinfer, flashinfer/fused_moe/core.py and
csrc/trtllm_fused_moe_kernel_launcher.cu, read at 0.7.2; the signatures are those of 0.7.0 too.

What the imitated TRT-LLM entry points share: routing as it may be given, clamps, and the sum over experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.flashinfer.fused_moe.trtllm_formats import Rows, bf16, fp8_block, mxfp4, mxfp8, nvfp4
from moe_mk.lab.testing.emulated.flashinfer.tllm_enums import (
    ActivationType,
    Fp8QuantizationType,
    RoutingMethodType,
    SfLayout,
    WeightLayout,
)

MOST_CHOICES, MOST_EXPERTS = 32, 2048


@dataclass(frozen=True)
class Call:
    """The numbers of one call."""

    num_experts: int
    top_k: int
    offset: int
    local: int
    routing_method: int
    activation: int


@dataclass(frozen=True)
class Clamp:
    """Of SwiGLU: the slope of its sigmoid, what is added to up, and where both are clamped."""

    alpha: Tensor | None
    beta: Tensor | None
    limit: Tensor | None

    def gated(self, wide: Tensor, expert: int) -> Tensor:
        """gate sigmoid(alpha gate) (up + beta); `wide` holds up, then gate."""
        up, gate = wide.chunk(2, dim=1)
        if self.limit is not None:
            limit = float(self.limit[expert])
            up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
        alpha = 1.0 if self.alpha is None else float(self.alpha[expert])
        beta = 0.0 if self.beta is None else float(self.beta[expert])
        return gate * torch.sigmoid(alpha * gate) * (up + beta)


def run(
    call: Call, topk_ids: Tensor | tuple[Tensor, Tensor], products: Rows, clamp: Clamp, output: Tensor | None
) -> Tensor:
    """Check routing and output, and compute: (T, H) in bf16."""
    tokens, hidden = products.x.shape[0], products.x.shape[1]
    ids, weights = _routing(call, topk_ids, tokens)
    for each in (clamp.alpha, clamp.beta, clamp.limit):
        assert each is None or (each.dtype is torch.float32 and each.shape == (call.local,) and each.is_contiguous())
    assert call.activation == ActivationType.Swiglu, "only Swiglu is imitated"
    if output is None:
        output = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=ids.device)
    assert output.dtype is torch.bfloat16 and output.shape == (tokens, hidden) and output.is_contiguous(), "output"
    total = torch.zeros((tokens, hidden), dtype=torch.float32, device=ids.device)
    for expert in range(call.local):
        token_X, k_X = torch.nonzero(ids == call.offset + expert, as_tuple=True)
        if len(token_X):
            made = products.between(clamp.gated(products.wide(token_X, expert), expert))
            rows = products.out(made, expert).to(torch.bfloat16).float()
            total.index_add_(0, token_X, rows * weights[token_X, k_X, None])
    return output.copy_(total)


def _routing(call: Call, topk_ids: Tensor | tuple[Tensor, Tensor], tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and f32 weights. One tensor holds an id in the upper, a bf16 weight in the lower half of each element."""
    assert 0 < call.top_k <= call.num_experts and 0 < call.local <= call.num_experts
    assert call.offset >= 0 and call.offset + call.local <= call.num_experts, "expert offset and count"
    assert call.top_k <= MOST_CHOICES and call.num_experts <= MOST_EXPERTS, "no tier of the routing kernel is so large"
    assert call.routing_method == RoutingMethodType.Renormalize, "the method whose kernel sorts most experts"
    if isinstance(topk_ids, tuple):
        ids, weights = topk_ids
        assert weights.dtype in (torch.bfloat16, torch.float32) and weights.is_contiguous(), "topk_weights"
    else:
        assert topk_ids.dtype is torch.int32, "packed topk_ids must be int32"
        lower = (topk_ids & 0xFFFF).to(torch.int32).contiguous().view(torch.bfloat16)
        ids, weights = topk_ids >> 16, lower.view(*topk_ids.shape, 2)[..., 0]
    assert ids.dtype is torch.int32 and ids.is_contiguous() and ids.shape == (tokens, call.top_k), "topk_ids"
    assert weights.shape == ids.shape, "expert_weights dim1 must match top_k"
    assert bool(((ids >= 0) & (ids < call.num_experts)).all()), "an id that is no expert's"
    return ids, weights.to(torch.float32)


def refuse(**asked: object) -> None:
    """Raise NotImplementedError for what is asked for and not imitated."""
    wanted = [name for name, given in asked.items() if given is not None and given is not False]
    if wanted:
        raise NotImplementedError(f"not imitated: {', '.join(wanted)}")


Routed = Tensor | tuple[Tensor, Tensor]


def trtllm_bf16_routed_moe(
    topk_ids: Routed,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm2_weights: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = WeightLayout.BlockMajorK,
    do_finalize: bool = True,
    enable_pdl: bool = True,
    gemm1_lora_delta: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu.value,
    routing_replay_out: Tensor | None = None,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor | list[Tensor]:
    """bf16 experts over bf16 rows; weights in panels of 128 bytes."""
    refuse(gemm1_lora_delta=gemm1_lora_delta, routing_replay_out=routing_replay_out, unfinalized=not do_finalize)
    del n_group, topk_group, routed_scaling_factor, enable_pdl, tune_max_num_tokens
    assert use_shuffled_weight and weight_layout == WeightLayout.BlockMajorK, "BF16 MoE takes shuffled panels only"
    call = Call(num_experts, top_k, local_expert_offset, local_num_experts, routing_method_type, activation_type)
    clamp = Clamp(gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    products = bf16(hidden_states, gemm1_weights, gemm2_weights, intermediate_size)
    return run(call, topk_ids, products, clamp, output)


def trtllm_fp8_block_scale_routed_moe(
    topk_ids: Routed,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: Fp8QuantizationType = Fp8QuantizationType.DeepSeekFp8,
    activation_type: int = ActivationType.Swiglu.value,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> list[Tensor] | Tensor:
    """FP8 experts: DeepSeek's blocks of 128 x 128 with f32 scales, or MXFP8."""
    refuse(
        gemm1_lora_delta=gemm1_lora_delta, routing_bias=routing_bias, unfinalized=not do_finalize,
        valid_hidden_size=valid_hidden_size, valid_intermediate_size=valid_intermediate_size,
        majork_unshuffled=not use_shuffled_weight,
    )  # fmt: skip
    del routed_scaling_factor, enable_pdl, tune_max_num_tokens
    assert num_experts % 4 == 0, "Routing kernel expects that num_experts must be divisible by 4"
    assert num_experts > top_k, "num_experts must be greater than top_k"
    grouped = routing_method_type == RoutingMethodType.DeepSeekV3
    assert grouped or ((n_group or 0) <= 1 and (topk_group or 0) <= 1), "no groups without DeepSeekV3 routing"
    call = Call(num_experts, top_k, local_expert_offset, local_num_experts, routing_method_type, activation_type)
    clamp = Clamp(gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    given = (
        hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
    )  # fmt: skip
    if fp8_quantization_type == Fp8QuantizationType.DeepSeekFp8:
        assert weight_layout == WeightLayout.BlockMajorK, "shuffled blocks of FP8 are imitated in panels"
        products = fp8_block(*given, intermediate_size)
    else:
        assert fp8_quantization_type == Fp8QuantizationType.MxFp8 and weight_layout == WeightLayout.MajorK
        products = mxfp8(*given, intermediate_size)
    return run(call, topk_ids, products, clamp, output)


def trtllm_fp4_block_scale_routed_moe(
    topk_ids: Routed,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm1_bias: Tensor | None,
    gemm1_alpha: Tensor | None,
    gemm1_beta: Tensor | None,
    gemm1_clamp_limit: Tensor | None,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    gemm2_bias: Tensor | None,
    output1_scale_scalar: Tensor | None,
    output1_scale_gate_scalar: Tensor | None,
    output2_scale_scalar: Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    per_token_scale: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    gemm1_lora_delta: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    num_fused_shared_experts: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[Tensor]:
    """Four-bit experts: NVFP4 with rows alike, or MXFP4 with MXFP8 or bf16 rows; always shuffled."""
    refuse(
        gemm1_lora_delta=gemm1_lora_delta, routing_bias=routing_bias, unfinalized=not do_finalize,
        per_token_scale=per_token_scale, num_fused_shared_experts=num_fused_shared_experts,
        valid_hidden_size=valid_hidden_size, valid_intermediate_size=valid_intermediate_size,
    )  # fmt: skip
    del n_group, topk_group, routed_scaling_factor, enable_pdl, tune_max_num_tokens
    assert hidden_states_scale_layout in (None, SfLayout.layout_linear), "only the linear layout is supported"
    call = Call(num_experts, top_k, local_expert_offset, local_num_experts, routing_method_type, activation_type)
    clamp = Clamp(gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    given = (
        hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
    )  # fmt: skip
    products: Rows
    if hidden_states.dtype is torch.uint8:
        refuse(bias_of_nvfp4=gemm1_bias, clamp_of_nvfp4=gemm1_clamp_limit)
        wholes = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
        products = nvfp4(given, wholes, intermediate_size)
    else:
        products = mxfp4(given, (gemm1_bias, gemm2_bias), intermediate_size)
    return [run(call, topk_ids, products, clamp, output)]
