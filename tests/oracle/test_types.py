"""Every type of experts through both phases of its oracle, and what happens where nothing reads it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_mk import MoELayer, Problem, oracle
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.config import MoEConfig, QuantConfig
from moe_mk.experts import EXPERTS
from moe_mk.experts.base import FusedExperts
from moe_mk.experts.held import HeldExperts
from moe_mk.experts.torch_cpu import TorchCpuExperts
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.verify import Answer, verify
from moe_mk.oracle import Parts, formats
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.weights import SafetensorsSource, Weights, load_layer
from moe_mk.weights.scan import Progress
from tests.support import problems

SERVED = {
    "unquantized": ("bf16", "fp16", "fp32"), "fp8": ("fp8_block", "fp8_channel", "fp8_tensor"), "mxfp8": ("mxfp8",),
    "int8": ("int8", "int8_block"), "mxfp4": ("mxfp4",), "nvfp4": ("nvfp4",), "int_wna16": GROUPED, "gguf": GGUF,
}  # fmt: skip


class FP8Only(TorchCpuExperts):
    """Reads FP8 blocks and nothing else, as kernels for sm_90 do."""

    traits = replace(TorchCpuExperts.traits, weights=frozenset({"fp8_block"}), bandwidth=0.9)

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        assert weights.scheme.name == "fp8_128x128_ue8m0", weights.scheme.name
        return super().relayout(weights, on_progress)


class PlainOnly(TorchCpuExperts):
    traits = replace(TorchCpuExperts.traits, weights=frozenset({"plain"}), bandwidth=0.9)


def problem(quant: str, **settings: object) -> Problem:
    return problems.problem(quant={"weights": quant}, **{"ep": 4, **settings})


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[FusedExperts]], None]:
    """Leave one backend and the reference."""

    def leave(cls: type[FusedExperts]) -> None:
        monkeypatch.setattr(EXPERTS, "_entries", {"reference": EXPERTS["reference"], "mine": cls})
        monkeypatch.setattr(cls, "__module__", "moe_mk.stands_for_one_of_this_package")

    return leave


@pytest.mark.row(88, 89)
@pytest.mark.parametrize(("name", "quant"), [(name, quant) for name, kinds in SERVED.items() for quant in kinds])
def test_both_phases_by_their_known_names(name: str, quant: str) -> None:
    assert set(SERVED[name]) == oracle.ORACLES[name].stored
    select, make = (getattr(formats, text) for text in (f"select_{name}_moe_backend", f"make_{name}_moe_kernel"))
    decision, comm = select(problem(quant)), LockstepWorld(4).communicators()[0]
    assert decision == oracle.select(problem(quant)) and decision.oracle == name and decision.effect is None
    assert decision.problem.weights == QuantConfig(weights=quant).weight_scheme
    kernel = make(decision, Parts(ExpertMap.linear(256, 4), torch.device("cpu"), comm))
    assert isinstance(kernel, FusedMoEKernel)
    assert type(kernel.experts) is EXPERTS[decision.chosen.experts]
    assert type(kernel.prepare_finalize) is PREPARE_FINALIZE[decision.chosen.prepare_finalize]


@pytest.mark.row(103)
def test_four_bits_where_nothing_reads_them_are_held_in_fp8_and_stated_so(
    only: Callable[[type[FusedExperts]], None],
) -> None:
    alone = oracle.select(problem("mxfp4"))
    only(FP8Only)
    decision = oracle.select(problem("mxfp4"))
    assert decision.notes()["held"] != alone.notes()["held"], "ranks of which one holds another form do not agree"
    assert decision.chosen.experts == "mine" and decision.problem.weights.name == "fp8_128x128_ue8m0"
    assert decision.effect is not None and decision.effect.rounding == 0
    # 1 B and a scale for 16,384, against half a byte and a scale for 32.
    assert decision.effect.memory == pytest.approx((1 + 1 / 16384) / 0.53125, rel=1e-6)
    reported = str(decision)
    assert "mxfp4 weights are held as fp8_128x128_ue8m0: 1.88x the memory; no rounding error is added" in reported
    assert "mine reads fp8_block weights, the experts are mxfp4; only the reference backend reads it" in reported
    assert decision.as_dict()["fallback"]["held"] == "fp8_128x128_ue8m0"
    assert decision.as_dict()["passed_over"][0]["form"] == "mxfp4"


@pytest.mark.row(103)
def test_the_chain_goes_on_to_the_dtype_of_the_layer(only: Callable[[type[FusedExperts]], None]) -> None:
    only(PlainOnly)
    decision = oracle.select(problem("nvfp4", ep=8))
    assert decision.problem.weights.name == "bf16"
    assert [each.format for each in decision.passed_over] == ["nvfp4", "fp8_128x128_ue8m0"]
    assert decision.effect is not None and 0 < decision.effect.rounding < 0.003 and decision.effect.memory > 3.5


@pytest.mark.parametrize("settings", [{"fallback": False}, {"activations": "checkpoint"}])
def test_a_fallback_can_be_forbidden(only: Callable[[type[FusedExperts]], None], settings: dict[str, object]) -> None:
    only(FP8Only)
    decision = oracle.select(problem("nvfp4", **settings))
    assert decision.chosen.experts == "reference" and decision.effect is None and not decision.passed_over
    assert decision.compute.name == "nvfp4_1x16"


@pytest.mark.row(103)
@pytest.mark.parametrize("quant", ["mxfp4", "nvfp4", "int8", "mxfp8"])
@torch.no_grad()
def test_a_layer_with_requantised_weights_is_right_and_reloads_from_the_stored_ones(
    quant: str, only: Callable[[type[FusedExperts]], None], tmp_path: Path
) -> None:
    only(FP8Only)
    shape = CheckpointShape(4, 128, 128, layers=(1,), top_k=2, num_groups=2, top_k_groups=1, quant=quant)
    write_checkpoint(tmp_path, shape, threads=1)
    layer = MoELayer(MoEConfig.from_hf(tmp_path), dtype=torch.bfloat16).load_from_safetensors(tmp_path, 1)
    x = torch.randn((7, 128), generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16()
    y = layer(x)
    assert isinstance(layer.kernel, FusedMoEKernel) and isinstance(layer.kernel.experts, HeldExperts)
    assert layer.report().departures == ()
    assert layer.weights.experts.scheme.name.startswith(quant), "what was stored stays what it was"
    weights = load_layer(SafetensorsSource(tmp_path), 1, layer.spec, owned=range(4))
    judged = verify(Answer(x, y, layer.route(x).ids_TK), layer.decision, weights)
    assert judged.passed, judged
    layer.take(layer.weights)
    assert torch.equal(layer(x), y), "requantising again starts from the stored weights"
