"""Every fault is found, whatever the format, and faults that would change nothing are refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch

from moe_mk.errors import ConfigError
from moe_mk.lab.verify import Fault, faulty_router, faulty_weights
from moe_mk.weights import LayerWeights
from moe_mk.weights.expert_weights import SlotBiases
from tests.verify.conftest import Bench, Case, inputs

CASES = [
    Case("fp8", activations="plain"), Case("fp8", activations="checkpoint"),
    Case("fp8", torch.float32, activations="plain"), Case("bf16"), Case("bf16", torch.float32),
    Case("tiny", activations="plain"), Case("fp8", activations="plain", ranks=2),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fault", get_args(Fault))
def test_every_fault_is_found(bench: Callable[[Case], Bench], case: Case, fault: str) -> None:
    ours = bench(case)
    x_TH = inputs(case, ours.hidden_size, 0)
    assert ours.judge(ours.answer(x_TH)).passed
    if fault == "drop-scale" and case.checkpoint == "bf16":
        with pytest.raises(ConfigError, match="drop-scale needs experts with scales, these are bf16"):
            faulty_weights(ours.first.weights, fault)
        return
    for layer in ours.layers:
        layer.take(faulty_weights(layer.weights, fault))
        layer.router = faulty_router(layer.router, fault)
    judged = ours.judge(ours.answer(x_TH))
    assert not judged.passed and judged.error > 5 * judged.limit
    assert judged.routing_equal == judged.num_tokens


def test_faults_leave_what_they_are_given_as_it_was(bench: Callable[[Case], Bench]) -> None:
    ours = bench(Case("fp8", activations="plain"))
    x_TH, weights = inputs(ours.case, 256, 0), ours.first.weights
    before = ours.answer(x_TH).y_TH
    for fault in get_args(Fault):
        faulty_weights(weights, fault)
        faulty_router(ours.first.router, fault)
    ours.first.take(weights)
    assert torch.equal(ours.answer(x_TH).y_TH, before)


def test_each_fault_changes_what_it_states(bench: Callable[[Case], Bench]) -> None:
    ours = bench(Case("fp8", activations="plain"))
    weights: LayerWeights = ours.whole
    slot = weights.experts.slots[0]
    swapped, dropped = (faulty_weights(weights, name).experts.slots[0] for name in ("swap-halves", "drop-scale"))
    same = lambda one, other: torch.equal(one.dequantize(torch.float32), other.dequantize(torch.float32))  # noqa: E731
    assert (
        same(swapped.gate_IH, slot.up_IH) and same(swapped.up_IH, slot.gate_IH) and same(swapped.down_HI, slot.down_HI)
    )
    assert dropped.up_IH.scales is not None and bool((dropped.up_IH.scales == 1).all())
    assert torch.equal(dropped.up_IH.values.view(torch.uint8), slot.up_IH.values.view(torch.uint8))
    assert faulty_weights(weights, "double-scale") is weights
    own = SlotBiases(*(torch.full((3,), each) for each in (1.0, 2.0, 3.0)))
    biased = replace(weights, experts=replace(weights.experts, slots=(replace(slot, biases=own),)))
    swapped, dropped = (faulty_weights(biased, name).experts.slots[0] for name in ("swap-halves", "drop-scale"))
    values = [[float(part[0]) for part in one.biases.tensors] for one in (swapped, dropped)]
    assert values == [[2.0, 1.0, 3.0], [1.0, 2.0, 3.0]]
    router = ours.first.router
    assert faulty_router(router, "double-scale").routed_scaling_factor == 2.5**2
    assert faulty_router(router, "swap-halves") is router
