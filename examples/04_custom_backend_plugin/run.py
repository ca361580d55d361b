"""Run the two sample backends once their wheel is installed: two ranks in one process, against the reference.

pip install ./examples/04_custom_backend_plugin
python examples/04_custom_backend_plugin/run.py
"""

from __future__ import annotations

import tempfile

import torch

import moe_mk
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.flight import interleave
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint


def main() -> None:
    """Print the pair that served, and how far it is from the reference."""
    with tempfile.TemporaryDirectory() as ds3:
        write_checkpoint(ds3, CheckpointShape(num_experts=16, hidden_size=256, intermediate_size=128))
        generator = torch.Generator(device="cpu").manual_seed(0)
        x_TH = torch.randn(12, 256, generator=generator, dtype=torch.float32, device="cpu").to(torch.bfloat16)
        alone = moe_mk.DeepseekV3MoE.from_checkpoint(ds3, layer=3, experts="reference", activations="plain")
        pins = {"prepare_finalize": "one_by_one", "experts": "matmul_loop"}
        ranks = [
            moe_mk.DeepseekV3MoE.from_checkpoint(ds3, layer=3, groups=moe_mk.ParallelGroups(ep=rank), **pins)
            for rank in LockstepWorld(2).communicators()
        ]
        parts = interleave([ranks[0].steps(x_TH[:9]), ranks[1].steps(x_TH[9:])])

    expected = alone(x_TH).float()
    error = float((torch.cat(parts).float() - expected).norm() / expected.norm())
    print(f"{ranks[0].decision.chosen.name}: relative difference from the reference {error:.1e}")


if __name__ == "__main__":
    main()
