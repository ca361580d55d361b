"""What ran is reported by what ran: a backend that is swapped, or that quietly asks another one, shows."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk import DeepseekV3MoE, UnsupportedError
from moe_mk.comm.groups import ParallelGroups
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.experts.base import EXPERTS, ExpertsContext, FusedExperts
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.experts.torch_cpu import TorchCpuExperts
from moe_mk.flight import interleave
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.tokens import ExpertOutput, Tokens
from moe_mk.weights.expert_weights import Weights

HIDDEN = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("attested")
    write_checkpoint(path, CheckpointShape(num_experts=16, hidden_size=HIDDEN, intermediate_size=128, quant="bf16"))
    return path


def layer_of(folder: Path, **settings: object) -> DeepseekV3MoE:
    return DeepseekV3MoE.from_checkpoint(folder, layer=3, **settings)


def tokens(count: int = 6) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(0)).bfloat16()


class Lazy(FusedExperts):
    """Says it is itself, and lets the reference do the work."""

    traits = replace(TorchCpuExperts.traits, summary="a backend that falls back in silence")

    def __init__(self, context: ExpertsContext) -> None:
        super().__init__(context)
        self.other = ReferenceExperts(context)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        return self.other(tokens, weights)


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(EXPERTS._entries, "lazy", Lazy)
    return "lazy"


@pytest.mark.row("N4")
@pytest.mark.parametrize("experts", ["reference", "torch_cpu"])
def test_what_was_decided_is_what_ran(folder: Path, experts: str) -> None:
    layer = layer_of(folder, experts=experts)
    assert layer.report().stages == ()
    with pytest.raises(UnsupportedError, match="nothing has run yet"):
        layer.report().require_as_planned()
    for _ in range(3):
        layer(tokens())
    report = layer.report()
    report.require_as_planned()
    ran = {run.stage: run for run in report.stages}
    assert ran["dispatch"].executed == ran["combine"].executed == "no_ep"
    assert ran["experts"].executed == ran["experts"].planned == experts
    assert {(ran[stage].calls, ran[stage].num_bytes) for stage in ("dispatch", "combine")} == {(3, 3 * 6 * HIDDEN * 2)}
    assert report.num_calls == 3 and json.loads(json.dumps(report.as_dict()))["departures"] == []
    assert copy.deepcopy(layer).report().stages == (), "a copy has a ledger of its own"
    layer.reset_report()
    assert layer.report().stages == ()


def test_a_kernel_that_was_swapped_shows(folder: Path) -> None:
    layer = layer_of(folder, experts="torch_cpu")
    other = layer_of(folder, experts="reference")
    kernel = layer.kernel
    assert isinstance(kernel, FusedMoEKernel) and isinstance(other.kernel, FusedMoEKernel)
    swapped = replace(kernel, experts=ReferenceExperts(kernel.experts.context))
    experts = replace(layer.state.experts, kernel=swapped)
    layer.live.flip(replace(layer.state, experts=experts))
    layer(tokens())
    (line,) = [line for line in layer.report().departures if line.startswith("experts")]
    assert "torch_cpu was decided, reference ran" in line
    with pytest.raises(UnsupportedError, match=r"did not run as decided\n  - experts: torch_cpu was decided"):
        layer.report().require_as_planned()
    assert "! experts" in str(layer.report()) and "reference, not torch_cpu" in str(layer.report())


@pytest.mark.row("N4")
def test_a_backend_that_quietly_asks_another_shows(folder: Path, lazy: str) -> None:
    layer = layer_of(folder, experts=lazy)
    layer(tokens())
    executed = {run.executed for run in layer.report().stages if run.stage == "experts"}
    assert executed == {"lazy", "reference"}
    with pytest.raises(UnsupportedError, match=r"experts: lazy was decided, reference ran"):
        layer.report().require_as_planned()


@pytest.mark.row("N4")
def test_every_rank_attests_and_reports_what_it_sent(folder: Path) -> None:
    layers = [
        layer_of(folder, experts="torch_cpu", groups=ParallelGroups(ep=comm), prepare_finalize="all_to_all")
        for comm in LockstepWorld(2).communicators()
    ]
    interleave([layers[0].steps(tokens()), layers[1].steps(tokens(0))])
    for layer in layers:
        layer.report().require_as_planned()
        assert {run.executed for run in layer.report().stages if run.stage in ("dispatch", "combine")} == {"all_to_all"}
    assert layers[0].report().sent["dispatch"] > 0 == layers[1].report().sent.get("dispatch", 0)


def test_experts_that_route_inside_are_as_planned(folder: Path) -> None:
    layer = layer_of(folder, experts="reference_monolithic", activations="plain")
    layer(tokens())
    layer.report().require_as_planned()
