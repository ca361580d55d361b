"""The number formats that every experts backend and every pair is tried in."""

from dataclasses import dataclass
from typing import Any

import torch

from moe_mk import MoEConfig, Problem
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.config import device_profile
from moe_mk.external.library import emulated, installed
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.experts import random_experts
from moe_mk.oracle import Parts, assemble, select
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant import BF16, FP16, FP32
from moe_mk.quant.plain import Plain
from moe_mk.weights.expert_weights import ExpertWeights, Weights

CPU = torch.device("cpu")

HIDDEN, INNER, EXPERTS, TOP_K = 192, 128, 8, 3
"""Hidden ends in half a block of 128; the intermediate size is one block."""


@dataclass(frozen=True)
class Format:
    """How experts are stored, what the layer's dtype is, and what activations are rounded to."""

    weights: str
    scale: str
    dtype: Plain
    activations: str
    rounded: str = "auto"
    """What the checkpoint states of activations."""

    def __str__(self) -> str:
        rounded = "" if self.rounded == "auto" else f"-{self.rounded}"
        return f"{self.weights}-{self.scale}-{self.dtype.name}-{self.activations}{rounded}"

    def problem(self, *, ep: int = 1, num_tokens: int = 64, **settings: Any) -> Problem:
        """The question to the oracle, for the device that tests run on."""
        quant = {"weights": self.weights, "scale": self.scale, "activations": self.rounded}
        model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "quant": quant}
        config = MoEConfig.parse({"model": model, "router": {"top_k": TOP_K}}, "a test")
        config = config.with_(ep=ep, activations=self.activations, max_num_tokens=num_tokens, **settings)
        return Problem(config, device_profile("cpu"), self.dtype, num_tokens, installed(), emulated())


def kernels_of(
    form: Format, transport: str, expert_map: ExpertMap, experts: str = "reference"
) -> list[tuple[FusedMoEKernel, Weights]]:
    """A pair on every virtual rank, with the weights of that rank."""
    decision = select(form.problem(ep=expert_map.num_ranks, prepare_finalize=transport, experts=experts))
    stack, made = random_experts(form.problem().weights, EXPERTS, HIDDEN, INNER, CPU), []
    for comm in LockstepWorld(expert_map.num_ranks).communicators():
        kernel = assemble(decision, Parts(expert_map, CPU, comm))
        assert isinstance(kernel, FusedMoEKernel)
        own = torch.tensor(expert_map.local_to_global(comm.rank))
        made.append((kernel, kernel.experts.relayout(ExpertWeights(stack.w13[own], stack.w2[own]))))
    return made


FORMATS = [
    Format("fp32", "float32", FP32, "plain"), Format("bf16", "float32", BF16, "plain"),
    Format("fp16", "float32", FP16, "plain"), Format("bf16", "float32", FP32, "plain"),
    Format("fp8_block", "float32", BF16, "plain"), Format("fp8_block", "ue8m0", BF16, "plain"),
    Format("fp8_block", "float32", FP32, "plain"), Format("fp8_block", "float32", BF16, "checkpoint"),
    Format("fp8_block", "ue8m0", BF16, "checkpoint"),
]  # fmt: skip
"""Every one is tried with every experts backend and in every pair."""

MORE_PAIRS = [
    Format("int8", "float32", BF16, "checkpoint"),
    Format("mxfp4", "float32", BF16, "checkpoint", "mxfp8"),
    Format("nvfp4", "float32", BF16, "checkpoint"),
    Format("fp8_channel", "float32", BF16, "checkpoint"),
]
"""Tried with every experts backend, and in pairs with the transports that carry bytes of any kind themselves."""

MORE_FORMATS = [
    Format("mxfp8", "float32", BF16, "checkpoint"), Format("mxfp4", "float32", BF16, "plain"),
    Format("mxfp4", "float32", BF16, "checkpoint", "fp8"), Format("int8", "float32", BF16, "plain"),
    Format("int8_block", "float32", FP32, "plain"), Format("mxfp8", "float32", FP16, "plain"),
    Format("nvfp4", "float32", BF16, "plain"), Format("fp8_tensor", "float32", BF16, "plain"),
    Format("fp8_tensor", "float32", BF16, "checkpoint"),
]  # fmt: skip
"""Tried with every experts backend alone: what travels is that of another format above."""
