"""Random models of real width for engines.py, in the layout of the official checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
"""Rows and columns under one scale of FP8."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True,
        "rope_theta": 1e6, "max_position_embeddings": 40960,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 4096, "topk_method": "greedy", "norm_topk_prob": False, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64,
    },
}  # fmt: skip
"""Settings of the official config.json files that differ from the defaults of transformers."""


def write_model(name: str, layers: int, kind: str, under: Path) -> Path:
    """Write the first layers of a model, unless it is there; returns its folder."""
    folder = under / f"{name}-{layers}-{kind}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    if kind == "bf16":
        _write_plain(name, layers, folder)
    else:
        _quantise(write_model(name, layers, "bf16", under), folder, kind)
    (folder / "complete").touch()
    return folder


def _write_plain(name: str, layers: int, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(MODELS[name])
    whole = settings["num_hidden_layers"]
    vocabulary = max(2048, settings["vocab_size"] * layers // whole // 128 * 128)
    settings |= {"num_hidden_layers": layers, "vocab_size": vocabulary, "tie_word_embeddings": False}
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cpu"), _no_init():
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.03, 0.03) if parameter.ndim > 1 else parameter.fill_(1.0)
    model.save_pretrained(folder, max_shard_size="1GB")


def _no_init() -> Any:
    from transformers import initialization

    return initialization.no_init_weights()


def _quantise(source: Path, folder: Path, kind: str) -> None:
    """Quantise every linear layer but the router and lm_head."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    for file in sorted(source.glob("*.safetensors")):
        found: dict[str, Tensor] = {}
        for name, weight in load_file(file).items():
            stays = weight.ndim != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", ".gate.weight"))
            found |= {name: weight} if stays else (_fp8 if kind == "fp8" else _int4)(name, weight)
        save_file(found, folder / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(found, file.name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8"
    )
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = FP8 if kind == "fp8" else INT4
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
GROUP = 128
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
}  # fmt: skip


def _fp8(name: str, weight_NK: Tensor) -> dict[str, Tensor]:
    n, k = weight_NK.shape
    pads = (0, -k % BLOCK, 0, -n % BLOCK)
    padded = torch.nn.functional.pad(weight_NK.float(), pads)
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448.0
    values = (blocks / scale[:, None, :, None]).view(padded.shape)[:n, :k].to(torch.float8_e4m3fn).contiguous()
    return {name: values, f"{name}_scale_inv": scale.contiguous()}


def _int4(name: str, weight_NK: Tensor) -> dict[str, Tensor]:
    """Eight values of a row in one int32, lowest bits first, each plus 8; the layout of compressed-tensors."""
    n, k = weight_NK.shape
    groups = weight_NK.float().view(n, k // GROUP, GROUP)
    scale = (groups.abs().amax(dim=2).clamp(min=1e-12) / 7.0).to(torch.bfloat16)
    codes = (groups / scale.float()[:, :, None]).round().clamp(-8, 7).to(torch.int32).view(n, k // 8, 8) + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device="cpu")
    packed = torch.zeros(n, k // 8, dtype=torch.int32, device="cpu")
    for at in range(8):
        packed |= codes[:, :, at] << shifts[at]
    shape = torch.tensor([n, k], dtype=torch.int64, device="cpu")
    return {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": shape}
