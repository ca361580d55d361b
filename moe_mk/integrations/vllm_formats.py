"""The formats of routed experts that vLLM loads, and the same weights as this library reads them.

vLLM creates the parameters and loads them; each entry of FORMATS names one of its method classes and the parameters
that the class creates. vLLM itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.integrations.engine_experts import EngineWeights
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.grouped import grouped
from moe_mk.quant.kinds import BLOCK_KINDS, scheme_of_kind
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.packed_layouts import unpack

LAYERS = "vllm.model_executor.layers"
QUANTIZATION = f"{LAYERS}.quantization"
_CT = f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu2": "relu2"}
"""Activations: names of vLLM's MoEActivation, without _no_mul, which is for experts without a gate; and of moe_mk."""
CLAMPED = {"silu": "swiglu_limit", "swigluoai": "swiglu_oai", "swigluoai_uninterleave": "swiglu_oai"}
"""The same with a clamp."""
GPT_OSS_LIMIT, GPT_OSS_ALPHA = 7.0, 1.702
"""What vLLM's swigluoai computes with where the model states no others."""


@dataclass(frozen=True)
class MoeFormat:
    """The parameters that one method class creates: w13_ and w2_ followed by these names."""

    module: str
    selects: str
    """The function of the module with which the class selects a kernel of vLLM; it raises where there is none."""
    kind: Callable[[Any], str]
    """Of a method object: a name of `quant.kinds`, "" for weights without scales."""
    values: str = "weight"
    scale: str = "weight_scale"
    above: str = ""
    """f32 scales of whole matrices."""
    zeros: str = ""
    packing: str = ""
    """Of `weights.packed_layouts`."""
    tokens: str = "auto"
    """Of `EngineWeights`."""
    divides: bool = False
    """Whether `above` divides."""
    backend: str = ""
    """`Enum.MEMBER` of the module that stands for the kernel, for classes that create parameters by it."""


def _fixed(kind: str) -> Callable[[Any], str]:
    return lambda method: kind


def _integers(bits: int, group: int | None, zeros: bool) -> str:
    return grouped(bits, WHOLE if group in (-1, None) else group, zeros=zeros).name


def _ct(name: str, selects: str, kind: Callable[[Any], str], **more: Any) -> MoeFormat:
    return MoeFormat(f"{_CT}{name}", f"select_{selects}_moe_backend", kind, **more)


_WORDS: dict[str, Any] = {"values": "qweight", "scale": "scales", "zeros": "qzeros"}
FORMATS: Mapping[str, MoeFormat] = {
    "UnquantizedFusedMoEMethod": MoeFormat("", "", _fixed(""), scale=""),
    "Fp8MoEMethod": MoeFormat(
        f"{QUANTIZATION}.fp8", "select_fp8_moe_backend", lambda m: "fp8_block" if m.block_quant else "fp8_tensor"
    ),
    "CompressedTensorsW8A8Fp8MoEMethod": _ct("w8a8_fp8", "fp8", lambda m: "fp8_" + m.weight_quant.strategy),
    "CompressedTensorsW8A8Int8MoEMethod": _ct("w8a8_int8", "int8", _fixed("int8")),
    "CompressedTensorsW4A8Int8MoEMethod": _ct(
        "w4a8_int8", "w4a8_int8", lambda m: _integers(4, m.group_size, False), packing="int_quantized", tokens="int8"
    ),
    "CompressedTensorsWNA16MoEMethod": _ct(
        "wna16",
        "wna16",
        lambda m: _integers(m.num_bits, m.group_size, not m.symmetric),
        values="weight_packed",
        zeros="weight_zero_point",
        packing="compressed_tensors",
        backend="WNA16MoEBackend.MARLIN",
    ),
    "CompressedTensorsW4A4Nvfp4MoEMethod": _ct(
        "w4a4_nvfp4", "nvfp4", _fixed("nvfp4"), values="weight_packed", above="weight_global_scale", divides=True
    ),
    "CompressedTensorsW4A4Mxfp4MoEMethod": _ct("w4a4_mxfp4", "mxfp4", _fixed("mxfp4"), values="weight_packed"),
    "CompressedTensorsW8A8Mxfp8MoEMethod": _ct("w8a8_mxfp8", "mxfp8", _fixed("mxfp8")),
    "CompressedTensorsW4A8Mxfp4MoEMethod": MoeFormat(
        f"{QUANTIZATION}.mxfp4", "select_deepseek_v4_mxfp4_moe_backend", _fixed("mxfp4"), values="weight_packed"
    ),
    "AutoGPTQMoEMethod": MoeFormat(
        f"{QUANTIZATION}.auto_gptq",
        "select_wna16_moe_backend",
        lambda m: _integers(m.quant_config.weight_bits, m.quant_config.group_size, not m.quant_config.is_sym),
        packing="gptq",
        **_WORDS,
    ),
    "AutoAWQMoEMethod": MoeFormat(
        f"{QUANTIZATION}.auto_awq",
        "select_wna16_moe_backend",
        lambda m: _integers(m.quant_config.weight_bits, m.quant_config.group_size, m.quant_config.zero_point),
        packing="awq",
        **_WORDS,
    ),
    "GptOssMxfp4MoEMethod": MoeFormat(f"{QUANTIZATION}.mxfp4", "select_mxfp4_moe_backend", _fixed("mxfp4")),
    "Mxfp4MoEMethod": MoeFormat(f"{QUANTIZATION}.mxfp4", "select_deepseek_v4_mxfp4_moe_backend", _fixed("mxfp4")),
    "ModelOptFp8MoEMethod": MoeFormat(f"{QUANTIZATION}.modelopt", "select_fp8_moe_backend", _fixed("fp8_tensor")),
    "ModelOptNvFp4FusedMoE": MoeFormat(
        f"{QUANTIZATION}.modelopt", "select_nvfp4_moe_backend", _fixed("nvfp4"), above="weight_scale_2"
    ),
    "ModelOptMxFp8FusedMoE": MoeFormat(f"{QUANTIZATION}.modelopt", "select_mxfp8_moe_backend", _fixed("mxfp8")),
    "QuarkW8A8Mxfp8MoEMethod": MoeFormat(
        f"{QUANTIZATION}.quark.quark_moe", "select_mxfp8_moe_backend", _fixed("mxfp8")
    ),
}
"""By the name of vLLM's class. Static scales of activations are loaded and not used: tokens stay in bf16."""


