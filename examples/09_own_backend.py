"""An experts backend of your own: one class with one decorator, checked, explained and run like the built-in ones.

python examples/09_own_backend.py
"""

from __future__ import annotations

import tempfile

import torch
from torch.nn.functional import silu

import moe_mk
from moe_mk.experts.base import EXPERTS, ExpertsTraits, FusedExperts
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, Tokens
from moe_mk.weights import Weights


@EXPERTS.register("my_loop")
class MyLoop(FusedExperts):
    """One expert after the other, over rows sorted by expert."""

    traits = ExpertsTraits(
        summary="a loop of matmuls, to show how a backend is written",
        kinds=frozenset({"cpu"}),  # where it has been tested
        emits={GroupedTokens: OutputStage.RAW},  # reads sorted rows, leaves weighing and summing to others
        weights=frozenset({"plain", "fp8_block"}),
        computes=("plain",),
        activations=frozenset({"silu"}),
        graph_safe=False,  # counts are read on the host
        deterministic=True,  # one product per expert, in the order of the rows
    )

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """w2(silu(gate(x)) * up(x)) for the rows of each slot."""
        assert isinstance(tokens, GroupedTokens)
        dtype, parts = self.context.dtype.dtype, []
        for slot, x in enumerate(tokens.x_NH.dequantize(dtype).split_with_sizes(tokens.counts_L.tolist())):
            w = weights.slot(slot)
            assert w.gate_IH is not None
            h = silu(x @ w.gate_IH.dequantize(dtype).T) * (x @ w.up_IH.dequantize(dtype).T)
            parts.append(h @ w.down_HI.dequantize(dtype).T)
        return ExpertOutput(torch.cat(parts), OutputStage.RAW)


def main() -> None:
    """Pin the new backend, run it, and compare it with the reference."""
    with tempfile.TemporaryDirectory() as ds3:
        write_checkpoint(ds3, CheckpointShape(num_experts=16, hidden_size=256, intermediate_size=128))
        mine = moe_mk.DeepseekV3MoE.from_checkpoint(ds3, layer=3, experts="my_loop")
        reference = moe_mk.DeepseekV3MoE.from_checkpoint(ds3, layer=3, experts="reference", activations="plain")

        generator = torch.Generator(device="cpu").manual_seed(0)
        x = torch.randn(32, 256, generator=generator, dtype=torch.float32, device="cpu").to(torch.bfloat16)
        y, expected = mine(x).float(), reference(x).float()
        error = float((y - expected).norm() / expected.norm())

        print(f"{mine.decision.chosen.name}: {mine.decision.because}")
        print("among", *(f"  {verdict.name}" for verdict in mine.decision.verdicts if not verdict.reasons), sep="\n")
        print(f"relative difference from the reference: {error:.1e}, one rounding to bf16 is up to {2**-8:.1e}")


if __name__ == "__main__":
    main()
