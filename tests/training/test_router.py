"""Routing while training, by hand: noisy gating, capacity, importance, its variation as a loss, and the bias update."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.lab.testing.on_ranks import run_ranks
from moe_mk.lab.training.router import (
    balance_loss,
    expert_capacity,
    importance,
    noisy_topk,
    route_with_capacity,
    updated_bias,
)
from moe_mk.rebalance.ledger import coefficient_of_variation
from moe_mk.router import gate_logits, grouped_topk, topk
from tests.support.draws import normal, seeded

X, GATE, NOISE = normal(64, 12), normal(16, 12, seed=1), normal(16, 12, seed=2)


@pytest.mark.row(11)
def test_probabilities_outside_the_top_k_are_exactly_zero() -> None:
    probabilities, weights, ids = noisy_topk(X, GATE, NOISE, 3, generator=seeded(5))
    chosen = torch.zeros(64, 16, dtype=torch.bool).scatter_(1, ids.long(), True)
    assert (probabilities[~chosen] == 0).all() and (probabilities[chosen] > 0).all()
    assert probabilities.sum(-1).tolist() == pytest.approx([1.0] * 64)
    assert torch.equal(probabilities.gather(1, ids.long()), weights)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


@pytest.mark.row(11)
def test_the_noise_weight_learns() -> None:
    gate, noise = GATE.clone().requires_grad_(), NOISE.clone().requires_grad_()
    probabilities, _, _ = noisy_topk(X, gate, noise, 3, generator=seeded(5))
    loss = (probabilities * normal(64, 16, seed=9)).sum()
    for gradient in torch.autograd.grad(loss, (gate, noise)):
        assert gradient.isfinite().all() and (gradient != 0).any()


@pytest.mark.row(11)
def test_noise_is_seeded_scales_with_softplus_and_leaves_evaluation_alone() -> None:
    one, two, other = (noisy_topk(X, GATE, NOISE, 3, generator=seeded(s))[0] for s in (5, 5, 6))
    assert torch.equal(one, two) and not torch.equal(one, other)
    # softplus(-1000) is 0: a noise weight that states so silences the noise.
    ones = torch.ones(64, 12, dtype=torch.float32)
    silent = noisy_topk(ones, GATE, torch.full_like(NOISE, -1e3), 3, generator=seeded(5))[0]
    assert torch.equal(silent, noisy_topk(ones, GATE, NOISE, 3, noise_std=0.0)[0])
    evaluated = [noisy_topk(X, GATE, NOISE, 3, noise_std=0.0, generator=seeded(s))[0] for s in (5, 6)]
    assert torch.equal(*evaluated)


@pytest.mark.row(11)
def test_noisy_logits_follow_the_formula_term_by_term() -> None:
    # With top_k = E nothing is masked and the probabilities are the softmax of all noisy logits.
    probabilities, _, _ = noisy_topk(X, GATE, NOISE, 16, noise_std=0.5, generator=seeded(5))
    deviation = (1 + (X.double() @ NOISE.double().T).exp()).log()
    noisy = X.double() @ GATE.double().T + 0.5 * normal(64, 16, seed=5).double() * deviation
    torch.testing.assert_close(probabilities.double(), noisy.softmax(-1), rtol=1e-4, atol=1e-7)


@pytest.mark.row(12)
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_without_noise_it_is_the_plain_softmax_router(top_k: int) -> None:
    _, weights, ids = noisy_topk(X, GATE, NOISE, top_k, noise_std=0.0)
    plain_weights, plain_ids = topk(gate_logits(X, GATE), top_k, "softmax", renormalize=True)
    assert torch.equal(ids, plain_ids)
    torch.testing.assert_close(weights, plain_weights, rtol=8 * 2**-23, atol=0)


def test_no_tokens_and_errors() -> None:
    probabilities, weights, ids = noisy_topk(X[:0], GATE, NOISE, 3)
    assert (probabilities.shape, weights.shape, ids.shape) == ((0, 16), (0, 3), (0, 3))
    with pytest.raises(ConfigError, match=r"top_k=17 .*E=16.*noise_std=-1.0 is negative"):
        noisy_topk(X, GATE, NOISE, 17, noise_std=-1.0)
    with pytest.raises(ShapeError, match=r"noise weight has E=15"):
        noisy_topk(X, GATE, NOISE[:15], 3)


@pytest.mark.row(16)
@pytest.mark.parametrize("tokens, top_k, experts, factor, expected", [
    (4096, 8, 256, 1.0, 128), (4096, 8, 256, 1.25, 160), (128, 8, 256, 1.0, 4), (7, 1, 4, 1.0, 2), (10, 1, 1, 1.1, 11),
    (0, 8, 256, 1.0, 0),
])  # fmt: skip
def test_capacity_table(tokens: int, top_k: int, experts: int, factor: float, expected: int) -> None:
    assert expert_capacity(tokens, top_k, experts, factor) == expected


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


@pytest.mark.row(14)
@pytest.mark.parametrize("shares, expected", [
    ((0.8, 0.15, 0.1, 0.05), 1.110), ((0.3, 0.2, 0.2, 0.2), 0.192), ((0.3, 0.3, 0.2, 0.2), 0.2),
    ((0.3, 0.25, 0.25, 0.2), 0.1414), ((0.25, 0.25, 0.25, 0.25), 0.0),
])  # fmt: skip
def test_variation_is_population_deviation_over_mean(shares: tuple[float, ...], expected: float) -> None:
    assert float(coefficient_of_variation(torch.tensor(shares))) == pytest.approx(expected, abs=6e-4)


@pytest.mark.row(15)
def test_loss_is_weight_times_variation_to_the_exponent() -> None:
    shares = torch.tensor([0.8, 0.15, 0.1, 0.05])
    assert float(balance_loss(shares, 0.01)) == pytest.approx(0.01232, abs=1e-5)
    assert float(balance_loss(torch.tensor([0.3, 0.2, 0.2, 0.2]), 0.01)) == pytest.approx(0.00037, abs=1e-5)
    assert float(balance_loss(shares, 0.01, exponent=1)) == pytest.approx(0.0111, abs=1e-5)


@pytest.mark.row(15)
@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.0])
def test_loss_has_the_gradient_it_states(exponent: float) -> None:
    shares = torch.tensor([0.8, 0.15, 0.1, 0.05, 0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: balance_loss(v, 0.7, exponent), (shares,))


def test_a_batch_without_tokens_is_even() -> None:
    nothing = importance(torch.empty(0, 4, dtype=torch.float32)).requires_grad_()
    assert float(coefficient_of_variation(nothing)) == 0
    loss = balance_loss(nothing, 1.0)
    (gradient,) = torch.autograd.grad(loss, nothing)
    assert float(loss) == 0 and (gradient == 0).all()


@pytest.mark.row(15)
def test_a_weight_of_zero_leaves_training_bit_identical() -> None:
    x, target = normal(64, 12), normal(64, 16, seed=3)

    def trained(weight: float | None) -> Tensor:
        gate = normal(16, 12, seed=1).requires_grad_()
        for _ in range(5):
            probabilities, _, _ = noisy_topk(x, gate, torch.zeros_like(gate), 4, noise_std=0.0)
            loss = (probabilities * target).sum()
            if weight is not None:
                loss = loss + balance_loss(importance(probabilities), weight)
            (gradient,) = torch.autograd.grad(loss, gate)
            gate = (gate - 0.1 * gradient).detach().requires_grad_()
        return gate

    assert torch.equal(trained(None), trained(0.0))
    assert not torch.equal(trained(None), trained(0.1))


NUM_RANKS = 4


def tokens_of(rank: int) -> slice:
    """Uneven shares of 30 tokens; the last rank has none."""
    bounds = (0, 13, 14, 30, 30)
    return slice(bounds[rank], bounds[rank + 1])


def importance_and_gradient(x: Tensor, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    def all_reduce_sum(values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    gate = normal(8, 12, seed=1).requires_grad_()
    mine = x[tokens_of(rank)] if world_size > 1 else x
    probabilities, _, _ = noisy_topk(mine, gate, torch.zeros_like(gate), 3, noise_std=0.0)
    total = importance(probabilities, all_reduce_sum if world_size > 1 else None)
    (gradient,) = torch.autograd.grad(balance_loss(total, 1.0), gate)
    return total.detach(), all_reduce_sum(gradient) if world_size > 1 else gradient


def of_rank(rank: int) -> tuple[Tensor, Tensor]:
    return importance_and_gradient(normal(30, 12), rank, NUM_RANKS)


@pytest.mark.slow
@pytest.mark.row(13)
def test_importance_over_four_ranks_equals_that_of_the_whole_batch() -> None:
    whole, whole_gradient = importance_and_gradient(normal(30, 12), 0, 1)
    for total, gradient in run_ranks(of_rank, NUM_RANKS):
        torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.row(68, 122)
def test_the_bias_steps_by_gamma_towards_the_mean_whatever_the_distance() -> None:
    # loads 91 3 4 30 2, mean 26: too much, too little twice, too much, too little; of 8 0 4 4 two are even
    bias, load = torch.tensor([1.0, 0.0, -0.5, 0.5, 0.5]), torch.tensor([91, 3, 4, 30, 2])
    assert updated_bias(bias, load, 0.25).tolist() == [0.75, 0.25, -0.25, 0.25, 0.75]
    assert updated_bias(bias[:4], torch.tensor([8, 0, 4, 4]), 0.125).tolist() == [0.875, 0.125, -0.5, 0.5]
    assert bias.tolist() == [1.0, 0.0, -0.5, 0.5, 0.5]
    with pytest.raises(ShapeError, match=r"load has E=3"):
        updated_bias(bias, load[:3], 0.1)
    assert torch.equal(updated_bias(bias, torch.tensor([7] * 5), 0.25), bias)


def trained_together(gamma: float) -> float:
    """Train a router and eight experts on a mixture of four kinds of tokens; busiest over mean load of the last steps.
    An expert that is chosen learns, becomes better and is chosen more often: the feedback that collapses routers."""
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32)

    gate_EH = (normal(8, 16) * 0.3).requires_grad_()
    experts_EHH = (normal(8, 16, 16) / 4).requires_grad_()
    teacher_XHH, centre_XH = normal(4, 16, 16) / 4, normal(4, 16) * 1.5
    adam, bias_E, load_E = torch.optim.Adam([gate_EH, experts_EHH], lr=1e-2), torch.zeros(8), torch.zeros(8)
    for step in range(150):
        kind_T = torch.randint(4, (256,), generator=draw)
        x_TH = centre_XH[kind_T] + normal(256, 16)
        weights_TK, ids_TK = grouped_topk(x_TH @ gate_EH.T, 2, 1, 1, "sigmoid", bias_E)
        each_TKH = torch.einsum("tkhj,tj->tkh", experts_EHH[ids_TK.long()], x_TH)
        wanted_TH = torch.einsum("thj,tj->th", teacher_XHH[kind_T], x_TH)
        loss = ((each_TKH * weights_TK[..., None]).sum(1) - wanted_TH).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        chosen_E = torch.bincount(ids_TK.flatten().long(), minlength=8)
        bias_E = updated_bias(bias_E, chosen_E, gamma * (1 - step / 150))
        load_E += chosen_E if step >= 120 else 0
    return float(load_E.max() / load_E.mean())


@pytest.mark.row("23b")
def test_a_router_trained_with_its_experts_collapses_unless_it_is_balanced() -> None:
    assert trained_together(0.0) > 2
    assert trained_together(0.05) < 1.2
