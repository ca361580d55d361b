"""Tiny models with packed experts in the official layouts, and the same models with the decoded weights."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.checkpoints.gguf_checkpoint import GgufTensor, layer_tensors, write_gguf
from moe_mk.lab.checkpoints.tiny_models import tiny_model
from moe_mk.quant.gguf import GGUF
from moe_mk.weights import inspect_checkpoint, load_layer
from moe_mk.weights.gguf_source import open_source
from tests.weights.one_layer import wide

SIZE, EXPERTS, LAYERS = 256, 16, 3
QWEN_HEADS = 2
MOE_LAYERS = (1, 2)


def family_model(family: str, *, dense: tuple[int, ...] = (0,)) -> Any:
    """A seeded random model in f32: DeepSeek-V3 with one dense layer, or Qwen3-MoE with dense layers."""
    if family == "deepseek_v3":
        sizes = {"hidden_size": SIZE, "moe_intermediate_size": SIZE, "num_hidden_layers": LAYERS}
        return tiny_model(3, n_routed_experts=EXPERTS, initializer_range=0.1, **sizes)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=SIZE, intermediate_size=SIZE, moe_intermediate_size=SIZE, num_hidden_layers=LAYERS,
        num_attention_heads=QWEN_HEADS, num_key_value_heads=QWEN_HEADS, head_dim=SIZE // QWEN_HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=list(dense), initializer_range=0.1,
        max_position_embeddings=128, pad_token_id=0, eos_token_id=95, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.Qwen3MoeForCausalLM(config).to(torch.float32).eval()


def shape_of(family: str, quant: str) -> CheckpointShape:
    return CheckpointShape(
        EXPERTS, SIZE, SIZE, num_shared_experts=int(family == "deepseek_v3"), layers=MOE_LAYERS, top_k=2,
        num_groups=2 if family == "deepseek_v3" else 1, top_k_groups=1, quant=quant,
    )  # fmt: skip


def write_packed(folder: Path, family: str, quant: str) -> Path:
    """A folder of safetensors: MoE blocks by `write_checkpoint`, everything else by `save_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder / "blocks", shape_of(family, quant), seed=5, threads=1)
    tensors = {name: t for file in (folder / "blocks").glob("*.safetensors") for name, t in load_file(file).items()}
    stated = json.loads((folder / "blocks" / "config.json").read_text())
    for file in (folder / "blocks").iterdir():
        file.unlink()
    (folder / "blocks").rmdir()
    family_model(family).save_pretrained(folder)
    if family == "qwen3_moe":
        tensors = {name: tensor for name, tensor in tensors.items() if "e_score_correction_bias" not in name}
    blocks = tuple({name.split("mlp.")[0] + "mlp." for name in tensors})
    rest = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith(blocks)}
    save_file({**rest, **tensors}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = stated["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def decoded_model(folder: Path, family: str) -> Any:
    """The model by transformers alone, with the weights of the checkpoint decoded to f32."""
    model, source = family_model(family), open_source(folder)
    for facts in inspect_checkpoint(folder).layers:
        weights = load_layer(source, facts.layer, facts.layer_spec(), owned=range(EXPERTS), prefix=facts.prefix)
        block = model.model.layers[facts.layer].mlp
        for expert, slot in enumerate(weights.experts.slots):
            gate, up, down = wide(slot)
            block.experts.gate_up_proj[expert] = torch.cat([gate, up])
            block.experts.down_proj[expert] = down
        block.gate.weight.copy_(weights.gate_EH)
        if weights.bias_E is not None:
            block.gate.e_score_correction_bias.copy_(weights.bias_E)
        if weights.shared is not None:
            for name, matrix in zip(("gate", "up", "down"), wide(weights.shared), strict=True):
                getattr(block.shared_experts, f"{name}_proj").weight.copy_(matrix)
    return model


def write_gguf_model(folder: Path, quant: str, rest: str = "F32", parts: int = 1) -> Path:
    """A whole Qwen3-MoE as llama.cpp names it: packed experts, other matrices as `rest`, everything else in f32. With
    other matrices than F32 it has no dense layer, as files that llama.cpp reads. Returns the first of its parts."""
    folder.mkdir(parents=True, exist_ok=True)
    dense = (0,) if rest == "F32" else ()
    model, spec = family_model("qwen3_moe", dense=dense), shape_of("qwen3_moe", quant).layer_spec()
    names = {
        "model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    }  # fmt: skip
    tensors = []
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            continue
        if name in names:
            spelled = f"{names[name]}.weight"
        else:
            _, _, layer, local = name.split(".", 3)
            spelled = f"blk.{layer}.{names[local.removesuffix('.weight')]}.weight"
        tensors.append(gguf_tensor(spelled, tensor, "F32" if tensor.dim() == 1 or "gate_inp" in spelled else rest))
    for layer in range(len(dense), LAYERS):
        experts = model.model.layers[layer].mlp.experts

        def matrix(part: Any, experts: Any = experts) -> Any:
            gate_up, down = experts.gate_up_proj[part.expert].detach(), experts.down_proj[part.expert].detach()
            found = {"gate": gate_up[:SIZE], "up": gate_up[SIZE:], "down": down}[part.projection]
            return spec.scheme_of(part.role, part.projection).quantize(found)

        made = layer_tensors(spec, layer, matrix, lambda part: torch.zeros(0))
        tensors += [each for each in made if "_exps." in each.name]
    config = model.config
    sizes = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": SIZE, "feed_forward_length": SIZE,
        "expert_feed_forward_length": SIZE, "expert_count": EXPERTS, "expert_used_count": 2,
        "attention.head_count": QWEN_HEADS, "attention.head_count_kv": QWEN_HEADS,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), "vocab_size": 96,
    }  # fmt: skip
    metadata = {f"qwen3moe.{key}": value for key, value in sizes.items()}
    files = [folder / (f"model-{n + 1:05d}-of-{parts:05d}.gguf" if parts > 1 else "model.gguf") for n in range(parts)]
    tensors.sort(key=lambda each: each.name == "output.weight")  # the first part does not have it
    for part, (file, given) in enumerate(zip(files, np.array_split(np.arange(len(tensors)), parts), strict=True)):
        write_gguf(file, "qwen3moe", {} if part else metadata, [tensors[at] for at in given])
    return files[0]


def gguf_tensor(name: str, tensor: Tensor, kind: str) -> GgufTensor:
    """A tensor in a type of ggml: F32, one of `GGUF`, or one that the gguf package quantises."""
    if kind == "F32":
        octets = tensor.contiguous().reshape(*tensor.shape[:-1], -1).view(torch.uint8)
    elif kind.lower() in GGUF:
        octets = GGUF[kind.lower()].quantize(tensor).values
    else:
        octets = torch.from_numpy(gguf.quantize(tensor.numpy(), gguf.GGMLQuantizationType[kind]))
    return GgufTensor(name, kind, tuple(octets.shape), octets.numpy)


class PeakBytes(TorchDispatchMode):
    """`peak`: the most bytes of new storages that were alive at once inside it; views of files are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        found = func(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and id_of(tensor) not in given:
                self._alive[id_of(tensor)] = StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return found


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def bytes_of_experts(model: nn.Module) -> int:
    found = {n: p for n, p in model.named_parameters() if ".experts." in n and p.device.type != "meta"}
    return sum(parameter.nbytes for parameter in found.values())
