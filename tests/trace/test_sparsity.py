"""Activations close to zero, counted by hand."""

import math

import pytest
import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.lab.trace.sparsity import NearZero, count_near_zero


@pytest.mark.row(4)
def test_a_tensor_by_hand() -> None:
    values = torch.tensor([[0.0, -0.01, 0.5], [0.011, math.nan, -math.inf]])
    found = count_near_zero(values, 0.01)
    assert found == NearZero(2, 6, 0.01) and found.share == 2 / 6
    assert str(found) == "2 of 6 (33.3 %) at most 0.01"
    assert found + count_near_zero(values[:1], 0.01) == NearZero(4, 9, 0.01)
    assert count_near_zero(torch.zeros(0), 0.01).share == 0.0
    with pytest.raises(ConfigError, match="do not add up"):
        found + count_near_zero(values, 0.02)
    with pytest.raises(ConfigError, match="threshold=-1"):
        count_near_zero(values, -1.0)
    with pytest.raises(ShapeError, match="values"):
        count_near_zero(torch.zeros(2, dtype=torch.int32), 0.0)
