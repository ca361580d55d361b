"""What both kinds of kernels check of a call, and the payloads that it sends."""

from __future__ import annotations

from typing import Any

from torch import Tensor as TorchTensor

from moe_mk_contrib.emulated.nccl.core import NcclDataType
from moe_mk_contrib.emulated.nccl.ep.enums import CombineQuantizationRecipe, DispatchQuantizationRecipe, PassDir
from moe_mk_contrib.emulated.nccl.ep.state import PLAIN, RAW, HandleState, aborts_unless, refuses_unless
from moe_mk_contrib.emulated.nccl.ep.tensor import Tensor, read
from moe_mk_contrib.nccl_ep_limits import ROW_ALIGNMENT


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one physical row."""
    return tensor.sizes[-1] * tensor.buffer.element_size()


def payloads(handle: HandleState, inputs: Any, outputs: Any, config: Any) -> list[tuple[TorchTensor, Tensor]]:
    """What a dispatch sends, and where each arrives: values, and scales where they are forwarded."""
    group, recipe, tokens, out = handle.group, config.quantization_recipe, inputs.tokens, outputs.tokens
    aborts_unless(tokens is not None and tokens.ndim == 2, "inputs->tokens is required and 2D")
    refuses_unless(out is not None, "outputs->tokens is required")
    refuses_unless(out.datatype == tokens.datatype, "outputs->tokens dtype must match inputs->tokens")
    aborts_unless(tokens.sizes[0] == handle.num_tokens, "inputs->tokens has as many rows as topk_idx")
    aborts_unless(tokens.sizes[0] <= group.config.max_dispatch_tokens_per_rank, "more tokens than the group allows")
    if config.pass_direction != PassDir.FWD:
        raise NotImplementedError("backward passes are not emulated")
    if recipe == DispatchQuantizationRecipe.DS_FP8E3M4:
        raise NotImplementedError("quantisation inside of dispatch is not emulated")
    if recipe == DispatchQuantizationRecipe.NONE:
        refuses_unless(tokens.datatype in PLAIN, "tokens has unsupported dtype")
        refuses_unless(inputs.scales is None and outputs.scales is None, "scales must be null for NONE")
        aborts_unless(row_bytes(tokens) <= group.config.max_token_bytes, "token bytes exceed max_token_bytes")
        return [(read(tokens), out)]
    scales, out_scales = inputs.scales, outputs.scales
    refuses_unless(config.round_scales == 0, "round_scales must be zero when scales are forwarded")
    refuses_unless(tokens.datatype in RAW, "tokens must use a supported raw wire dtype")
    refuses_unless(row_bytes(tokens) % ROW_ALIGNMENT == 0, "QUANT_FWD token rows must be 16-byte aligned")
    refuses_unless(scales is not None and out_scales is not None, "inputs->scales and outputs->scales are required")
    refuses_unless(scales.ndim == 2 and scales.sizes[0] == tokens.sizes[0], "inputs->scales must be [tokens, scales]")
    refuses_unless(scales.datatype in (*RAW, NcclDataType.UINT8), "inputs->scales must use a supported raw dtype")
    aligned = row_bytes(scales) > 0 and row_bytes(scales) % ROW_ALIGNMENT == 0
    refuses_unless(aligned, "scale bytes per token must be non-zero and 16-byte aligned")
    refuses_unless(
        row_bytes(tokens) + row_bytes(scales) <= group.config.max_token_bytes,
        "token bytes plus scale bytes exceed the group token-byte limit",
    )
    for tensor in (tokens, scales, out, out_scales):
        refuses_unless(tensor.data % ROW_ALIGNMENT == 0, "token and scale storage must be 16-byte aligned")
    refuses_unless(out_scales.datatype == scales.datatype, "outputs->scales dtype must match inputs->scales")
    refuses_unless(
        out_scales.sizes == (*out.sizes[:-1], scales.sizes[1]), "outputs->scales must match the rows of tokens"
    )
    return [(read(tokens), out), (read(scales), out_scales)]


def check_combine(inputs: Any, config: Any) -> None:
    """What both kinds of combine check first."""
    if config.quantization_recipe != CombineQuantizationRecipe.NONE or config.pass_direction != PassDir.FWD:
        raise NotImplementedError("NVFP4 combine and backward passes are not emulated")
    aborts_unless(inputs.tokens is not None, "required tensor field is NULL")
    refuses_unless(inputs.scales is None, "inputs->scales must be null for NONE")
    refuses_unless(inputs.tokens.datatype in PLAIN, "combine unsupported token dtype")
