"""Evenness among experts and among ranks."""

import numpy as np
import pytest

from moe_mk import ExpertMap, ShapeError
from moe_mk.rebalance import Ledger, measure_balance


@pytest.mark.row(10, 14)
def test_both_levels_by_hand() -> None:
    # Loads 6 2 2 2: mean 3, population deviation sqrt((9 + 1 + 1 + 1) / 4) = sqrt(3), CV .577. Linear on two ranks:
    # 8 and 4, max over mean 8 / 6. With expert 0 shared out .5 and .5: 3 + 2 + 1 and 2 + 3 + 1, even.
    load_XE = np.array([[6.0, 2.0, 2.0, 2.0]])
    linear = measure_balance(load_XE, Ledger.of([ExpertMap.linear(4, 2)], 1, None)).as_dict()
    assert linear["balance.expert_cv"] == pytest.approx(3**0.5 / 3)
    assert linear["balance.rank_max_over_mean"] == pytest.approx(8 / 6) == linear["balance.step_over_ideal"]
    shared = ExpertMap(((0, 1, 3), (2, 0, 3)), 4, (0.5, 1.0, 0.5, 1.0, 0.5, 0.5))
    even = measure_balance(load_XE, Ledger.of([shared], 1, None))
    assert even.rank_max_over_mean_X == pytest.approx([1.0]) and even.expert_cv_X == pytest.approx([3**0.5 / 3])


def test_no_load_is_even_and_layers_add_up_to_a_step() -> None:
    ledger = Ledger.of([ExpertMap.linear(2, 2)] * 2, 1, None)
    judged = measure_balance(np.array([[0.0, 0.0], [3.0, 1.0]]), ledger)
    assert judged.rank_max_over_mean_X.tolist() == [1.0, 1.5] and judged.step_over_ideal == 1.5
    assert measure_balance(np.zeros((2, 2)), ledger).step_over_ideal == 1.0


def test_the_flat_numbers_are_means_and_worst_ones_of_layers() -> None:
    # Layer 0 even, layer 1 with 3 tokens and 1: a variation of 1 / 2, and 3 over a mean of 2.
    judged = measure_balance(np.array([[2.0, 2.0], [3.0, 1.0]]), Ledger.of([ExpertMap.linear(2, 2)] * 2, 1, None))
    assert judged.as_dict() == {
        "balance.expert_cv": 0.25, "balance.expert_cv_worst": 0.5, "balance.rank_max_over_mean": 1.25,
        "balance.rank_max_over_mean_worst": 1.5, "balance.step_over_ideal": 1.25,
    }  # fmt: skip


def test_a_load_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"load has shape \(1, 3\), the placement has \[layers, experts\] = \(1, 2\)"):
        measure_balance(np.ones((1, 3)), Ledger.of([ExpertMap.linear(2, 2)], 1, None))
