"""Linear layers of vLLM on a CPU: weights packed in their format, tokens in bf16 or rounded to INT8.

`register_kernels()` adds one kernel class to each kind of vLLM's registry of linear kernels. vLLM's kernels for AMX
remain first where the processor has it, and those over torch's scaled products last. Layers in bf16 are computed here
where `packs_bf16()`. The versions that were read are those of `vllm.READ`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moe_mk.errors import MoEMKError, UnsupportedError
from moe_mk.experts.cpu_native.weights import native_kernels
from moe_mk.integrations.packed_linear import PackedLinear, packed_linear
from moe_mk.integrations.vllm_formats import QUANTIZATION
from moe_mk.kernels.native.layout import STEP
from moe_mk.quant import FP8_CHANNEL, FP8_TENSOR, MXFP4, MXFP8, NVFP4, WHOLE, QuantScheme, QuantTensor, weight_scheme
from moe_mk.quant.grouped import grouped
from moe_mk.quant.int8 import INT8_CHANNEL
from moe_mk.quant.plain import BF16
from moe_mk.weights.packed_layouts import unpack

Stated = Callable[[], tuple[Mapping[str, Any], bool]]
"""Settings of `MoEConfig.kernel` by key, and whether vLLM's weights are freed once they are packed."""
LINEAR = "vllm.model_executor.kernels.linear"
ENTRY = "moe_mk_entry"
"""The buffer of a layer by which its graph finds the packed weights."""
REQUANTISE, REQUANTISING = "requantize_with_max_scale", ("utils.w8a8_utils", "modelopt")
"""vLLM's function that gives fused FP8 projections (q, k, v) one scale, and the modules that hold it."""
UTILS, DISPATCH = "vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"
"""The function that selects the product of a layer without quantisation, and its module, which users of it ask."""
KEPT, GATHERED = "kv_b_proj", "_nvfp4_weight_for_gather"
"""Of what vLLM reads again and is not freed: the projection that MLA splits, and a buffer over the weights."""


def _fp8(config: Any) -> QuantScheme | str:
    shape = config.weight_quant_key.scale.group_shape
    if shape.is_per_tensor():
        return FP8_TENSOR
    if shape.is_per_channel() or shape.is_per_token():
        return FP8_CHANNEL
    block = int(shape[0]), int(shape[1])
    return weight_scheme(block) if block == (128, 128) else f"reads no FP8 blocks of {block[0]}x{block[1]}"


CODES = {"uint4b8": (4, False), "uint8b128": (8, False), "int4": (4, False), "uint4": (4, True), "uint8": (8, True)}
"""Bits of the integers that are read, and whether they have zero points; int4 is signed, one value a byte."""
READ = frozenset(
    "Fp8LinearMethod Fp8PerTensorOnlineLinearMethod Fp8PerBlockOnlineLinearMethod Fp8PtpcOnlineLinearMethod "
    "Mxfp4OnlineLinearMethod Mxfp8OnlineLinearMethod FBGEMMFp8LinearMethod ModelOptLinearMethod AutoGPTQLinearMethod "
    "AutoAWQMarlinLinearMethod CompressedTensorsW8A8Fp8 CompressedTensorsW8A8Int8 CompressedTensorsW4A8Int "
    "CompressedTensorsWNA16 CompressedTensorsWNA8Int CompressedTensorsWNA4Int CompressedTensorsWNA8O8Int "
    "CompressedTensorsW4A4Fp4 CompressedTensorsW4A4Mxfp4 CompressedTensorsW4A8Mxfp4 CompressedTensorsW8A8Mxfp8 "
    "QuarkW8A8Fp8 QuarkW8A8Fp8PerBlock QuarkW8A8Int8 QuarkW4A16Int4 QuarkNVFP4 QuarkOCP_MX INCWNA16LinearScheme "
    "INCFp8LinearScheme INCMxfp4LinearMethod INCMxfp8LinearScheme".split()
)
"""Schemes and linear methods of vLLM that are supported; others are refused."""


def _grouped(config: Any) -> QuantScheme | str:
    bits, has_zeros = CODES.get(str(config.weight_type), (0, None))
    if has_zeros is not (zeros := bool(config.zero_points)):
        return f"reads no {config.weight_type} {'with' if zeros else 'without'} zero points"
    try:
        group = WHOLE if config.group_size in (-1, config.partition_weight_shape[0]) else config.group_size
        return grouped(bits, group, zeros=zeros)
    except MoEMKError as error:
        return str(error)


