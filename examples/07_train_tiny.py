"""Train a small DeepSeek-V3 on Python's own sources, and write it in the official FP8 layout.

python examples/07_train_tiny.py build/tiny-ds3                        # minutes on two cores
python examples/07_train_tiny.py build/tiny-ds3 --steps 30             # seconds; the model is barely trained
python examples/05_nano_engine.py build/tiny-ds3 --prompt "def "       # generates text
python examples/07_load_map.py build/tiny-ds3                          # its experts, and a routing trace

Bytes are the tokens. Experts are balanced by the bias update without an auxiliary loss, `moe_mk.lab.training`. At the
end, held-out text is evaluated with the trained model in bf16 and with the FP8 checkpoint in this library. The
results are written to training.json in the folder of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from moe_mk.lab.training.router import updated_bias
from moe_mk.quant.fp8 import FP8_128x128

BATCH, LENGTH, HELD_OUT = 8, 256, 16
GAMMA, PEAK_RATE, WARM_UP = 5e-3, 3e-3, 40
CPU = torch.device("cpu")


def config_of(experts: int) -> DeepseekV3Config:
    """DeepSeek-V3 in small: one dense layer and three of experts, MLA, grouped top-k, a shared expert."""
    return DeepseekV3Config(
        vocab_size=256, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=experts,
        num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=1.5, norm_topk_prob=True,
        first_k_dense_replace=1, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32,
        v_head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's top-level modules: every twentieth file is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_bytes() for file in files]
    seen = b"".join(text for number, text in enumerate(texts) if number % 20)
    held_out = b"".join(text for number, text in enumerate(texts) if number % 20 == 0)
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (seen, held_out))  # type: ignore[return-value]


def windows(text: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """(count, LENGTH) tokens from places of the text."""
    starts = torch.randint(len(text) - LENGTH, (count,), generator=draw, device=CPU)
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()]).long()


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """The gate of every layer of experts."""
    return (module for module in model.modules() if hasattr(module, "e_score_correction_bias"))


def train(model: DeepseekV3ForCausalLM, text: Tensor, steps: int) -> tuple[list[Tensor], dict[int, float]]:
    """Adam with a warm-up and a cosine; after each step every gate's bias follows its experts' load.

    Returns how often each expert of each layer was chosen in the last tenth of the steps, and bits a byte by step.
    """
    bits_of: dict[int, float] = {}
    loads: dict[nn.Module, Tensor] = {}

    def count(gate: nn.Module, _: object, routed: tuple[Tensor, ...]) -> None:
        loads[gate] = torch.bincount(routed[2].flatten(), minlength=gate.num_experts)  # type: ignore[arg-type]

    hooks = [gate.register_forward_hook(count) for gate in routers(model)]
    adam = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    draw, last = torch.Generator(CPU).manual_seed(0), max(steps // 10, 1)
    totals = [torch.zeros(gate.num_experts, dtype=torch.int64, device=CPU) for gate in routers(model)]  # type: ignore[call-overload]
    for step in range(steps):
        rate = min((step + 1) / WARM_UP, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in adam.param_groups:
            group["lr"] = PEAK_RATE * rate
        tokens = windows(text, BATCH, draw)
        loss = model(input_ids=tokens, labels=tokens).loss
        adam.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        for number, gate in enumerate(routers(model)):
            gate.e_score_correction_bias.copy_(updated_bias(gate.e_score_correction_bias, loads[gate], GAMMA * rate))  # type: ignore[operator,arg-type]
            totals[number] += loads[gate] if step >= steps - last else 0
        if step % 20 == 0 or step == steps - 1:
            bits_of[step] = loss.item() / math.log(2)
            print(f"step {step:4d}: {bits_of[step]:.3f} bits a byte", flush=True)
    for hook in hooks:
        hook.remove()
    return totals, bits_of


def save(model: DeepseekV3ForCausalLM, folder: Path) -> int:
    """Write the official layout: FP8 in 128x128 blocks for every matrix of the layers, bf16 for the rest."""
    tensors: dict[str, Tensor] = {}
    for name, value in official_names(model):
        is_matrix = name.startswith("model.layers.") and value.dim() == 2 and not name.endswith("mlp.gate.weight")
        if is_matrix:
            quantised = FP8_128x128.quantize(value.float())
            tensors[name], tensors[f"{name}_scale_inv"] = quantised.values, quantised.scales  # type: ignore[assignment]
        else:
            kept = name.endswith("e_score_correction_bias")
            tensors[name] = value.float().clone() if kept else value.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = {**model.config.to_dict(), "torch_dtype": "bfloat16", "quantization_config": QUANTISED}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    return sum(tensor.nbytes for tensor in tensors.values())


QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def official_names(model: DeepseekV3ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as DeepSeek names it: experts one by one, where transformers keeps them in stacks."""
    for name, value in model.state_dict().items():
        prefix, _, stack = name.rpartition(".experts.")
        if stack == "gate_up_proj":
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                yield f"{prefix}.experts.{expert}.gate_proj.weight", gate.contiguous()
                yield f"{prefix}.experts.{expert}.up_proj.weight", up.contiguous()
        elif stack == "down_proj":
            for expert, down in enumerate(value):
                yield f"{prefix}.experts.{expert}.down_proj.weight", down.contiguous()
        else:
            yield name, value


