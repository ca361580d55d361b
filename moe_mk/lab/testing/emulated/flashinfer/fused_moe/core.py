"""`cutlass_fused_moe`, imitated: its parameters, what it takes in which dtype, shape and layout, and what it refuses.

The first weight holds up rows before gate rows. Rows of experts outside this rank's range add nothing. Sums are f32;
hidden rows are rounded as the library rounds them between its GEMMs. Source: flashinfer-ai/flashinfer,
flashinfer/fused_moe/core.py and its CUTLASS binding, read at 0.6.18 to 0.7.2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from moe_mk.lab.testing.emulated.flashinfer.fused_moe.formats import Products, products_of
from moe_mk.lab.testing.emulated.flashinfer.fused_moe.trtllm import (
    trtllm_bf16_routed_moe,
    trtllm_fp4_block_scale_routed_moe,
    trtllm_fp8_block_scale_routed_moe,
)
from moe_mk.lab.testing.emulated.flashinfer.tllm_enums import (
    ActivationType,
    Fp8QuantizationType,
    RoutingMethodType,
    SfLayout,
    WeightLayout,
)

__all__ = [
    "ActivationType", "Fp8QuantizationType", "RoutingMethodType", "SfLayout", "WeightLayout", "cutlass_fused_moe",
    "trtllm_bf16_routed_moe", "trtllm_fp4_block_scale_routed_moe", "trtllm_fp8_block_scale_routed_moe",
]  # fmt: skip


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    input_sf: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: ActivationType = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: list[int] | None = None,
    workspace_buffer: Tensor | None = None,
) -> list[Tensor]:
    """Compute both GEMMs over the chosen experts of this rank, weighted and summed: [(N, H) in output_dtype]."""
    _refuse_what_is_not_imitated(
        min_latency_mode=min_latency_mode, use_w4_group_scaling=use_w4_group_scaling,
        use_packed_weights=use_packed_weights, use_wfp4afp8_humming=use_wfp4afp8_humming,
        biases=fc1_expert_biases is not None or fc2_expert_biases is not None,
        clamps=any(each is not None for each in (swiglu_alpha, swiglu_beta, swiglu_limit)),
        tensor_parallel=tp_size != 1, clusters=cluster_size != 1, unfolded_scales=not swizzled_input_sf,
    )  # fmt: skip
    del tp_rank, cluster_rank, enable_alltoall, tune_max_num_tokens, enable_pdl, profile_ids, workspace_buffer
    del use_fused_finalize
    assert activation_type in (ActivationType.Swiglu, ActivationType.Relu2), f"{activation_type!r} is not imitated"
    local, hidden = fc2_expert_weights.shape[:2]
    x, ids, scales = input, token_selected_experts, token_final_scales
    assert x.dim() == 2 and x.is_contiguous(), "input"
    assert ids.dtype is torch.int32 and ids.dim() == 2 and ids.is_contiguous(), "token_selected_experts"
    assert bool((ids >= 0).all()), "an unassigned expert id is past the last one, not before the first"
    assert scales.dtype is torch.float32 and scales.shape == ids.shape and scales.is_contiguous(), "token_final_scales"
    assert ids.shape[0] == x.shape[0], "one row of choices a token"
    products = products_of(
        input, input_sf, fc1_expert_weights, fc2_expert_weights, quant_scales or [], output_dtype,
        halves=2 if activation_type is ActivationType.Swiglu else 1, block_scale=use_deepseek_fp8_block_scale,
        mxfp8=use_mxfp8_act_scaling,
    )  # fmt: skip
    shape = (input.shape[0], hidden)
    if output is None:
        output = torch.empty(shape, dtype=output_dtype, device=input.device)
    assert output.shape == shape and output.dtype is output_dtype and output.is_contiguous(), "output"
    total = torch.zeros(shape, dtype=torch.float32, device=input.device)
    for expert in range(local):
        token_X, k_X = torch.nonzero(token_selected_experts == ep_rank * local + expert, as_tuple=True)
        if len(token_X):
            rows = _expert(products, token_X, expert, activation_type)
            total.index_add_(0, token_X, rows * token_final_scales[token_X, k_X, None])
    del ep_size
    return [output.copy_(total)]


def _expert(products: Products, token_X: Tensor, expert: int, activation_type: ActivationType) -> Tensor:
    wide = products.x[token_X] @ products.first(expert).T
    if activation_type is ActivationType.Swiglu:
        up, gate = wide.chunk(2, dim=1)  # the linear half comes first
        made = silu(gate) * up
    else:
        made = relu(wide).square()
    return products.between(made) @ products.second(expert).T


def _refuse_what_is_not_imitated(**asked: bool) -> None:
    wanted = [name for name, given in asked.items() if given]
    if wanted:
        raise NotImplementedError(f"not imitated: {', '.join(wanted)}")
