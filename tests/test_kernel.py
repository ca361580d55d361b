"""The forward of a pair, step by step."""

import torch
from torch import Tensor

from moe_mk.comm.single import SingleRank
from moe_mk.experts.base import ExpertsContext
from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.transports import yield_points_of
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.quant.plain import FP32
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Recorder, Spans
from moe_mk.weights.expert_weights import MappedExpertWeights

CPU = torch.device("cpu")
NO_WEIGHTS = MappedExpertWeights((), FP32)
X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
ROUTING = Routing(
    torch.tensor([[1, 0], [-1, -1], [0, -1]], dtype=torch.int32), torch.tensor([[0.5, 0.25], [0.0, 0.0], [2.0, 0.0]])
)


def kernel(spans: Spans | None = None) -> FusedMoEKernel:
    place, spans = ExpertMap.linear(2, 1), spans or Spans()
    context = TransportContext(SingleRank(), place, place.tables(CPU), FP32, FP32, 2, 2, CPU, spans)
    experts = IdentityExperts(ExpertsContext(FP32, FP32, "silu", 2, 2, 2, CPU, spans))
    return FusedMoEKernel(PREPARE_FINALIZE["no_ep"](context), experts, spans)


def test_identity_experts_give_each_token_the_sum_of_its_weights() -> None:
    points: list[str] = []
    y_TH = wait(yield_points_of(kernel().steps(X, ROUTING, NO_WEIGHTS), points))
    assert y_TH.tolist() == [[0.75, 1.5], [0.0, 0.0], [10.0, 12.0]]
    assert points == ["dispatch", "combine"]


def test_an_input_is_never_written_to() -> None:
    before: list[Tensor] = [t.clone() for t in (X, ROUTING.ids_TK, ROUTING.weights_TK)]
    wait(kernel().steps(X, ROUTING, NO_WEIGHTS))
    assert all(torch.equal(a, b) for a, b in zip(before, (X, ROUTING.ids_TK, ROUTING.weights_TK), strict=True))


def test_each_stage_leaves_a_span_in_the_order_of_the_story() -> None:
    recorder = Recorder()
    wait(kernel(Spans(recorder)).steps(X, ROUTING, NO_WEIGHTS))
    assert [span.stage for span in sorted(recorder.spans, key=lambda span: span.start)] == [
        "quantise", "permute", "experts", "reduce",
    ]  # fmt: skip
