"""The formats of routed experts that vLLM loads, and the same weights as this library reads them.

vLLM creates the parameters and loads them; each entry of FORMATS names one of its method classes and the parameters
that the class creates. Read with vLLM 0.32. vLLM itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.engine_experts import EngineWeights
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.grouped import kind_of
from moe_mk.quant.kinds import BLOCK_KINDS, scheme_of_kind
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.packed_layouts import unpack

LAYERS = "vllm.model_executor.layers"
QUANTIZATION = f"{LAYERS}.quantization"
_CT = f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"

Kind = tuple[str, tuple[int, int]]
"""A name of `quant.kinds`, "" for weights without scales, and the block of fp8_block and int8_block."""
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
    kind: Callable[[Any], Kind]
    """Of the method object."""
    values: str = "weight"
    scale: str = "weight_scale"
    above: str = ""
    """f32 scales of whole matrices."""
    zeros: str = ""
    packing: str = ""
    """Of `weights.packed_layouts`."""
    divides: bool = False
    """Whether `above` divides."""
    backend: str = ""
    """`Enum.MEMBER` of the module that stands for the kernel, for classes that create parameters by it."""


def _fixed(kind: str) -> Callable[[Any], Kind]:
    return lambda method: (kind, (128, 128))


def _fp8(method: Any) -> Kind:
    return ("fp8_block", tuple(method.moe_block_shape)) if method.block_quant else ("fp8_tensor", (128, 128))


def _fp8_of_compressed_tensors(method: Any) -> Kind:
    strategy = str(getattr(method.weight_quant.strategy, "value", method.weight_quant.strategy))
    return f"fp8_{strategy}", tuple(method.weight_block_size or (128, 128))


def _integers(bits: int, group: int, zeros: bool) -> Kind:
    return kind_of(bits, WHOLE if group == -1 else group, zeros=zeros), (128, 128)


FORMATS: Mapping[str, MoeFormat] = {
    "UnquantizedFusedMoEMethod": MoeFormat("", "", _fixed(""), scale=""),
    "Fp8MoEMethod": MoeFormat(f"{QUANTIZATION}.fp8", "select_fp8_moe_backend", _fp8),
    "CompressedTensorsW8A8Fp8MoEMethod": MoeFormat(
        f"{_CT}w8a8_fp8", "select_fp8_moe_backend", _fp8_of_compressed_tensors
    ),
    "CompressedTensorsW8A8Int8MoEMethod": MoeFormat(f"{_CT}w8a8_int8", "select_int8_moe_backend", _fixed("int8")),
    "CompressedTensorsWNA16MoEMethod": MoeFormat(
        f"{_CT}wna16",
        "select_wna16_moe_backend",
        lambda m: _integers(m.num_bits, m.group_size, not m.symmetric),
        values="weight_packed",
        zeros="weight_zero_point",
        packing="compressed_tensors",
        backend="WNA16MoEBackend.MARLIN",
    ),
    "CompressedTensorsW4A4Nvfp4MoEMethod": MoeFormat(
        f"{_CT}w4a4_nvfp4",
        "select_nvfp4_moe_backend",
        _fixed("nvfp4"),
        values="weight_packed",
        above="weight_global_scale",
        divides=True,
    ),
    "CompressedTensorsW4A4Mxfp4MoEMethod": MoeFormat(
        f"{_CT}w4a4_mxfp4", "select_mxfp4_moe_backend", _fixed("mxfp4"), values="weight_packed"
    ),
    "CompressedTensorsW8A8Mxfp8MoEMethod": MoeFormat(f"{_CT}w8a8_mxfp8", "select_mxfp8_moe_backend", _fixed("mxfp8")),
    "AutoGPTQMoEMethod": MoeFormat(
        f"{QUANTIZATION}.auto_gptq",
        "select_wna16_moe_backend",
        lambda m: _integers(m.quant_config.weight_bits, m.quant_config.group_size, not m.quant_config.is_sym),
        values="qweight",
        scale="scales",
        zeros="qzeros",
        packing="gptq",
    ),
    "AutoAWQMoEMethod": MoeFormat(
        f"{QUANTIZATION}.auto_awq",
        "select_wna16_moe_backend",
        lambda m: _integers(m.quant_config.weight_bits, m.quant_config.group_size, m.quant_config.zero_point),
        values="qweight",
        scale="scales",
        zeros="qzeros",
        packing="awq",
    ),
    "GptOssMxfp4MoEMethod": MoeFormat(f"{QUANTIZATION}.mxfp4", "select_mxfp4_moe_backend", _fixed("mxfp4")),
    "Mxfp4MoEMethod": MoeFormat(f"{QUANTIZATION}.mxfp4", "select_deepseek_v4_mxfp4_moe_backend", _fixed("mxfp4")),
    "ModelOptFp8MoEMethod": MoeFormat(f"{QUANTIZATION}.modelopt", "select_fp8_moe_backend", _fixed("fp8_tensor")),
    "ModelOptNvFp4FusedMoE": MoeFormat(
        f"{QUANTIZATION}.modelopt", "select_nvfp4_moe_backend", _fixed("nvfp4"), above="weight_scale_2"
    ),
    "ModelOptMxFp8FusedMoE": MoeFormat(f"{QUANTIZATION}.modelopt", "select_mxfp8_moe_backend", _fixed("mxfp8")),
}
"""By the name of vLLM's class. Static scales of activations are loaded and not used: tokens stay in bf16."""


