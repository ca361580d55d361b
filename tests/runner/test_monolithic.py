"""Experts that route inside, and the naive path around them."""

from typing import Any

import pytest
import torch

from moe_mk.experts.monolithic import MonolithicKernel
from moe_mk.experts.reference import ReferenceMonolithic
from moe_mk.lab.testing.transports import run_together, virtual_groups
from tests.support.layers import HIDDEN, layer


@pytest.mark.row(83, 85, 90)
@pytest.mark.parametrize(
    ("counts", "more"),
    [
        ((4, 4), {}), ((0, 7), {"router_dtype": "model"}), ((0, 0), {}), ((1, 0), {}), ((0, 0, 7, 1), {}),
        ((5, 3), {"placement": (*range(7, -1, -1), 3, 3, 5, 6)}),
    ],
)  # fmt: skip
def test_routing_inside_gives_what_routing_outside_gives(counts: tuple[int, ...], more: dict[str, Any]) -> None:
    settings = {
        "num_shared_experts": 1, "scoring_func": "sigmoid", "has_correction_bias": True, "num_expert_group": 4,
        "topk_group": 2, "renormalize": True, "routed_scaling_factor": 2.5, **more,
    }  # fmt: skip
    dtype = torch.bfloat16 if "router_dtype" in more else torch.float32
    tokens = [torch.randn(count, HIDDEN).to(dtype) for count in counts]
    outputs, loads = [], []
    for experts, transport in (("reference", "all_gather"), ("reference_monolithic", "inside")):
        layers = [
            layer(8, 3, groups, dtype, experts=experts, prepare_finalize=transport, **settings)
            for groups in virtual_groups(len(counts))
        ]
        outputs.append(run_together(layers, tokens))
        loads.append([one.expert_load for one in layers])
        inside = [one.kernel for one in layers if isinstance(one.kernel, MonolithicKernel)]
        assert len(inside) == (len(counts) if transport == "inside" else 0)
        assert all(kernel.gathers for kernel in inside)
    for outside, routed_inside in zip(*outputs, strict=True):
        # Replicas change the summation order across ranks.
        torch.testing.assert_close(outside, routed_inside, rtol=0, atol=4e-6 if "placement" in more else 0)
    for ours, theirs in zip(*loads, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.row(90)
def test_one_rank_gathers_nothing_and_gives_the_same() -> None:
    x_TH = torch.randn(5, HIDDEN)
    inside = layer(8, 2, experts="reference_monolithic", num_shared_experts=1)
    assert isinstance(inside.kernel, MonolithicKernel) and not inside.kernel.gathers
    assert torch.equal(inside(x_TH), layer(8, 2, experts="reference", num_shared_experts=1)(x_TH))


@pytest.mark.row(90)
@pytest.mark.parametrize("dispatches_itself", [False, True])
def test_tokens_are_gathered_around_kernels_that_do_not_do_it(
    monkeypatch: pytest.MonkeyPatch, dispatches_itself: bool
) -> None:
    monkeypatch.setattr(ReferenceMonolithic, "dispatches_itself", dispatches_itself)
    for groups in virtual_groups(2):
        kernel = layer(8, 2, groups, experts="reference_monolithic").kernel
        assert isinstance(kernel, MonolithicKernel) and kernel.gathers is not dispatches_itself