def format_of(method: Any) -> MoeFormat:
    """The format of a method of vLLM, by the name of its class: one that inherits may create other parameters."""
    name, reason = type(method).__name__, f"it computes those of {', '.join(FORMATS)}"
    try:
        if name in FORMATS:
            FORMATS[name].kind(method)
            return FORMATS[name]
    except ShapeError as error:
        reason = str(error)
    raise UnsupportedError(f"moe_mk computes no experts of vLLM's {name}", [reason, "leave moe_mk out of VLLM_PLUGINS"])


def weights_of(layer: Any, method: Any, found: MoeFormat) -> EngineWeights:
    """The weights of a RoutedExperts of vLLM whose parameters are loaded, as views where the format allows it."""
    moe, quant = method.moe, found.kind(method)
    block = getattr(method, "moe_block_shape", None) or getattr(method, "weight_block_size", None)
    activation = moe.activation.value.removesuffix("_no_mul")
    swiglu_oai = CLAMPED.get(activation) == "swiglu_oai"
    limit = GPT_OSS_LIMIT if swiglu_oai and layer.swiglu_limit is None else layer.swiglu_limit
    names = {"": found.values, "scale": getattr(method, "weight_scale_name", found.scale)}  # Fp8MoEMethod has two
    names |= {"global_scale": found.above, "zeros": found.zeros}
    own: list[Tensor] = []
    stacks: dict[str, Any] = {}
    computed = False
    for side in ("w13", "w2"):
        parts: dict[str, Any] = {p: getattr(layer, f"{side}_{name}", None) for p, name in names.items() if name}
        biased = moe.has_bias or f"{side}_bias" in getattr(layer, "_loaded_expert_biases", ())
        bias = getattr(layer, f"{side}_bias", None) if biased else None
        own += [tensor for tensor in (*parts.values(), getattr(layer, f"{side}_bias", None)) if tensor is not None]
        if found.packing:
            parts, computed = _unpacked(f"{layer.layer_name}.{side}", found.packing, quant, parts), True
        if found.divides:
            parts["global_scale"], computed = 1.0 / parts["global_scale"], True
        if bias is not None and side == "w2" and moe.moe_parallel_config.tp_rank > 0:
            bias, computed = torch.zeros_like(bias), True  # vLLM sums over ranks: one of them adds it
        stacks |= {f"{side}_{part}".removesuffix("_"): tensor for part, tensor in parts.items()}
        stacks[f"{side}_bias"] = bias
    for n, p in layer.named_parameters(recurse=False):
        if n.endswith(("_input_scale", "_input_global_scale")):
            own.append(p)
        elif n.startswith("w") and p.numel() and not n.endswith("_weight_shape") and not any(p is t for t in own):
            reason = f"{n} of {type(method).__name__} is not read: leave moe_mk out of VLLM_PLUGINS"
            raise UnsupportedError(f"moe_mk in {layer.layer_name}", [reason])
    return EngineWeights(
        **stacks,
        activation=ACTIVATIONS[activation] if limit is None else CLAMPED[activation],
        gated=moe.is_act_and_mul,
        order="interleaved" if activation == "swigluoai" else "gate_up",
        quant=quant,
        tokens=found.tokens,
        block=tuple(block) if block and quant in BLOCK_KINDS else (128, 128),
        limit=limit,
        alpha=GPT_OSS_ALPHA if getattr(layer, "swiglu_alpha", None) is None else layer.swiglu_alpha,
        dtype=moe.in_dtype,
        of=tuple(own) if computed else (),
    )


def _unpacked(name: str, packing: str, quant: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Stacks of packed integers in the layout of their scheme; views where rows of all experts are one matrix."""
    words, scheme = parts[""], scheme_of_kind(quant)
    given = {part: tensor.detach() for part, tensor in parts.items() if tensor is not None}

    def of(rows: Mapping[str, Tensor]) -> QuantTensor:
        return unpack(packing, scheme, {part: (f"{name}_{part}", tensor) for part, tensor in rows.items()}).q

    if packing not in ("gptq", "awq") and ("zeros" not in given or words.shape[1] == 8 * given["zeros"].shape[1]):
        q = of({part: stack.flatten(0, 1) for part, stack in given.items()})
        held = {"": q.values, "scale": q.scales, "zeros": q.zeros}
        return {k: None if t is None else t.view(words.shape[0], -1, t.shape[-1]) for k, t in held.items()}
    each = [of({part: stack[e] for part, stack in given.items()}) for e in range(words.shape[0])]
    matrices: list[dict[str, Any]] = [{"": q.values, "scale": q.scales, "zeros": q.zeros} for q in each]
    return {k: None if t is None else torch.stack([m[k] for m in matrices]) for k, t in matrices[0].items()}