def format_of(method: Any) -> MoeFormat:
    """The format of a method of vLLM; UnsupportedError names those that are computed here."""
    found = next((FORMATS[base.__name__] for base in type(method).__mro__ if base.__name__ in FORMATS), None)
    if found is None:
        raise UnsupportedError(
            f"moe_mk computes no experts of vLLM's {type(method).__name__}",
            [f"it computes those of {', '.join(FORMATS)}", "leave moe_mk out of VLLM_PLUGINS"],
        )
    return found


def weights_of(layer: Any, method: Any, found: MoeFormat) -> EngineWeights:
    """The weights of a RoutedExperts of vLLM whose parameters are loaded, as views where the format allows it."""
    moe, (quant, block) = method.moe, found.kind(method)
    name = moe.activation.value.removesuffix("_no_mul")
    swiglu_oai = CLAMPED.get(name) == "swiglu_oai"
    limit = GPT_OSS_LIMIT if swiglu_oai and layer.swiglu_limit is None else layer.swiglu_limit
    own: list[Tensor] = []
    stacks: dict[str, Any] = {}
    computed = False
    for side in ("w13", "w2"):
        parts: dict[str, Any] = {part: getattr(layer, f"{side}_{stem}", None) for part, stem in _stems(found, method)}
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
    own += [p for n, p in layer.named_parameters(recurse=False) if n.endswith(("_input_scale", "_input_global_scale"))]
    return EngineWeights(
        **stacks,
        activation=ACTIVATIONS[name] if limit is None else CLAMPED[name],
        gated=moe.is_act_and_mul,
        order="interleaved" if name == "swigluoai" else "gate_up",
        quant=quant,
        block=block if quant in BLOCK_KINDS else (128, 128),
        limit=limit,
        alpha=GPT_OSS_ALPHA if getattr(layer, "swiglu_alpha", None) is None else layer.swiglu_alpha,
        dtype=moe.in_dtype,
        of=tuple(own) if computed else (),
    )


def _stems(found: MoeFormat, method: Any) -> Iterable[tuple[str, str]]:
    """Fields of EngineWeights after `w13_` and `w2_`, with vLLM's names; "" for the values."""
    scale = getattr(method, "weight_scale_name", found.scale)  # of Fp8MoEMethod, which has two of them
    stems = {"": found.values, "scale": scale, "global_scale": found.above, "zeros": found.zeros}
    return [(part, stem) for part, stem in stems.items() if stem]


def _unpacked(name: str, packing: str, quant: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Stacks of packed integers in the layout of their scheme; views where rows of all experts are one matrix."""
    words, scheme = parts[""], scheme_of_kind(quant)
    given = {part: tensor.detach() for part, tensor in parts.items() if tensor is not None}

    def of(rows: Mapping[str, Tensor]) -> QuantTensor:
        return unpack(packing, scheme, {part: (f"{name}_{part}", tensor) for part, tensor in rows.items()}).q

    if packing == "compressed_tensors" and ("zeros" not in given or words.shape[1] == 8 * given["zeros"].shape[1]):
        q = of({part: stack.flatten(0, 1) for part, stack in given.items()})
        held = {"": q.values, "scale": q.scales, "zeros": q.zeros}
        return {k: None if t is None else t.view(words.shape[0], -1, t.shape[-1]) for k, t in held.items()}
    each = [of({part: stack[e] for part, stack in given.items()}) for e in range(words.shape[0])]
    zeros = [q.zeros for q in each if q.zeros is not None]
    scales = [q.scales for q in each if q.scales is not None]
    return {
        "": torch.stack([q.values for q in each]),
        "scale": torch.stack(scales),
        "zeros": torch.stack(zeros) if zeros else None,
    }