def _matrix(kernel: Any, layer: Any) -> QuantTensor:
    """The weights of a layer whose parameters are values and scales of the scheme."""
    w, scales = layer.weight.detach(), getattr(layer, "weight_scale_inv", None)
    scales = (layer.weight_scale if scales is None else scales).detach()
    scheme = kernel.scheme
    w = w if w.is_contiguous() else w.t()  # vLLM transposes FP8 of channels and tensors
    if scheme is FP8_TENSOR and scales.numel() > 1:
        scheme = FP8_CHANNEL
    if scheme.block == (WHOLE, WHOLE):
        scales = scales.reshape(1, 1)
    elif scheme.block == (1, WHOLE):
        scales = scales.reshape(-1, 1)
        if scales.shape[0] != w.shape[0]:  # INT8 with one scale for each of the fused projections
            widths = torch.tensor(layer.logical_widths, dtype=torch.int64, device=w.device)
            scales = scales.repeat_interleave(widths, 0)
    above = layer.weight_global_scale.detach().reshape(1, 1) if scheme is NVFP4 else None
    return QuantTensor(w, scales.view(scheme.scale_dtype) if scales.dtype is torch.uint8 else scales, scheme, above)


def _packed_integers(kernel: Any, layer: Any) -> QuantTensor:
    """Return the weights of a layer in integers in groups, packed along the inputs as in GPTQ or compressed-tensors."""
    words, scales = (getattr(layer, name) for name in (kernel.w_q_name, kernel.w_s_name))
    parts = {
        "": ("weight", words.detach() if words.input_dim == 1 else words.detach().t()),
        "scale": ("scale", (scales.detach() if scales.output_dim == 0 else scales.detach().t()).contiguous()),
    }
    if kernel.config.zero_points:
        zeros = getattr(layer, kernel.w_zp_name)
        parts["zeros"] = "zeros", zeros.detach() if zeros.output_dim == 0 else zeros.detach().t()
    return unpack("int_quantized" if words.dtype is torch.int8 else "compressed_tensors", kernel.scheme, parts).q


KINDS: Mapping[str, tuple[str, Callable[[Any], QuantScheme | str], Callable[[Any, Any], QuantTensor]]] = {
    "fp8": ("FP8ScaledMMLinearKernel", _fp8, _matrix),
    "int8": ("Int8ScaledMMLinearKernel", lambda config: INT8_CHANNEL, _matrix),
    "mp": ("MPLinearKernel", _grouped, _packed_integers),
    "nvfp4": ("NvFp4LinearKernel", lambda config: NVFP4, _matrix),
    "mxfp4": ("MxFp4LinearKernel", lambda config: MXFP4, _matrix),
    "mxfp8": ("Mxfp8LinearKernel", lambda config: MXFP8, _matrix),
}
"""By kind of `register_linear_kernel`: the base class, the scheme of a configuration or why there is none, and the
matrix of a loaded layer."""


def linear_names() -> list[tuple[str, str]]:
    """Modules and names of vLLM that `register_kernels` calls or replaces."""
    registries = ("", "INT8_", "FP8_", "FP8_BLOCK_")
    names = ["register_linear_kernel", *(base for base, _, _ in KINDS.values())]
    names += [f"_POSSIBLE_{each}KERNELS" for each in registries]
    requantising = [(f"{QUANTIZATION}.{each}", REQUANTISE) for each in REQUANTISING]
    return [(UTILS, DISPATCH), *requantising, *((LINEAR, name) for name in names)]


