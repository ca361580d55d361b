"""The public grouped top-k: any batch, stride, host default, device and compiler; gradients."""

import pytest
import torch

from moe_mk.router import grouped_topk
from tests.support.draws import normal


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_a_token_is_routed_alike_alone_and_in_any_batch(scoring: str) -> None:
    logits, bias = normal(75, 42), normal(42, seed=5) / 9
    weights, ids = grouped_topk(logits, 5, 6, 3, scoring, bias, True, 2.5)
    for t in range(75):
        alone_weights, alone_ids = grouped_topk(logits[t : t + 1], 5, 6, 3, scoring, bias, True, 2.5)
        assert torch.equal(alone_ids[0], ids[t]) and torch.equal(alone_weights[0], weights[t])


def test_no_tokens_give_an_empty_routing() -> None:
    weights, ids = grouped_topk(torch.empty(0, 16, dtype=torch.float32), 4, 4, 2, e_score_correction_bias=normal(16))
    assert weights.shape == ids.shape == (0, 4)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


def test_strided_logits_route_like_their_copy_and_nothing_is_mutated() -> None:
    wide, bias = normal(32, 64), normal(32, seed=5)
    logits, before = wide.T[::2, :].T[:, :32].T, wide.clone()
    assert logits.shape == (32, 32) and not logits.is_contiguous()
    for scoring in ("sigmoid", "softmax"):
        ours, theirs = (grouped_topk(x, 6, 8, 3, scoring, bias) for x in (logits, logits.contiguous()))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert torch.equal(wide, before) and torch.equal(bias, normal(32, seed=5))


def test_host_defaults_for_dtype_and_device_change_nothing() -> None:
    logits, bias = normal(32, 32), normal(32, seed=5)
    expected = grouped_topk(logits, 6, 8, 3, "sigmoid", bias, True, 2.5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            ours = grouped_topk(logits, 6, 8, 3, "sigmoid", bias, True, 2.5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


def test_meta_logits_give_a_meta_routing() -> None:
    weights, ids = grouped_topk(torch.empty(7, 32, dtype=torch.float32, device="meta"), 6, 8, 3)
    assert (weights.device.type, weights.shape, ids.shape) == ("meta", (7, 6), (7, 6))


def test_a_compiler_traces_it_whole_for_any_number_of_tokens() -> None:
    compiled = torch.compile(grouped_topk, fullgraph=True, backend="eager", dynamic=True)
    bias = normal(32, seed=5)
    for num_tokens in (3, 8):
        logits = normal(num_tokens, 32)
        ours, theirs = (f(logits, 6, 8, 3, "sigmoid", bias, True, 2.5) for f in (compiled, grouped_topk))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_gradients_reach_the_logits_of_chosen_experts_only() -> None:
    logits = normal(8, 16).requires_grad_()
    weights, ids = grouped_topk(logits, 3, 4, 2, "sigmoid", normal(16, seed=5), renormalize=False)
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    chosen = torch.zeros(8, 16, dtype=torch.bool).scatter_(1, ids.long(), True)
    assert torch.equal(gradient != 0, chosen)
