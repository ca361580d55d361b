"""Backends are changed while a layer serves: outputs stay right, no token is lost or counted twice, all ranks agree."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from moe_mk import ConfigError, DeepseekV3MoE
from moe_mk.errors import UnsupportedError
from moe_mk.flight import Flight, interleave
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.lab.testing.transports import run_together
from moe_mk.layer import hot_swap
from moe_mk.layer.hot_swap import SwapReport, swap_backends, swap_steps
from tests.layer import gloo_ranks
from tests.layer.conftest import Twin
from tests.support.layers import live_method
from tests.support.worlds import world_of

LIMIT, TOP_K = 1e-6, 4


def swapped(
    layers: list[DeepseekV3MoE], tokens: list[Tensor], limit: float = 1e-5, **settings: object
) -> list[SwapReport]:
    each = zip(layers, tokens, strict=True)
    return interleave([swap_steps(layer, x_TH, limit=limit, settings=settings) for layer, x_TH in each])


def check_serves(twin: Twin, layers: list[DeepseekV3MoE], tokens: list[Tensor]) -> None:
    """Outputs equal transformers, and each token is counted once."""
    before = sum(int(layer.expert_load.sum()) for layer in layers)
    for y_TH, x_TH in zip(run_together(layers, tokens), tokens, strict=True):
        torch.testing.assert_close(y_TH, twin.run(x_TH), atol=LIMIT, rtol=0)
    assert sum(int(layer.expert_load.sum()) for layer in layers) - before == TOP_K * sum(map(len, tokens))


@pytest.mark.row("N14")
def test_a_layer_goes_from_pair_to_pair_and_serves_with_each(twin: Twin) -> None:
    layers = twin.layers(4, prepare_finalize="all_to_all", experts="reference")
    tokens = [part.clone() for part in twin.x_TH[:9].split([0, 5, 1, 3])]
    check_serves(twin, layers, tokens)
    steps: list[dict[str, object]] = [
        {"prepare_finalize": "all_gather"}, {"experts": "torch_cpu"}, {"prepare_finalize": "all_to_all_p2p"},
        {"prepare_finalize": "auto", "experts": "auto"},
    ]  # fmt: skip
    for number, settings in enumerate(steps, 1):
        held = [layer.state.experts.weights for layer in layers]
        reports = swapped(layers, tokens, **settings)
        assert all(report.swapped and report.epoch == number and not report.reason for report in reports)
        assert len({(report.old, report.new) for report in reports}) == 1 and reports[0].old != reports[0].new
        assert [report.tokens for report in reports] == [0, 5, 1, 3]
        assert all(report.new == layer.decision.chosen.name for report, layer in zip(reports, layers, strict=True))
        if "experts" not in settings:
            both = zip(held, layers, strict=True)
            assert all(was is layer.state.experts.weights for was, layer in both), "one copy of the weights"
        check_serves(twin, layers, tokens)


@pytest.mark.row("N14")
@pytest.mark.parametrize("ep,tp", [(2, 2), (1, 2), (1, 1)])
def test_grids_with_slices_and_single_ranks_are_swapped_too(twin: Twin, ep: int, tp: int) -> None:
    layers = twin.layers(ep, tp, experts="reference")
    tokens = [twin.x_TH[: 3 + rank // tp] for rank in range(ep * tp)]
    assert all(report.swapped for report in swapped(layers, tokens, experts="torch_cpu"))
    for y_TH, x_TH in zip(run_together(layers, tokens), tokens, strict=True):
        torch.testing.assert_close(y_TH, twin.run(x_TH), atol=LIMIT, rtol=0)


@pytest.mark.row("N14")
def test_a_call_that_is_open_ends_with_the_pair_that_it_began_with(twin: Twin) -> None:
    layers = twin.layers(2, prepare_finalize="all_to_all", experts="reference")
    tokens = [twin.x_TH[:4], twin.x_TH[4:6]]
    run_together(layers, tokens)
    started = [int(layer.expert_load.sum()) for layer in layers]

    def across(layer: DeepseekV3MoE, x_TH: Tensor) -> Flight[Tensor]:
        open_call = layer.steps(x_TH)
        yield next(open_call)
        report = yield from swap_steps(layer, x_TH, limit=1e-5, settings={"prepare_finalize": "all_gather"})
        assert report.swapped and layer.kernel.prepare_finalize.traits.gathers
        return (yield from open_call)

    for y_TH, x_TH in zip(interleave(list(map(across, layers, tokens))), tokens, strict=True):
        torch.testing.assert_close(y_TH, twin.run(x_TH), atol=LIMIT, rtol=0)
    assert [int(layer.expert_load.sum()) for layer in layers] == [
        was + TOP_K * len(x_TH) for was, x_TH in zip(started, tokens, strict=True)
    ]


@pytest.mark.row("N14")
@pytest.mark.parametrize(
    ("ep", "tp", "failed", "error"),
    [
        (4, 1, 2, UnsupportedError("no room on this rank", ["free some"])), (2, 2, 1, MemoryError("no room")),
        (1, 2, 0, RuntimeError("DefaultCPUAllocator: no room")), (2, 1, 0, OSError("no room")),
    ],
)  # fmt: skip
def test_where_one_rank_cannot_build_the_pair_all_keep_the_old_one(
    twin: Twin, ep: int, tp: int, failed: int, error: Exception
) -> None:
    layers = twin.layers(ep, tp, prepare_finalize="all_to_all" if ep > 1 else "auto", experts="reference")
    tokens, old = [twin.x_TH[:2]] * (ep * tp), layers[0].decision.chosen.name

    with live_method(layers[failed], "stage", Mock(side_effect=error)):
        reports = swapped(layers, tokens, experts="torch_cpu")
    assert {report.failed_ranks for report in reports} == {(failed // tp,)}
    assert not any(report.swapped for report in reports)
    assert [type(error).__name__ in report.reason and "no room" in report.reason for report in reports] == [
        rank == failed for rank in range(ep * tp)
    ]
    assert all(layer.decision.chosen.name == old and layer.epoch == 0 for layer in layers)
    for y_TH, x_TH in zip(run_together(layers, tokens), tokens, strict=True):
        torch.testing.assert_close(y_TH, twin.run(x_TH), atol=LIMIT, rtol=0)


@pytest.mark.row("N14")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_exception_while_pairs_are_compared_leaves_the_old_one_and_what_listens_and_counts(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], call: int
) -> None:
    # The first call is that of the old pair, the second one of the new pair, the third the switch itself.
    (layer,) = twin.layers(1, experts="reference")
    heard: list[object] = []
    layer.on_routing = listener = heard.append
    layer(twin.x_TH[:3])
    counted, calls = (layer.expert_load.clone(), layer.routing.tokens), 0

    def failing(run: Callable[..., Any], *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error("a handler")
        return run(*given)

    monkeypatch.setattr(hot_swap, "steps", partial(failing, hot_swap.steps))
    monkeypatch.setattr(layer, "use", partial(failing, layer.use))
    with pytest.raises(error, match="a handler"):
        swap_backends(layer, twin.x_TH[:2], experts="torch_cpu")
    monkeypatch.undo()
    assert layer.decision.chosen.experts == "reference" and layer.epoch == 0 and layer.on_routing == listener
    assert torch.equal(layer.expert_load, counted[0]) and layer.routing.tokens == counted[1] == 3
    check_serves(twin, [layer], [twin.x_TH[:5]])
    assert len(heard) == 2 and layer.routing.tokens == 8


@pytest.mark.row("N14")
def test_a_limit_of_zero_takes_equal_bits_and_nothing_else(twin: Twin) -> None:
    (layer,) = twin.layers(1, experts="reference")
    layer(twin.x_TH[:3])
    same = swap_backends(layer, twin.x_TH, limit=0.0, experts="reference")
    assert same.swapped and same.error == 0.0 and layer.routing.tokens == 3
    other = swap_backends(layer, twin.x_TH, limit=0.0, experts="torch_cpu")
    assert other.swapped == (other.error == 0.0) and layer.routing.tokens == 3


@pytest.mark.row("N14")
@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ([3.0, 4.0], [3.0, 4.5], 0.1), ([3.0, 4.0], [3.0, 4.0], 0.0), ([0.0], [0.0], 0.0), ([], [], 0.0),
        ([math.nan, 4.0], [math.nan, 4.0], 0.0), ([math.inf, 4.0], [math.inf, 3.0], 0.25),
        ([3.0, 4.0], [3.0, math.nan], math.nan), ([3.0, 4.0], [3.0, math.inf], math.inf),
        ([math.nan, 4.0], [3.0, 4.0], math.nan), ([math.inf, 4.0], [-math.inf, 4.0], math.inf),
    ],
)  # fmt: skip
def test_the_error_between_two_pairs(before: list[float], after: list[float], error: float) -> None:
    found = hot_swap._relative_error(torch.tensor([before]), torch.tensor([after]))
    assert found == pytest.approx(error, nan_ok=True)


@dataclass
class Damaged:
    experts: object
    weights: object
    number: float

    def __call__(self, x_TH: Tensor) -> Tensor:
        return torch.full_like(x_TH, self.number)


@pytest.mark.row("N14")
@pytest.mark.parametrize("number", [0.0, math.nan, math.inf, -math.inf])
def test_where_outputs_differ_on_one_rank_all_go_back(twin: Twin, number: float) -> None:
    layers = twin.layers(4, prepare_finalize="all_to_all", experts="reference")
    tokens = [twin.x_TH[:3], twin.x_TH[3:4], twin.x_TH[:0], twin.x_TH[4:6]]
    first = run_together(layers, tokens)
    heard: list[object] = []
    layers[0].on_routing = heard.append
    loads = [layer.expert_load.clone() for layer in layers]
    # Shared experts are local: with those of rank 1 damaged in the new state, rank 1 alone gets wrong outputs.
    stage = layers[1].live.stage

    def damaged(*arguments: object, **settings: object) -> object:
        staged = stage(*arguments, **settings)  # type: ignore[arg-type]
        assert staged.backends.shared is not None
        wrong = Damaged(staged.backends.shared.experts, staged.backends.shared.weights, number)
        return replace(staged, backends=replace(staged.backends, shared=wrong))  # type: ignore[arg-type]

    with live_method(layers[1], "stage", damaged):
        reports = swapped(layers, tokens, prepare_finalize="all_gather")
    assert [report.failed_ranks for report in reports] == [(1,)] * 4
    assert not reports[1].error <= 1e-3 and "outputs differ by" in reports[1].reason and reports[0].error < 1e-5
    assert all(layer.decision.chosen.prepare_finalize == "all_to_all" and layer.epoch == 0 for layer in layers)
    assert [layer.routing.tokens for layer in layers] == [len(x_TH) for x_TH in tokens]
    assert heard == [] and all(torch.equal(was, layer.expert_load) for was, layer in zip(loads, layers, strict=True))
    assert all(torch.equal(y_TH, was) for y_TH, was in zip(run_together(layers, tokens), first, strict=True))
    assert len(heard) == 1


@pytest.mark.row("N14")
def test_settings_that_nothing_serves_or_that_are_no_settings_are_refused_and_the_layer_serves_on(twin: Twin) -> None:
    (layer,) = twin.layers(1)
    for settings, words in (({"experts": "triton"}, "triton"), ({"top_k": 2}, "no settings of kernel")):
        report = swap_backends(layer, twin.x_TH[:2], **settings)
        assert report.failed_ranks == (0,) and words in report.reason and report.new == ""
    torch.testing.assert_close(layer(twin.x_TH), twin.y_TH, atol=LIMIT, rtol=0)
    with pytest.raises(ConfigError, match="num_experts are no settings of kernel"):
        layer.live.stage(layer.expert_map, settings={"num_experts": 4})


world = world_of(4)


@pytest.mark.row("N14")
@pytest.mark.slow
def test_four_processes_serve_across_swaps(world: RankWorld, twin: Twin) -> None:
    tokens = [twin.x_TH[:3], twin.x_TH[3:3], twin.x_TH[3:8], twin.x_TH[8:9]]
    settings = ["all_gather", "one_sided", "all_to_all"]
    ranks = world.call(gloo_ranks.swap_and_serve, str(twin.path), tokens, settings)
    for rank, answer in enumerate(ranks):
        assert answer["transports"] == settings, answer["reasons"]
        assert len(answer["outputs"]) == len(settings) + 1
        for y_TH in answer["outputs"]:
            torch.testing.assert_close(y_TH, twin.run(tokens[rank]), atol=LIMIT, rtol=0)
        assert answer["load"] == (len(settings) + 1) * TOP_K * len(tokens[rank])
