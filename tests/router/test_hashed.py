"""Experts by token id: a table worked by hand, transformers' router, and what does not fit."""

import math

import pytest
import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.router.hashed import HashRouter

TABLE = torch.tensor([[0, 2], [1, 0], [2, -1]])


def test_a_table_by_hand() -> None:
    # Roots of softplus 1, 2 and 1/2; token 0 takes experts 0 and 2, token 2 expert 2 alone.
    logits = torch.tensor([math.log(math.e - 1), math.log(math.exp(4) - 1), math.log(math.exp(0.25) - 1)]).repeat(3, 1)
    router = HashRouter(TABLE, routed_scaling_factor=3.0)
    routing = router.of(torch.tensor([0, 2, 0]))(logits)
    assert routing.ids_TK.tolist() == [[0, 2], [2, -1], [0, 2]] and routing.ids_TK.dtype is torch.int32
    assert routing.weights_TK[0].tolist() == pytest.approx([2.0, 1.0])
    assert routing.weights_TK[1].tolist() == pytest.approx([3.0, 0.0])
    raw = HashRouter(TABLE, renormalize=False).route(logits[:1], torch.tensor([1]))
    assert raw.ids_TK.tolist() == [[1, 0]] and raw.weights_TK[0].tolist() == pytest.approx([2.0, 1.0])


def test_it_routes_as_transformers_does() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="needs transformers")
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=16, moe_intermediate_size=8, n_routed_experts=12, vocab_size=40)
    theirs, draw = modeling.DeepseekV4HashRouter(config), torch.Generator().manual_seed(0)
    theirs.weight.data = torch.randn(12, 16, generator=draw)
    theirs.tid2eid = torch.rand(40, 12, generator=draw).argsort(1)[:, :6]
    x, tokens = torch.randn(50, 16, generator=draw), torch.randint(40, (50,), generator=draw)
    with torch.no_grad():
        logits, weights, ids = theirs(x, tokens)
    routing = HashRouter(theirs.tid2eid, routed_scaling_factor=config.routed_scaling_factor).route(logits, tokens)
    assert torch.equal(routing.ids_TK.long(), ids)
    torch.testing.assert_close(routing.weights_TK, weights, rtol=1e-5, atol=1e-6)


def test_weights_that_are_tiny_are_not_scaled_up() -> None:
    # A sigmoid of 1e-20, which is what is added to the sum of the weights.
    logits = torch.full((1, 3), math.log(1e-20), dtype=torch.float32)
    weights = HashRouter(TABLE, scoring_func="sigmoid").route(logits, torch.tensor([2])).weights_TK
    assert weights[0].tolist() == pytest.approx([0.5, 0.0], rel=1e-4)


def test_edges_and_refusals() -> None:
    router = HashRouter(TABLE)
    assert router.route(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).ids_TK.shape == (0, 2)
    nan = router.route(torch.tensor([[math.nan, 0.0, 0.0]]), torch.tensor([0]))
    assert nan.ids_TK.tolist() == [[-1, -1]] and nan.weights_TK.tolist() == [[0.0, 0.0]]
    with pytest.raises(ConfigError, match=r"token ids from 3 to 3 lie outside the table's \[0, 3\)"):
        router.route(torch.zeros(1, 3), torch.tensor([3]))
    with pytest.raises(ConfigError, match="chooses experts from 0 to 2, the layer has 2"):
        router.route(torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(ShapeError, match="T"):
        router.route(torch.zeros(2, 3), torch.tensor([0]))
    with pytest.raises(ShapeError, match="drop it"):
        router.of(torch.tensor([0]))(torch.zeros(1, 3), torch.zeros(3))
    with pytest.raises(ConfigError, match="scoring_func='tanh'"):
        HashRouter(TABLE, scoring_func="tanh")
