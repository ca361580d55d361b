"""Tiny random models in the layouts of official quantised checkpoints, and the same models with dequantised weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_mk.lab.checkpoints.dialects import quantization_config
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.tensor import QuantTensor

LAYERS, EXPERTS = 2, 8
SIZES: Mapping[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.04, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 255, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
PLAIN = ("lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)))
"""Modules that stay in bf16."""
STATIC = 0.02
"""The calibrated scale of activations in the checkpoint."""


def _float(strategy: str, bits: int, group: int | None = None, dynamic: bool = False) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": dynamic,
        "group_size": group,
    }  # fmt: skip


def _compressed(name: str, weights: dict[str, Any], tokens: dict[str, Any] | None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": tokens, "targets": ["Linear"], "format": name}
    return {
        "quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}, "ignore": PLAIN,
    }  # fmt: skip


def _scales(suffix: str, *, as_bytes: bool = False) -> Callable[[QuantTensor], dict[str, Tensor]]:
    def tensors(q: QuantTensor) -> dict[str, Tensor]:
        assert q.scales is not None
        values = q.values.view(torch.int8) if q.scheme.family == "int8" else q.values
        return {"weight": values, suffix: q.scales.view(torch.uint8) if as_bytes else q.scales}

    return tensors


def _static(q: QuantTensor) -> dict[str, Tensor]:
    assert q.scales is not None
    return {"weight": q.values, "weight_scale": q.scales.reshape(()), "input_scale": torch.tensor(STATIC)}


def _nvfp4_of_compressed_tensors(q: QuantTensor) -> dict[str, Tensor]:
    assert q.scales is not None and q.global_scale is not None
    above = {"weight_global_scale": 1.0 / q.global_scale.reshape(1), "input_global_scale": torch.ones(1)}
    return {"weight_packed": q.values, "weight_scale": q.scales, **above}


def _nvfp4_of_modelopt(q: QuantTensor) -> dict[str, Tensor]:
    assert q.scales is not None and q.global_scale is not None
    above = {"weight_scale_2": q.global_scale.reshape(()), "input_scale": torch.tensor(1.0)}
    return {"weight": q.values, "weight_scale": q.scales, **above}


def _mxfp4(q: QuantTensor) -> dict[str, Tensor]:
    assert q.scales is not None
    return {"weight_packed": q.values, "weight_scale": q.scales.view(torch.uint8)}


def _packed(packing: str, names: Mapping[str, str]) -> Callable[[QuantTensor], dict[str, Tensor]]:
    return lambda q: {names[part]: tensor.contiguous() for part, tensor in pack(packing, q).items()}


_CT = {"": "weight_packed", "scale": "weight_scale", "zeros": "weight_zero_point", "shape": "weight_shape"}
_GPTQ = {"": "qweight", "scale": "scales", "zeros": "qzeros", "order": "g_idx"}


@dataclass(frozen=True)
class Layout:
    """One official layout: the format of `quant.kinds`, the tensors of a matrix, and the config of the checkpoint."""

    kind: str
    tensors: Callable[[QuantTensor], dict[str, Tensor]]
    config: Mapping[str, Any]


def _grouped(kind: str, packing: str, names: Mapping[str, str]) -> Layout:
    config = quantization_config(kind, (128, 128), packing=packing)
    skipped: Any = {"ignore": PLAIN} if packing == "compressed_tensors" else {"modules_to_not_convert": PLAIN}
    return Layout(kind, _packed(packing, names), config | skipped)


def _w4a8(kind: str, strategy: str, group: int | None) -> Layout:
    weights = {"num_bits": 4, "type": "int", "strategy": strategy, "symmetric": True, "group_size": group}
    tokens = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    return Layout(
        kind,
        _packed("int_quantized", {"": "weight", "scale": "weight_scale"}),
        _compressed("int-quantized", weights, tokens),
    )


_MXFP4 = _float("group", 4, 32) | {"scale_dtype": "torch.uint8"}
_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": PLAIN}
_INT8 = quantization_config("int8", (128, 128)) | {"ignore": PLAIN}
LAYOUTS: Mapping[str, Layout] = {
    "fp8 blocks": Layout(
        "fp8_block",
        _scales("weight_scale_inv"),
        quantization_config("fp8_block", (128, 128)) | {"modules_to_not_convert": PLAIN},
    ),
    "fp8 tensors": Layout("fp8_tensor", _static, _TENSOR),
    "fp8 channels": Layout(
        "fp8_channel", _scales("weight_scale"), quantization_config("fp8_channel", (128, 128)) | {"ignore": PLAIN}
    ),
    "int8": Layout("int8", _scales("weight_scale"), _INT8),
    "int4 groups": _grouped("int4_g32", "compressed_tensors", _CT),
    "int4 groups with zeros": _grouped("int4_g32_zp", "compressed_tensors", _CT),
    "int8 groups": _grouped("int8_g128", "compressed_tensors", _CT),
    "int4 groups, int8 tokens": _w4a8("int4_g32", "group", 32),
    "int4 channels, int8 tokens": _w4a8("int4_row", "channel", None),
    "gptq": _grouped("int4_g64", "gptq", _GPTQ),
    "awq": _grouped("int4_g64_zp", "awq", _GPTQ),
    "nvfp4": Layout(
        "nvfp4",
        _nvfp4_of_compressed_tensors,
        _compressed(
            "nvfp4-pack-quantized", _float("tensor_group", 4, 16), _float("tensor_group", 4, 16, dynamic=True)
        ),
    ),
    "mxfp4": Layout("mxfp4", _mxfp4, _compressed("mxfp4-pack-quantized", _MXFP4, None)),
    "mxfp4, fp8 tokens": Layout(
        "mxfp4", _mxfp4, _compressed("mxfp4-pack-quantized", _MXFP4, _float("token", 8, dynamic=True))
    ),
    "nvfp4 of modelopt": Layout(
        "nvfp4",
        _nvfp4_of_modelopt,
        {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": PLAIN,
            "kv_cache_scheme": None,
        },
    ),
}  # fmt: skip


def write(name: str, folder: Path) -> Any:
    """Save a checkpoint in a layout of LAYOUTS, "bf16" or "gpt-oss"; returns the model with dequantised weights in f32.
    "gpt-oss" has MXFP4 experts with biases and clamps; the others are Qwen3-MoE with attention in the same format."""
    torch.manual_seed(0)
    if name == "gpt-oss":
        return _write_gpt_oss(folder)
    config = Qwen3MoeConfig(
        num_experts=EXPERTS, intermediate_size=256, moe_intermediate_size=128, norm_topk_prob=True, **SIZES
    )
    model: Any = Qwen3MoeForCausalLM(config).bfloat16().eval()
    _decide(model)
    layout, out, exact = LAYOUTS.get(name), dict[str, Tensor](), dict[str, Tensor]()

    def put(path: str, weight: Tensor) -> Tensor:
        if layout is None:
            out[f"{path}.weight"] = weight
            return weight.float()
        q = scheme_of_kind(layout.kind).quantize(weight.float())
        out.update({f"{path}.{each}": tensor for each, tensor in layout.tensors(q).items()})
        return q.scheme.dequantize(q, torch.float32)

    for path, weight in model.state_dict().items():
        if "experts" in path:
            continue
        if path.endswith("proj.weight"):
            exact[path] = put(path.removesuffix(".weight"), weight)
        else:
            out[path], exact[path] = weight, weight.float()
    for layer in range(LAYERS):
        path = f"model.layers.{layer}.mlp.experts"
        both, down = model.state_dict()[f"{path}.gate_up_proj"], model.state_dict()[f"{path}.down_proj"]
        made = [
            [put(f"{path}.{e}.{part}_proj", w) for part, w in zip(("gate", "up"), both[e].chunk(2), strict=True)]
            for e in range(EXPERTS)
        ]
        exact[f"{path}.gate_up_proj"] = torch.stack([torch.cat(each) for each in made])
        exact[f"{path}.down_proj"] = torch.stack([put(f"{path}.{e}.down_proj", down[e]) for e in range(EXPERTS)])
    _save(folder, config, out, layout.config if layout is not None else None)
    model.float().load_state_dict(exact)
    return model


def _write_gpt_oss(folder: Path) -> Any:
    config = GptOssConfig(num_local_experts=EXPERTS, intermediate_size=128, sliding_window=64, **SIZES)
    model: Any = GptOssForCausalLM(config).bfloat16().eval()
    _decide(model)
    out, exact = dict[str, Tensor](), dict[str, Tensor]()
    for path, tensor in model.state_dict().items():
        drawn = torch.randn_like(tensor) * 0.15 if path.endswith(("bias", "sinks")) else tensor
        if not path.endswith(("gate_up_proj", "down_proj")):
            out[path], exact[path] = drawn, drawn.float()
            continue
        q = scheme_of_kind("mxfp4").quantize(tensor.transpose(1, 2).float())  # transformers holds (E, in, out)
        assert q.scales is not None
        out[f"{path}_blocks"] = q.values.reshape(*q.values.shape[:2], -1, 16)
        out[f"{path}_scales"] = q.scales.view(torch.uint8)
        exact[path] = q.scheme.dequantize(q, torch.float32).transpose(1, 2)
    _save(folder, config, out, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    model.float().load_state_dict(exact)
    return model


def _decide(model: PreTrainedModel) -> None:
    """Scale the routers, so that the last chosen expert has little weight where another one is about as good."""
    for path, weight in model.named_parameters():
        if path.endswith(("mlp.gate.weight", "mlp.router.weight")):
            weight.data.mul_(8.0)


def _save(folder: Path, config: Any, tensors: dict[str, Tensor], quant: Mapping[str, Any] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    facts = json.loads(config.to_json_string()) | {"torch_dtype": "bfloat16"}
    facts["architectures"] = ["GptOssForCausalLM" if config.model_type == "gpt_oss" else "Qwen3MoeForCausalLM"]
    if quant is not None:
        facts["quantization_config"] = dict(quant)
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
