"""One MoE layer, as an engine embeds it: decide, load, explain, run.

python examples/01_layer.py

It writes a tiny checkpoint in the official DeepSeek-V3 layout first. With a real download, give its folder instead.
"""

from __future__ import annotations

import tempfile

import torch

import moe_mk
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint


def main() -> None:
    """Print what the layer takes, what was chosen and why, and what came out."""
    with tempfile.TemporaryDirectory() as ds3:
        write_checkpoint(ds3, CheckpointShape(num_experts=16, hidden_size=256, intermediate_size=128))

        config = moe_mk.MoEConfig.from_hf(ds3, experts="auto", prepare_finalize="auto", router_dtype="float32")
        layer = moe_mk.DeepseekV3MoE(config, device="cpu", dtype=torch.bfloat16, groups=None)
        print("memory:", layer.memory_report())
        layer.load_from_safetensors(ds3, layer=3)
        print("decision:", layer.explain())

        generator = torch.Generator(device="cpu").manual_seed(0)
        hidden_states = torch.randn(64, 256, generator=generator, dtype=torch.float32, device="cpu").to(torch.bfloat16)
        y = layer(hidden_states)

        print("input", tuple(hidden_states.shape), "-> output", tuple(y.shape), y.dtype)
        print("tokens that chose each expert:", layer.expert_load.tolist())
        print(int(layer.expert_load.sum()), "assignments = 64 tokens x top-8")


if __name__ == "__main__":
    main()
