"""A tiny random DeepSeek-V3 in transformers' layout, stored as FP8 or with packed experts, to try the integration.

The weights have a large spread, so that the experts determine the next token: with the usual 0.02 a model
generates the same tokens whatever its experts compute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from moe_mk.lab.checkpoints.dialects import quantization_config
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.quant.fp8 import FP8_128x128
from moe_mk.quant.grouped import GROUPED

SPREAD = 0.3
VOCABULARY = 96


def tiny_config(**changes: Any) -> DeepseekV3Config:
    """Three layers, two of them with 8 experts in 2 groups, top-2, and a shared expert."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
        "max_position_embeddings": 128, "initializer_range": SPREAD, "pad_token_id": 0, "eos_token_id": VOCABULARY - 1,
    }  # fmt: skip
    return DeepseekV3Config(**(settings | changes))


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> DeepseekV3ForCausalLM:
    """A random model with significant correction biases; does not change torch's global generator."""
    config = tiny_config(**changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    nn.Module.to(model, dtype)
    nn.Module.eval(model)
    return model


def write_fp8_checkpoint(folder: str | Path, seed: int = 0) -> Path:
    """Write the model with every linear layer and expert in FP8 128x128 blocks, under the official names."""
    folder = Path(folder)
    model = tiny_model(seed, torch.bfloat16)
    model.save_pretrained(folder, safe_serialization=True)
    linear = {f"{path}.weight" for path, part in model.named_modules() if type(part) is nn.Linear} - {"lm_head.weight"}
    tensors: dict[str, Tensor] = {}
    for name, tensor in _saved(folder).items():
        if name in linear or ".experts." in name:
            q = FP8_128x128.quantize(tensor.float())
            assert q.scales is not None
            tensors[name], tensors[f"{name}_scale_inv"] = q.values, q.scales
        else:
            tensors[name] = tensor
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    _state(folder / "config.json", quantization)
    return folder


def write_packed_checkpoint(folder: str | Path, quant: str = "int4_g32", seed: int = 0) -> Path:
    """Write the model with routed experts of integers in groups, as compressed-tensors names them, the rest in bf16.

    quant: int4_g32, int8_g128_zp, ...; zero points are written where its name has them.
    """
    folder = Path(folder)
    tiny_model(seed, torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    scheme, tensors = GROUPED[quant], dict[str, Tensor]()
    for name, tensor in _saved(folder).items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        held = pack("compressed_tensors", scheme.quantize(tensor.float()))
        words = {"": "weight_packed", "scale": "weight_scale", "zeros": "weight_zero_point", "shape": "weight_shape"}
        prefix = name.removesuffix("weight")
        tensors |= {prefix + word: held[part].contiguous() for part, word in words.items() if part in held}
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    _state(folder / "config.json", quantization_config(quant, (128, 128), packing="compressed_tensors"))
    return folder


def _saved(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(str(folder / "model.safetensors"))


def _state(file: Path, quantization: Mapping[str, Any]) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    config["quantization_config"] = dict(quantization)
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
