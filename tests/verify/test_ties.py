"""Which choices of experts are right, where scores are equal within rounding, and which are not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.config.router import RouterConfig
from moe_mk.lab.verify.compare import could_choose, tie_tolerance, verify
from tests.verify.conftest import Bench, Case

TOLERANCE = 0.01


def choose(ids: list[int], scores: list[float], **router: int | bool) -> bool:
    settings = RouterConfig.model_validate({"top_k": len(ids), **router})
    return could_choose(np.array(ids), np.array(scores, dtype=np.float32), settings, TOLERANCE)


def groups(count: int, kept: int, **others: bool) -> dict[str, int]:
    return {"num_expert_group": count, "topk_group": kept, **others}


@pytest.mark.parametrize("scores,settings,right,wrong", [
    # Each score may be off by 0.01, so two of them by 0.02 against each other.
    ([0.9, 0.50, 0.51, 0.1], {}, [[0, 1], [0, 2]], [[1, 2]]), ([0.9, 0.50, 0.519, 0.1], {}, [[0, 1]], []),
    ([0.9, 0.50, 0.521, 0.1], {}, [], [[0, 1]]), ([0.5, 0.5, 0.5], {}, [], [[0, -1], [1, 1]]),
    # Groups (0 1) and (2 3) are both kept; only 1 and 3 are near each other, the worth of the groups is not.
    ([0.9, 0.50, 0.8, 0.505, 0.0, 0.0], groups(3, 2), [[0, 2, 1], [0, 2, 3]], [[0, 2, 4]]),
    # Both groups are worth 0.9 and both are kept; 1 and 3 are far apart.
    ([0.9, 0.1, 0.9, 0.5], groups(2, 2), [[0, 2]], [[0, 1]]),
    # Worth by the best expert: 0.9, 0.605, 0.600. Group 1 or group 2 may be kept with group 0.
    ([0.9, 0.2, 0.605, 0.3, 0.600, 0.1], groups(3, 2), [[0, 2], [0, 4]], [[2, 4]]),
    # Worth by two: 1.00 and 0.97. Apart by 0.03: a tie for sums of two, none for the best alone.
    ([0.50, 0.50, 0.50, 0.47], groups(2, 1, has_correction_bias=True), [[2, 3]], []),
    ([0.50, 0.50, 0.47, 0.47], groups(2, 1, has_correction_bias=False), [], [[2, 3]]),
])  # fmt: skip
def test_what_is_as_good_within_the_tolerance_may_be_chosen(
    scores: list[float], settings: dict[str, Any], right: list[list[int]], wrong: list[list[int]]
) -> None:
    assert [choose(ids, scores, **settings) for ids in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)


@given(st.lists(st.integers(0, 40), min_size=8, max_size=8), st.integers(0, 2**16))
def test_a_choice_is_right_if_small_errors_lead_to_it(scores: list[int], seed: int) -> None:
    # Property: route with noise of at most the tolerance; whatever is chosen could be chosen.
    exact = (np.array(scores) / 100).astype(np.float32)
    noisy = exact + np.random.default_rng(seed).uniform(-TOLERANCE, TOLERANCE, 8)
    groups = noisy.reshape(4, 2).max(axis=1)
    kept = np.argsort(-groups, kind="stable")[:2]
    masked = np.where(np.isin(np.arange(8) // 2, kept), noisy, -np.inf)
    chosen = np.argsort(-masked, kind="stable")[:3]
    router = RouterConfig(top_k=3, num_expert_group=4, topk_group=2)
    assert could_choose(chosen, exact, router, TOLERANCE + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_gate_rows_are_ties_and_others_are_not(bench: Callable[[Case], Bench], dtype: torch.dtype) -> None:
    # Expert 1 gets the gate row and the bias of expert 0, so that exactly one of them may be swapped for the other.
    case = Case("bf16", dtype, experts="reference")
    ours = bench(case)
    whole, layer = ours.whole, ours.first
    assert whole.bias_E is not None
    whole.gate_EH.data = whole.gate_EH.clone()
    whole.bias_E.data = whole.bias_E.clone()
    whole.gate_EH[1], whole.bias_E[1] = whole.gate_EH[0], whole.bias_E[0]
    layer.take(whole)
    answer = ours.answer(torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).to(dtype))
    ids = answer.ids_TK.clone()
    swapped = [t for t, row in enumerate(ids.tolist()) if (0 in row) != (1 in row)]
    assert swapped and ours.judge(answer).passed
    for t in swapped:
        ids[t] = torch.where(ids[t] <= 1, 1 - ids[t], ids[t])
    judged = ours.judge(answer._replace(ids_TK=ids))
    assert judged.routing_ties == len(swapped) and judged.routing_equal == 64 - len(swapped)
    other = layer.config.with_(routed_scaling_factor=5.0)  # of a reference with other settings, ties are its own too
    assert not verify(answer._replace(ids_TK=ids), layer.decision, whole, config=other).passed
    elsewhere = answer.ids_TK.clone()
    elsewhere[0] = torch.tensor(sorted(set(range(16)) - set(elsewhere[0].tolist()))[:4], dtype=elsewhere.dtype)
    judged = ours.judge(answer._replace(ids_TK=elsewhere))
    assert judged.routing_ties == 0 and judged.routing_equal == 63 and not judged.passed


def test_a_router_in_bf16_ties_often_and_is_still_judged(bench: Callable[[Case], Bench]) -> None:
    ours = bench(Case("bf16", router_dtype="model", experts="reference"))
    judged = ours.judge(ours.answer(torch.randn(512, 256, generator=torch.Generator().manual_seed(3)).bfloat16()[:64]))
    assert judged.passed
    assert tie_tolerance(ours.first.decision) == torch.finfo(torch.bfloat16).eps
    assert tie_tolerance(bench(Case("bf16")).first.decision) == 1e-5


def test_a_bf16_router_judged_as_an_f32_one_is_found_out(bench: Callable[[Case], Bench]) -> None:
    coarse, fine = (bench(Case("bf16", router_dtype=name, experts="reference")) for name in ("model", "float32"))
    x_TH = torch.randn(1024, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert any(not fine.judge(coarse.answer(x_TH[start : start + 64])).passed for start in range(0, 1024, 64))
