"""Capacity: the table, the spill, the drop counter, and that no expert ever overflows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.router.training import expert_capacity, route_with_capacity


@pytest.mark.row(16)
@pytest.mark.parametrize(
    "tokens, top_k, experts, factor, expected",
    [
        (4096, 8, 256, 1.0, 128),
        (4096, 8, 256, 1.25, 160),
        (128, 8, 256, 1.0, 4),
        (7, 1, 4, 1.0, 2),
        (10, 1, 1, 1.1, 11),
        (0, 8, 256, 1.0, 0),
    ],
)
def test_capacity_table(tokens: int, top_k: int, experts: int, factor: float, expected: int) -> None:
    assert expert_capacity(tokens, top_k, experts, factor) == expected


@pytest.mark.row(17)
def test_the_third_token_lands_on_its_second_choice() -> None:
    # All three want expert 0, which takes two.
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.5, 0.1, 0.4]])
    routing = route_with_capacity(scores, 1, 2)
    assert routing.ids_TK.tolist() == [[0], [0], [2]]
    assert routing.weights_TK.tolist() == [pytest.approx([0.7]), pytest.approx([0.6]), pytest.approx([0.4])]
    assert int(routing.num_dropped) == 0


@pytest.mark.row(18)
def test_a_token_whose_choices_are_all_full_passes_through_and_is_counted() -> None:
    # Capacity 1: t0 -> e0, t1 -> e1 (its second), t2 finds e0 and e1 full and may ask two: dropped.
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.5, 0.4, 0.1]])
    routing = route_with_capacity(scores, 1, 1, num_choices=2)
    assert routing.ids_TK.tolist() == [[0], [1], [-1]]
    assert int(routing.num_dropped) == 1
    # Experts that return their input: the mixture of the dropped token is exactly 0, its residual stays.
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    mixture = (routing.weights_TK.unsqueeze(-1) * x.unsqueeze(1)).sum(1)
    assert (mixture[2] == 0).all() and torch.equal((x + mixture)[2], x[2]) and (mixture[:2] != 0).all()


def loops(scores: list[list[float]], top_k: int, capacity: int, num_choices: int) -> list[list[int]]:
    """Plain Python: rounds of choices, tokens in order."""
    order = [[e for _, e in sorted((-score, e) for e, score in enumerate(token))] for token in scores]
    load = [0] * len(scores[0]) if scores else []
    accepted: list[list[int]] = [[] for _ in scores]
    for choice in range(num_choices):
        for t, wishes in enumerate(order):
            if len(accepted[t]) < top_k and load[wishes[choice]] < capacity:
                load[wishes[choice]] += 1
                accepted[t].append(wishes[choice])
    return [ids + [-1] * (top_k - len(ids)) for ids in accepted]


@pytest.mark.row(16, 17, 18)
@settings(max_examples=80, deadline=None)
@given(num_tokens=st.integers(0, 30), num_experts=st.integers(1, 9), data=st.data(), seed=st.integers(0, 2**31))
def test_no_expert_overflows_and_placements_equal_plain_loops(
    num_tokens: int, num_experts: int, data: st.DataObject, seed: int
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    num_choices = data.draw(st.integers(top_k, num_experts))
    factor = data.draw(st.sampled_from([0.3, 0.75, 1.0, 1.25, 2.0]))
    capacity = expert_capacity(num_tokens, top_k, num_experts, factor)
    draw = torch.randint(0, 8, (num_tokens, num_experts), generator=torch.Generator().manual_seed(seed))
    scores = draw.to(torch.float32) / 8
    routing = route_with_capacity(scores, top_k, capacity, num_choices)
    assert routing.ids_TK.tolist() == loops(scores.tolist(), top_k, capacity, num_choices)
    placed = routing.ids_TK[routing.ids_TK >= 0].long()
    assert num_tokens == 0 or torch.bincount(placed, minlength=num_experts).max() <= capacity
    assert int(routing.num_dropped) == num_tokens * top_k - placed.numel()
    assert (routing.weights_TK[routing.ids_TK < 0] == 0).all()


def test_errors_name_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"num_tokens=8, top_k=0, num_experts=4, capacity_factor=-1.0"):
        expert_capacity(8, 0, 4, -1.0)
    with pytest.raises(ConfigError, match=r"top_k=2 <= num_choices=5 <= E=4 does not hold.*capacity=-1 is negative"):
        route_with_capacity(torch.zeros(3, 4, dtype=torch.float32), 2, -1, 5)
    with pytest.raises(ShapeError, match=r"scores has dtype torch.int64"):
        route_with_capacity(torch.zeros(3, 4, dtype=torch.int64), 1, 1)
