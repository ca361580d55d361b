"""Generate text with transformers and the experts of this library: one argument at loading, and a report.

python examples/08_hf_generate.py

It writes a tiny random FP8 DeepSeek-V3 first. With a real checkpoint, give its folder instead.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from moe_mk.integrations.transformers import cpu_fp8, explain, patch_blocks, register
from moe_mk.lab.checkpoints.tiny_models import write_fp8_checkpoint

logging.disable_progress_bar()


def main() -> None:
    """Print which backend computes each layer, and that every way of running it gives the same text."""
    register(activations="checkpoint")  # round activations to FP8 as the checkpoint was made for
    generator = torch.Generator(device="cpu").manual_seed(1)
    ids = torch.randint(1, 90, (1, 6), generator=generator, dtype=torch.int64, device="cpu")
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}

    with tempfile.TemporaryDirectory() as folder, cpu_fp8():  # FP8 stays FP8, here on a CPU
        write_fp8_checkpoint(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="moe_mk", dtype=torch.float32)
        print(explain(model))
        print("experts are held as", model.model.layers[1].mlp.experts.down_proj.dtype)
        ours = model.generate(ids, **settings)
        print("tokens:", ours[0, 6:].tolist())

        model.set_experts_implementation("eager")
        print("equal to transformers' own experts:", torch.equal(model.generate(ids, **settings), ours))

        layers = patch_blocks(model, activations="checkpoint")  # gate, routing and shared experts here as well
        print("equal with whole blocks patched:", torch.equal(model.generate(ids, **settings), ours))
        path, layer = next(iter(layers.items()))
        print(f"tokens that chose each expert of {path}:", layer.expert_load.tolist())


if __name__ == "__main__":
    main()