def register_kernels(say: Callable[..., None], *, settings: Stated) -> None:
    """Add our kernels to those of vLLM for CPUs."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    for kind, (base, scheme_of, matrix_of) in KINDS.items():
        made = kernel_over(getattr(linear, base), scheme_of, matrix_of, say, settings)
        linear.register_linear_kernel(made, PlatformEnum.CPU, kind)
    if not torch.cpu._is_amx_tile_supported():  # vLLM asks the same: its kernels for integers are fast with AMX only
        for kernels in (linear._POSSIBLE_KERNELS, linear._POSSIBLE_INT8_KERNELS):
            kernels[PlatformEnum.CPU].insert(0, kernels[PlatformEnum.CPU].pop())
    here = linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
    made = here.pop()
    here.insert(next((at for at, each in enumerate(here) if "Torch" in each.__name__), len(here)), made)
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(made)  # a registry without a function
    if packs_bf16():
        module = import_module(UTILS)
        setattr(module, DISPATCH, partial(_unquantised, getattr(module, DISPATCH), say, settings))
    for name in REQUANTISING:
        module = import_module(f"{QUANTIZATION}.{name}")
        setattr(module, REQUANTISE, partial(_one_scale, getattr(module, REQUANTISE)))


def packs_bf16() -> bool:
    """Whether linear layers in bf16 are computed here: faster by benchmarks/engines.py; with AMX not measured."""
    has_product = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not has_product or (torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported())


def _missing() -> str | None:
    """Why the kernels cannot be used here, a missing compiler for instance."""
    try:
        native_kernels()
    except MoEMKError as error:
        return str(error)
    return None


def _unquantised(
    theirs: Callable[..., None], say: Callable[..., None], settings: Stated, layer: Any, remove_weight: bool
) -> None:
    """Prepare a layer for products in bf16; left to vLLM is what is no such matrix, must be kept, or is disabled."""
    from vllm import envs

    w, name = layer.weight, getattr(layer, "prefix", type(layer).__name__)
    is_matrix = not w.is_meta and w.ndim == 2 and w.dtype is torch.bfloat16 and w.shape[1] % STEP == 0
    if not is_matrix or not settings()[1] or "MoeMkLinearKernel" in envs.VLLM_DISABLED_KERNELS or _missing():
        theirs(layer, remove_weight=remove_weight)
        return
    outputs, matrix = len(w), QuantTensor(w.detach().contiguous(), None, BF16)
    if remove_weight:
        layer.moe_mk_linear = linear = PackedLinear(matrix, name)
        layer.weight = torch.nn.Parameter(linear.entry, requires_grad=False)
        layer.cpu_linear = lambda x, entry, bias: packed_linear(x, entry, bias, outputs)
        say("moe_mk: linear layers (%s) by cpu_native", BF16.name)
    else:  # an embedding: packed at the first product, since most have none
        packed = cache(partial(PackedLinear, matrix, name))
        layer.cpu_linear = lambda x, weight, bias: packed_linear(x, packed().entry, bias, outputs)


def _one_scale(
    theirs: Callable[..., Any], weight: Tensor, weight_scale: Tensor, logical_widths: list[int]
) -> tuple[Tensor, Tensor]:
    """vLLM's scale and weight of fused projections; where vLLM's operator is missing, one scale for each row."""
    try:
        scale, weight = theirs(weight, weight_scale, logical_widths)
    except RuntimeError:  # vLLM for CPUs declares the operator without an implementation
        widths = torch.tensor(logical_widths, dtype=torch.int64, device=weight.device)
        scale = weight_scale.detach().repeat_interleave(widths)[:, None]
    return scale, weight


def kernel_over(
    base: Any,
    scheme_of: Callable[[Any], QuantScheme | str],
    matrix_of: Callable[[Any, Any], QuantTensor],
    say: Callable[..., None],
    settings: Stated,
) -> type:
    """A kernel class of one kind."""

    class MoeMkLinearKernel(base):  # type: ignore[misc]
        """A linear layer by the native kernels of moe_mk, weights in their format."""

        of_moe_mk = True

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            found = scheme_of(config)
            assert not isinstance(found, str), "can_implement refuses it"
            stated, self.releases = settings()
            self.scheme, self.shape, self.wish = found, _shape(config), stated.get("activations")

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            missing = _missing()
            return missing is None, missing

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            scheme = scheme_of(config)
            reason = scheme if isinstance(scheme, str) else _against(config)
            return reason is None, reason

        def process_weights_after_loading(self, layer: Any) -> None:
            name = type(getattr(layer, "scheme", getattr(layer.quant_method, "scheme", layer.quant_method))).__name__
            if name not in READ:
                raise _refused(layer, f"vLLM's {name} is not read")
            q = matrix_of(self, layer)
            if self.shape is not None and tuple(self.shape) != q.shape:
                raise _refused(layer, f"a matrix of {self.shape} is stored as {tuple(q.shape)}")
            if q.shape[1] % STEP:  # a configuration of INT8 has no shape
                raise _refused(layer, _inputs(q.shape[1]))
            of_format = self.scheme is INT8_CHANNEL or name.endswith(("W4A8Int", "WNA8Int"))
            rounds = self.wish == "int8" or (self.wish == "checkpoint" and of_format)
            self.linear = PackedLinear(q, layer.prefix, int8=rounds)
            layer.register_buffer(ENTRY, self.linear.entry, persistent=False)
            say("moe_mk: linear layers (%s) by cpu_native", self.scheme.name)
            if self.releases and not (layer.prefix.endswith(KEPT) or hasattr(layer, GATHERED)):
                for tensor in layer.parameters(recurse=False):
                    if tensor.dim() == 2 and tensor.untyped_storage().nbytes() == tensor.nbytes:
                        tensor.untyped_storage().resize_(0)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return packed_linear(x, getattr(layer, ENTRY), bias, self.linear.num_outputs)

        def apply_scaled_mm(self, **_: object) -> Tensor:
            raise NotImplementedError("apply_weights multiplies")

    return MoeMkLinearKernel


def _refused(layer: Any, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{layer.prefix} in moe_mk", [reason, "start with VLLM_DISABLED_KERNELS=MoeMkLinearKernel"])


def _against(config: Any) -> str | None:
    """Why a layer of this shape or dtype is not computed; None: it is."""
    dtype = getattr(config, "input_dtype", getattr(config, "act_type", torch.get_default_dtype()))  # the model's
    if dtype is not torch.bfloat16:
        return f"multiplies tokens in bf16, they are {dtype}; start with --dtype bfloat16"
    shape = _shape(config)
    return _inputs(shape[1]) if shape is not None and shape[1] % STEP else None


def _shape(config: Any) -> tuple[int, int] | None:
    """(outputs, inputs) of the layer on this rank, where the configuration states them."""
    if hasattr(config, "partition_weight_shape"):
        return config.partition_weight_shape[1], config.partition_weight_shape[0]
    return getattr(config, "weight_shape", None)


def _inputs(number: int) -> str:
    return f"multiplies a multiple of {STEP} inputs, the layer has {number}"