def bits_per_byte(logits_BTV: Tensor, tokens_BT: Tensor) -> float:
    """Mean cross entropy of the next byte."""
    flat = logits_BTV[:, :-1].float().flatten(0, 1)
    return float(nn.functional.cross_entropy(flat, tokens_BT[:, 1:].flatten()) / math.log(2))


def main() -> None:
    """Train, save, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--experts", type=int, default=32)
    asked = parser.parse_args()
    if asked.steps < 1 or asked.experts < 8 or asked.experts % 4:
        parser.error(f"--steps {asked.steps} --experts {asked.experts}: 1 step or more; 4 groups of 2 experts or more")
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM._from_config(config_of(asked.experts), experts_implementation="eager")
    seen, held_out = corpus()
    numbers = sum(p.numel() for p in model.parameters())
    print(f"{numbers:,} parameters, {asked.experts} experts a layer; {len(seen):,} bytes to learn from")
    began = time.monotonic()
    loads, bits_of = train(model, seen, asked.steps)
    seconds = time.monotonic() - began
    busiest = [float(load.max() / load.float().mean()) for load in loads]
    for number, uneven in enumerate(busiest):
        print(f"experts of layer {number + 1}: busiest {uneven:.2f} x mean")
    stored = save(model, asked.folder)
    print(f"wrote {stored:,} B to {asked.folder}")

    engine = import_module("05_nano_engine")  # in this folder
    tokens = windows(held_out, HELD_OUT, torch.Generator(CPU).manual_seed(1))
    with torch.no_grad():
        ours = bits_per_byte(engine.NanoModel.load(asked.folder).logits(tokens), tokens)
        theirs = bits_per_byte(model.to(torch.bfloat16)(input_ids=tokens).logits, tokens)
    ratio = 2 ** (ours - theirs)
    print(f"held-out text: {theirs:.4f} bits a byte in bf16, {ours:.4f} through FP8, perplexity x {ratio:.4f}")
    facts = {
        "command": f"python examples/07_train_tiny.py {asked.folder} --steps {asked.steps} --experts {asked.experts}",
        "device": f"{platform.machine()} CPUs, threads: {torch.get_num_threads()}", "torch": torch.__version__,
        "seconds": seconds, "parameters": numbers, "experts": asked.experts, "bytes_learned": len(seen),
        "bytes_stored": stored, "bits_by_step": bits_of, "busiest_of_layers": busiest, "held_out_bits_bf16": theirs,
        "held_out_bits_fp8": ours, "perplexity_ratio": ratio,
    }  # fmt: skip
    (asked.folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    if abs(ratio - 1) > 0.01:
        raise SystemExit("the FP8 path is more than 1 % away")


if __name__ == "__main__":
    main()
