"""The Python frames of one warm decode step: one token through a whole layer, on one rank and on two, and through the
routed experts as engines call them.

Counted is every "call" event that `sys.setprofile` reports in the calling thread of rank 0 for code of `moe_mk`, from
the layer's `forward` on: functions, comprehensions that are functions, and generators each time they are entered or
resumed. Not counted are torch, numpy and the standard library. The layer has a shared expert and runs on the native CPU
kernels; FP8 experts, 16 of them. At EP=2 the ranks are two processes over `one_sided`, and both have one token.

Of engines: what vLLM's method calls for its rank, to which vLLM's `apply` adds one frame, and an experts module of
transformers with `experts_implementation="moe_mk"`, in bf16.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import moe_mk
from moe_mk import DeepseekV3MoE, ParallelGroups
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights
from moe_mk.integrations.hf.op import ExpertsFunction
from moe_mk.integrations.vllm import local_ids
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.testing.on_ranks import run_ranks

PACKAGE = Path(moe_mk.__file__ or "").parent
SHAPE = CheckpointShape(
    num_experts=16, top_k=4, num_groups=4, top_k_groups=2, hidden_size=256, intermediate_size=128, quant="fp8"
)  # fmt: skip
LAYER, WARM = 3, 3


@dataclass(frozen=True)
class DecodeStep:
    """What one call of a layer passed through."""

    ep: int
    frames: list[tuple[str, str]]
    """File below the package and function, in order."""

    @property
    def files(self) -> int:
        return len({path for path, _ in self.frames})

    def as_dict(self) -> dict[str, int]:
        numbers = {"frames": len(self.frames), "files": self.files}
        return {f"{name} at EP={self.ep}": number for name, number in numbers.items()}


def decode_steps() -> list[DecodeStep]:
    """At EP=1 and at EP=2. Needs a C++ compiler, and starts two processes."""
    with tempfile.TemporaryDirectory(prefix="decode-step-") as folder:
        write_checkpoint(folder, SHAPE)
        alone = _frames_of(folder, None)
        together = run_ranks(_frames_of_rank, 2, folder, timeout_s=100.0)[0]
    return [DecodeStep(1, alone), DecodeStep(2, [(path, function) for path, function in together])]


def _frames_of_rank(rank: int, folder: str) -> list[tuple[str, str]]:
    return _frames_of(folder, ParallelGroups(ep=dist.group.WORLD), prepare_finalize="one_sided")


def _frames_of(folder: str, groups: ParallelGroups | None, **settings: Any) -> list[tuple[str, str]]:
    layer = DeepseekV3MoE.from_checkpoint(
        folder, LAYER, groups=groups, experts="cpu_native", activations="plain", max_num_tokens=64, **settings
    )  # fmt: skip
    x_TH = torch.randn((1, SHAPE.hidden_size), generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(WARM):
        layer(x_TH)
    return frames_of(lambda: layer(x_TH))


def engine_calls() -> dict[str, list[tuple[str, str]]]:
    """The frames of a call of one token's experts by engine. Needs a C++ compiler and transformers."""
    draw = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn((4, *size), generator=draw).bfloat16() for size in ((128, 64), (64, 64)))
    x_TH, weights_TK = torch.randn((1, 64), generator=draw).bfloat16(), torch.full((1, 2), 0.5)
    ids_TK = torch.tensor([[0, 2]])
    experts = EngineExperts("vLLM", EngineWeights(w13, w2), top_k=2, settings={"experts": "cpu_native"})
    config = MixtralConfig(hidden_size=64, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    module, function = MixtralExperts(config).bfloat16(), ExpertsFunction("moe_mk", {"experts": "cpu_native"})
    calls: dict[str, Callable[[], object]] = {
        "vLLM": lambda: experts(x_TH, weights_TK, local_ids(ids_TK, None)),
        "transformers": lambda: function(module, x_TH, ids_TK, weights_TK),
    }
    with torch.no_grad():
        module.gate_up_proj.copy_(w13)
        module.down_proj.copy_(w2)
        for call in calls.values():
            for _ in range(WARM):
                call()
        return {engine: frames_of(call) for engine, call in calls.items()}


def frames_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """File below the package and function of every frame of ours that a call enters in this thread."""
    frames: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            path = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            frames.append((path, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return frames
