"""FP8 models of transformers on a CPU: three matrix products that replace GPU kernels.

Without them transformers converts an FP8 checkpoint to bf16 on a machine without a GPU, twice the memory. Each product
rounds activations to FP8 per token and group of columns, as the checkpoint was made for, and decodes the weight a block
row at a time. Names as of transformers 5.24: they are not public, so their existence is checked first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.experts.torch_cpu import decoded_block_rows
from moe_mk.external.device import without_autocast
from moe_mk.quant.fp8 import activation_scheme, weight_scheme
from moe_mk.quant.tensor import QuantTensor

LOADED = "_FINEGRAINED_FP8"
BUNDLE = "FineGrainedFP8"
CHECK = "validate_environment"
REWRITES = "_impl_tp_layer_overrides"
LOADER = "load_finegrained_fp8_kernel"
"""What every FP8 product of transformers calls first; 5.16 has none."""


@contextmanager
def cpu_fp8() -> Iterator[None]:
    """Context in which FP8 checkpoints load and run as FP8 on a CPU. Experimental; one thread at a time.

    Load the model and generate inside it. Raises UnsupportedError, without changes, if the installed transformers
    has another structure.
    """
    layers, quantizer = _parts()
    _name_this_context(layers)
    own = getattr(layers, BUNDLE)(matmul=matmul, batched_matmul=batched_matmul, grouped_matmul=grouped_matmul)
    swaps = [(layers, LOADED, own), (quantizer, CHECK, _check_dynamic), *_plans_of_every_name(layers)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    for owner, name, value in swaps:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _parts() -> tuple[ModuleType, type]:
    from transformers.integrations import finegrained_fp8 as layers
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer as quantizer

    wanted = [(layers, LOADED), (layers, BUNDLE), (layers, "fp8_linear"), (quantizer, CHECK)]
    missing = [name for owner, name in wanted if not hasattr(owner, name)]
    if missing:
        raise UnsupportedError(
            f"transformers {transformers.__version__} cannot run FP8 on a CPU this way",
            [f"it has no {', '.join(missing)}; known to work with 5.16 and 5.24"],
        )
    return layers, quantizer


def _name_this_context(layers: ModuleType) -> None:
    """From the first use on, products of models that were loaded here raise outside of it what is missing."""
    load = getattr(layers, LOADER, None)
    if load is None or hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def checked() -> Any:
        try:
            return load()
        except ImportError as missing:
            raise UnsupportedError(
                "an FP8 model is called outside of cpu_fp8(), in which it was loaded, and transformers has no FP8 "
                "products on this machine",
                [f"call the model and generate inside `with cpu_fp8():`, as it was loaded ({missing})"],
            ) from missing

    setattr(layers, LOADER, checked)


def _plans_of_every_name(layers: ModuleType) -> list[tuple[Any, str, Any]]:
    """Needed by transformers 5.16 to load FP8 experts: a table with names other than that of its own kernel.

    It looks up the name to rewrite the parallel plan, and fails for names without an entry.
    """
    held = getattr(layers.FP8Experts, REWRITES, None)
    if held is None:
        return []
    names = [None, "eager", *layers.FP8ExpertsInterface._global_mapping]
    return [(layers.FP8Experts, REWRITES, {name: {} for name in names} | held)]


def _check_dynamic(self: Any, *args: object, **kwargs: object) -> None:
    """Replaces the check for a GPU: unsupported settings are rejected at loading."""
    del args, kwargs
    config, reasons = self.quantization_config, []
    if getattr(config, "dequantize", False):
        return
    if not self.pre_quantized:
        reasons.append("quantising while loading needs a GPU; load a checkpoint that is FP8 already")
    if getattr(config, "weight_block_size", None) is None:
        reasons.append("weight_block_size is not given: one scale a tensor is not computed")
    if getattr(config, "activation_scheme", "dynamic") != "dynamic":
        reasons.append(f"activation_scheme is {config.activation_scheme!r}, only 'dynamic' is computed")
    if reasons:
        raise UnsupportedError("this FP8 checkpoint cannot run on a CPU", reasons)


@without_autocast
def matmul(
    input: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None = None,
    activation_scale: Tensor | None = None,
) -> Tensor:
    """(..., k) times an FP8 weight (n, k) transposed: (..., n) in output_dtype, summed in f32."""
    if activation_scale is not None or weight.dtype is not torch.float8_e4m3fn or block_size is None:
        raise UnsupportedError("an FP8 layer requires other features than e4m3 blocks and dynamic activations")
    rows, columns = int(block_size[0]), int(block_size[1])
    x = activation_scheme(columns).quantize(input.reshape(-1, input.shape[-1]).float())
    scheme = weight_scheme((rows, columns), ue8m0=weight_scale_inv.dtype is torch.float8_e8m0fnu)
    decoded = decoded_block_rows(QuantTensor(weight.detach(), weight_scale_inv.detach(), scheme), torch.float32)
    x_TH = x.dequantize(torch.float32)
    y = torch.cat([x_TH @ block.T for block in decoded], dim=-1)
    return y.to(output_dtype or input.dtype).reshape(*input.shape[:-1], weight.shape[0])


def batched_matmul(
    input: Tensor, weight: Tensor, weight_scale_inv: Tensor, *, block_size: Any, expert_ids: Tensor
) -> Tensor:
    """Each row (N, k) times the weight (n, k) of its expert; rows of ids outside the experts are zero."""
    y = input.new_zeros((input.shape[0], weight.shape[1]))
    for expert in torch.unique(expert_ids).tolist():
        if 0 <= expert < weight.shape[0]:
            rows = expert_ids == expert
            y[rows] = matmul(input[rows], weight[expert], weight_scale_inv[expert], block_size)
    return y


def grouped_matmul(
    input: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor,
    *,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    block_size: Any,
) -> Tensor:
    """Rows sorted by expert, (N, k), times the weights of their experts; offsets: where each expert's rows end."""
    del tokens_per_expert
    y, start = input.new_zeros((input.shape[0], weight.shape[1])), 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            y[start:end] = matmul(input[start:end], weight[expert], weight_scale_inv[expert], block_size)
        start = end
    return y
