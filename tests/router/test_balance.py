"""Importance, its variation as a loss, and the bias update, against figures worked by hand."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.lab.testing.on_ranks import run_ranks
from moe_mk.router import grouped_topk
from moe_mk.router.training import balance_loss, coefficient_of_variation, importance, noisy_topk, updated_bias
from tests.support.draws import normal


@pytest.mark.row(14)
@pytest.mark.parametrize(
    "shares, expected",
    [
        ((0.8, 0.15, 0.1, 0.05), 1.110),
        ((0.3, 0.2, 0.2, 0.2), 0.192),
        ((0.3, 0.3, 0.2, 0.2), 0.2),
        ((0.3, 0.25, 0.25, 0.2), 0.1414),
        ((0.25, 0.25, 0.25, 0.25), 0.0),
    ],
)
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


def test_loss_of_an_even_load_has_a_zero_gradient() -> None:
    even = torch.full((8,), 3.0, dtype=torch.float32, requires_grad=True)
    (gradient,) = torch.autograd.grad(balance_loss(even, 1.0), even)
    assert (gradient == 0).all()


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


@pytest.mark.thorough
@pytest.mark.row(13)
def test_importance_over_four_ranks_equals_that_of_the_whole_batch() -> None:
    whole, whole_gradient = importance_and_gradient(normal(30, 12), 0, 1)
    for total, gradient in run_ranks(of_rank, NUM_RANKS):
        torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-6)


def test_bias_moves_by_gamma_towards_the_mean_load_by_hand() -> None:
    # loads 8 0 4 4, mean 4: too much, too little, even, even
    bias, load = torch.tensor([0.5, 0.5, 0.5, 0.5]), torch.tensor([8, 0, 4, 4])
    assert updated_bias(bias, load, 0.125).tolist() == [0.375, 0.625, 0.5, 0.5]
    assert bias.tolist() == [0.5] * 4
    with pytest.raises(ShapeError, match=r"load has E=3"):
        updated_bias(bias, load[:3], 0.1)


@pytest.mark.row(68, 122)
def test_the_bias_steps_by_gamma_towards_the_mean_whatever_the_distance() -> None:
    bias, load = torch.tensor([0.5, 0.0, -0.5, 1.0]), torch.tensor([2, 3, 4, 91])
    assert torch.equal(updated_bias(bias, load, 0.25), torch.tensor([0.75, 0.25, -0.25, 0.75]))
    assert torch.equal(updated_bias(bias, torch.tensor([7, 7, 7, 7]), 0.25), bias)
    assert torch.equal(bias, torch.tensor([0.5, 0.0, -0.5, 1.0])), "the bias that was given is unchanged"


@pytest.mark.row(68, 122)
def test_bias_update_balances_a_skewed_router_without_a_loss() -> None:
    # Sixteen experts whose logits lean towards the first; the bias alone must even them out.
    logits = normal(4096, 16) + torch.linspace(1.5, -1.5, 16, dtype=torch.float32)
    bias = torch.zeros(16, dtype=torch.float32)

    def load() -> Tensor:
        _, ids = grouped_topk(logits, 4, 1, 1, "sigmoid", bias)
        return torch.bincount(ids.long().flatten(), minlength=16)

    assert load().max() / load().float().mean() > 1.5
    for _ in range(500):
        if load().max() / load().float().mean() < 1.1:
            break
        bias = updated_bias(bias, load(), 0.005)
    assert load().max() / load().float().mean() < 1.1


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
