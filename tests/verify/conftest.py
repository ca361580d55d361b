"""Small layers over real checkpoints, alone or as ranks in lockstep, and their answers, for all tests of this room."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from moe_mk.comm import LockstepWorld, ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.flight import interleave
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.verify import Answer, Verification, verify
from moe_mk.layer import DeepseekV3MoE
from moe_mk.weights import LayerWeights, SafetensorsSource, load_layer

FP8 = CheckpointShape(num_experts=16, hidden_size=256, intermediate_size=128, top_k=4, num_groups=4, top_k_groups=2)
SHAPES = {
    "fp8": FP8,
    "bf16": replace(FP8, quant="bf16"),
    "tiny": CheckpointShape(
        num_experts=4, hidden_size=64, intermediate_size=32, top_k=2, num_groups=2, top_k_groups=1, block=(16, 16)
    ),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each shape. Never write into them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, shape in SHAPES.items():
        write_checkpoint(folder / name, shape, seed=1)
    return {name: folder / name for name in SHAPES}


@dataclass(frozen=True)
class Case:
    checkpoint: str
    dtype: torch.dtype = torch.bfloat16
    ranks: int = 1
    tokens: str = "sharded"
    activations: str = "auto"
    wire: str = "auto"
    router_dtype: str = "float32"
    prepare_finalize: str = "auto"
    experts: str = "auto"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.checkpoint}-{dtype}-{self.activations}-{self.wire}-{self.ranks}-{self.tokens}"

    def config(self, where: Path) -> MoEConfig:
        return MoEConfig.from_hf(
            where, ep=self.ranks, tokens=self.tokens, activations=self.activations, wire=self.wire,
            router_dtype=self.router_dtype, prepare_finalize=self.prepare_finalize, experts=self.experts,
            max_num_tokens=64,
        )  # fmt: skip


def inputs(case: Case, hidden_size: int, seed: int, num_tokens: int = 24) -> torch.Tensor:
    """RMS-normed normals, as the norm before a MoE layer makes them."""
    x_TH = torch.randn(num_tokens, hidden_size, generator=torch.Generator().manual_seed(seed))
    return (x_TH / x_TH.square().mean(1, keepdim=True).sqrt()).to(case.dtype)


class Bench:
    """The ranks of one case, loaded, and the weights of all experts."""

    def __init__(self, case: Case, where: Path) -> None:
        self.case, self.where = case, where
        self.layers = [
            DeepseekV3MoE(case.config(where), dtype=case.dtype, groups=groups).load_from_safetensors(where, 3)
            for groups in groups_of(case.ranks)
        ]
        self.first = self.layers[0]
        model = self.first.config.model
        self.hidden_size = model.hidden_size
        self.whole: LayerWeights = load_layer(
            SafetensorsSource(where), 3, self.first.spec, owned=range(model.num_experts)
        )

    @torch.no_grad()
    def answer(self, x_TH: torch.Tensor) -> Answer:
        shared = self.case.tokens == "replicated"
        parts = [x_TH] * self.case.ranks if shared else list(x_TH.tensor_split(self.case.ranks))
        outputs = interleave([layer.steps(part) for layer, part in zip(self.layers, parts, strict=True)])
        return Answer(x_TH, outputs[0] if shared else torch.cat(outputs), self.first.route(x_TH).ids_TK)

    def judge(self, answer: Answer) -> Verification:
        return verify(answer, self.first.decision, self.whole)


def groups_of(ranks: int) -> list[ParallelGroups]:
    if ranks == 1:
        return [ParallelGroups()]
    return [ParallelGroups(ep=comm) for comm in LockstepWorld(ranks).communicators()]


@pytest.fixture(scope="session")
def bench(checkpoints: dict[str, Path]) -> Callable[[Case], Bench]:
    return lambda case: Bench(case, checkpoints[case.checkpoint])
