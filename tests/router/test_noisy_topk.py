"""Noisy top-k gating: what is masked, what learns, and what is deterministic."""

import pytest
import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.router import gate_logits, topk
from moe_mk.router.training import noisy_topk
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
