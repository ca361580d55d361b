"""Loads that no placement can be made of are refused, never placed wrongly."""

from typing import Any

import numpy as np
import pytest
import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.placement.eplb import Topology, balanced_packing, plan, rebalance_experts


@pytest.mark.parametrize(
    "load, words",
    [
        (np.full((1, 4), 1e308), "from inf to inf, expected finite"),  # beyond float32, which loads are packed in
        (np.full((1, 4), 3e38), "adds up to 1.2.*scale the loads down"),  # infinity marks a pack that is full
        (np.array([["a"]]), "must be an array of numbers"),
        ([[1, 2], [3]], "must be an array of numbers"),
        (np.ones((1, 4), complex), "complex128"),
        (np.ones(4), r"shape \(4,\)"),
        (np.array([[1.0, -1.0, 1.0, 1.0]]), "values from -1"),
    ],
)
def test_a_load_that_cannot_be_packed_is_refused(load: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        rebalance_experts(load, 4, 2, 1, 2)


def test_packing_in_double_has_the_limit_of_doubles() -> None:
    with pytest.raises(ShapeError, match="nan"):
        balanced_packing(torch.tensor([[1.0, float("nan")]]), 1)
    with pytest.raises(ShapeError, match="adds up to inf"):
        balanced_packing(torch.full((1, 4), 1e308, dtype=torch.float64), 2)
    packs, _ = balanced_packing(torch.tensor([[1e30, 1e30, 1.0, 1.0]], dtype=torch.float64), 2)
    assert sorted(packs[0, :2].tolist()) == [0, 1]


def test_unsigned_counts_are_loads() -> None:
    placed, _, count = rebalance_experts(np.array([[9, 1, 1, 1]], np.uint64), 6, 1, 1, 2)
    assert count.tolist() == np.bincount(placed[0].numpy(), minlength=4)[None].tolist() and count[0, 0] == 3


def test_a_plan_refuses_what_is_no_array_and_no_seed() -> None:
    with pytest.raises(ShapeError, match="must be an array of numbers"):
        plan(np.array([["a"]]), Topology(1, slots=1))
    with pytest.raises(ConfigError, match="seed=-1 must be at least 0"):
        plan(np.ones((1, 4)), Topology(2, slots=2), seed=-1)
