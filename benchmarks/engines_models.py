"""Random models of real width for engines.py, in the layout of the official checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_mk.lab.checkpoints.dialects import quantization_config
from moe_mk.lab.checkpoints.gguf_checkpoint import GgufTensor, write_gguf
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.quant.fp8 import FP8_128x128
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.microscaling import MXFP4

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


def write_model(name: str, layers: int, kind: str, under: Path, llama: Path | None = None) -> Path:
    """Write the first layers of a model, unless they are there; returns its folder, or its file for q4_k.

    kind: bf16, fp8, int4, mxfp4 (gpt-oss) or q4_k, which llama-cpp-python of the interpreter `llama` writes.
    """
    folder = under / f"{name}-{layers}-{kind}"
    made = folder / "model.gguf" if kind == "q4_k" else folder
    if (folder / "complete").exists():
        return made
    shutil.rmtree(folder, ignore_errors=True)
    if kind == "bf16":
        _write_plain(name, layers, folder)
    elif kind == "q4_k":
        _write_gguf(write_model(name, layers, "bf16", under), made, llama)
    else:
        _quantise(write_model(name, layers, "bf16", under), folder, kind)
    (folder / "complete").touch()
    return made


def _write_plain(name: str, layers: int, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, initialization

    settings = dict(MODELS[name])
    whole = settings["num_hidden_layers"]
    vocabulary = max(2048, settings["vocab_size"] * layers // whole // 128 * 128)
    settings |= {"num_hidden_layers": layers, "vocab_size": vocabulary, "tie_word_embeddings": False}
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("cpu"), initialization.no_init_weights():
        model = make(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.03, 0.03) if parameter.ndim > 1 else parameter.fill_(1.0)
    model.save_pretrained(folder, max_shard_size="1GB")


def _quantise(source: Path, folder: Path, kind: str) -> None:
    """Quantise every linear layer but the router and lm_head; mxfp4: the experts of gpt-oss."""
    from safetensors.torch import load_file, save_file

    quantise, config_section = KINDS[kind]

    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    for file in sorted(source.glob("*.safetensors")):
        found: dict[str, Tensor] = {}
        for name, weight in load_file(file).items():
            stays = weight.ndim != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", ".gate.weight"))
            stays = not name.endswith("_proj") if kind == "mxfp4" else stays
            found |= {name: weight} if stays else quantise(name, weight)
        save_file(found, folder / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(found, file.name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8"
    )
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = config_section
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


INT4 = "int4_g128"


def _fp8(name: str, weight_NK: Tensor) -> dict[str, Tensor]:
    q = FP8_128x128.quantize(weight_NK.float())
    assert q.scales is not None
    return {name: q.values, f"{name}_scale_inv": q.scales}


def _int4(name: str, weight_NK: Tensor) -> dict[str, Tensor]:
    found = pack("compressed_tensors", GROUPED[INT4].quantize(weight_NK))
    return {f"{name}_{key or 'packed'}": tensor for key, tensor in found.items()}


def _mxfp4(name: str, weights_EKN: Tensor) -> dict[str, Tensor]:
    """Blocks of 32 values, two in a byte, and a power of two for each."""
    found = [MXFP4.quantize(weight.t().float()) for weight in weights_EKN]
    blocks = torch.stack([q.values for q in found]).unflatten(2, (-1, 16))
    scales = torch.stack([q.scales.view(torch.uint8) for q in found if q.scales is not None])
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


KINDS: dict[str, tuple[Callable[[str, Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "fp8": (_fp8, quantization_config("fp8_block", (128, 128))),
    "int4": (_int4, quantization_config(INT4, (128, 128)) | {
        "quantization_status": "compressed", "ignore": ["lm_head", "re:.*mlp.gate$"],
    }),
    "mxfp4": (_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ]}),
}  # fmt: skip

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
Q4_K_S = 14
"""LLAMA_FTYPE_MOSTLY_Q4_K_S."""
QUANTISE = """
import sys, llama_cpp as ll
settings = ll.llama_model_quantize_default_params()
settings.ftype, settings.pure = int(sys.argv[3]), True
sys.exit(ll.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), settings))
"""


def _write_gguf(source: Path, file: Path, llama: Path | None) -> None:
    """Write a Qwen3-MoE in bf16 under llama.cpp's names, and let llama.cpp quantise it."""
    from safetensors import safe_open

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if llama is None or config["model_type"] != "qwen3_moe":
        raise ValueError("q4_k needs --llama, and is written for qwen3-30b-a3b only")
    index = json.loads((source / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]

    def read(name: str) -> Tensor:
        with safe_open(source / index[name], "pt") as held:
            found: Tensor = held.get_tensor(name)
            return found

    def entry(spelled: str, names: list[str], kind: str) -> GgufTensor:
        def data() -> Any:
            each = torch.stack([read(name) for name in names]) if len(names) > 1 else read(names[0])
            each = each.float() if kind == "F32" else each
            return each.contiguous().view(torch.uint8).numpy()

        sizes = read(names[0]).shape
        stacked = (len(names),) if len(names) > 1 else ()
        shape = (*stacked, *sizes[:-1], sizes[-1] * (4 if kind == "F32" else 2))
        return GgufTensor(f"{spelled}.weight", kind, tuple(shape), data)

    tensors, experts = [], config.get("num_experts") or config["num_local_experts"]
    for name in sorted(index):
        stem = name.removesuffix(".weight")
        if stem in GGUF_NAMES:
            tensors.append(entry(GGUF_NAMES[stem], [name], "F32" if "norm" in stem else "BF16"))
        elif ".experts." not in name:
            _, _, layer, local = stem.split(".", 3)
            wide = "norm" in local or local == "mlp.gate"
            tensors.append(entry(f"blk.{layer}.{GGUF_NAMES[local]}", [name], "F32" if wide else "BF16"))
    for layer in range(config["num_hidden_layers"]):
        for part in ("gate", "up", "down"):
            names = [f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight" for e in range(experts)]
            tensors.append(entry(f"blk.{layer}.ffn_{part}_exps", names, "BF16"))
    sizes = {
        "block_count": config["num_hidden_layers"], "context_length": 4096, "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"], "expert_count": experts,
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_used_count": config["num_experts_per_tok"], "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"], "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6, "vocab_size": config["vocab_size"],
    }  # fmt: skip
    metadata: dict[str, Any] = {f"qwen3moe.{key}": value for key, value in sizes.items()}
    file.parent.mkdir(parents=True)
    wide = file.with_name("bf16.gguf")
    write_gguf(wide, "qwen3moe", metadata | {"tokenizer.ggml.model": "none"}, tensors)
    subprocess.run([llama, "-c", QUANTISE, wide, file, str(Q4_K_S)], check=True, capture_output=True)
    wide.unlink()
