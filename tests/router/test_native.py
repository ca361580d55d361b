"""The gate and the router in one native call: the router's own rules, on logits that differ in rounding alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.layer.gate import routes_natively
from moe_mk.router import Router, choose_gate_tier, gate_logits
from tests.layer.native import NEEDS_COMPILER, route_natively

pytestmark = NEEDS_COMPILER
BF16 = torch.bfloat16
SIZES = st.tuples(st.integers(0, 20), st.integers(1, 200), st.integers(1, 8), st.integers(1, 8))
"""Tokens, hidden size, experts of a group, groups."""


def tokens_and_gate(tokens: int, hidden: int, experts: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).to(BF16)
    gate = (torch.randn(experts, hidden, generator=g) * hidden**-0.5).to(BF16)
    return x, gate, torch.rand(experts, generator=g) - 0.5


def same_choice(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Ids as sets, and the weight of each id."""
    for ids, weights, wanted_ids, wanted_weights in zip(*got, *wanted, strict=True):
        assert sorted(ids.tolist()) == sorted(wanted_ids.tolist())
        torch.testing.assert_close(weights[ids.argsort()], wanted_weights[wanted_ids.argsort()], rtol=1e-5, atol=1e-7)


def test_one_token_worked_by_hand() -> None:
    # Logits 2, 1, 0, -1 in two groups, no bias: group 0 is worth sigmoid(2), group 1 sigmoid(0). Its two experts:
    # .880797 and .731059 over their sum 1.611856, times 2: 1.092898 and .907102.
    router = Router(2, num_expert_group=2, topk_group=1, scoring_func="sigmoid", routed_scaling_factor=2.0)
    gate = torch.tensor([[2.0], [1.0], [0.0], [-1.0]]).to(BF16)
    routing, logits = route_natively(torch.ones(1, 1, dtype=BF16), gate, None, router)
    assert logits.tolist() == [[2.0, 1.0, 0.0, -1.0]] and routing.ids_TK.tolist() == [[0, 1]]
    assert routing.weights_TK[0].tolist() == pytest.approx([1.092898, 0.907102], rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(["sigmoid", "softmax"]), st.booleans(), st.booleans(), st.data())
def test_the_choice_is_what_the_router_makes_of_the_same_logits(
    sizes: tuple[int, ...], scoring: str, biased: bool, renormalize: bool, data: st.DataObject
) -> None:
    tokens, hidden, per_group, groups = sizes
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, kept * per_group))
    x, gate, bias_E = tokens_and_gate(tokens, hidden, per_group * groups, data.draw(st.integers(0, 99)))
    bias = bias_E if biased else None
    router = Router(top_k, groups, kept, scoring, renormalize, 2.5)
    routing, logits = route_natively(x, gate, bias, router)
    torch.testing.assert_close(logits, gate_logits(x, gate), rtol=1e-5, atol=1e-5)
    wanted = router(logits, bias)
    same_choice((routing.ids_TK, routing.weights_TK), (wanted.ids_TK, wanted.weights_TK))


def test_equal_scores_go_to_the_lowest_ids_as_the_router_decides() -> None:
    x, row, _ = tokens_and_gate(9, 96, 1, 3)
    gate = row.expand(12, 96).contiguous()  # every expert is worth the same, in every group
    router = Router(4, 3, 2, "sigmoid")
    routing, logits = route_natively(x, gate, None, router)
    assert routing.ids_TK.tolist() == [[0, 1, 2, 3]] * 9
    assert torch.equal(router(logits, None).ids_TK, routing.ids_TK)


ODD = float("nan"), float("inf"), float("-inf")


@pytest.mark.parametrize(("poison", "of_bias"), [(1.0, ODD[0]), (1.0, ODD[1]), *((each, ODD[2]) for each in ODD)])
def test_what_cannot_be_decided_goes_where_the_router_sends_it(poison: float, of_bias: float) -> None:
    x, gate, bias = tokens_and_gate(5, 64, 8, 4)
    x[2, 7] = poison
    bias[3] = of_bias
    for scoring in ("sigmoid", "softmax"):
        router = Router(6, 2, 2, scoring)
        routing, logits = route_natively(x, gate, bias, router)
        wanted = router(logits, bias)
        same_choice((routing.ids_TK, routing.weights_TK), (wanted.ids_TK, wanted.weights_TK))


def test_simulations_and_scores_in_the_model_dtype_stay_with_torch() -> None:
    assert routes_natively(Router(2)) and routes_natively(Router(2, scoring_func="sigmoid"))
    assert not routes_natively(Router(2, simulate="balanced"))
    assert not routes_natively(Router(2, router_dtype="model"))
    assert not routes_natively(Router(2, scoring_func="sqrtsoftplus"))


def test_the_tier_is_chosen_with_reasons() -> None:
    here = frozenset({"native"})
    chosen = choose_gate_tier(None, 4, BF16, "float32", here)
    assert chosen.tier == "native" and "native comes first" in chosen.reasons["plain"][0]
    for arch, dtype, router_dtype, available, words in (
        ((9, 0), BF16, "float32", here, "needs a CPU, this device is sm_90"),
        (None, torch.float32, "float32", here, "reads torch.bfloat16, hidden states are torch.float32"),
        (None, BF16, "model", here, "asks for scores in the model dtype"),
        (None, BF16, "float32", frozenset[str](), "unless kernel.fused_router = false"),
    ):
        choice = choose_gate_tier(arch, 4, dtype, router_dtype, available)
        assert choice.tier != "native"
        assert len(choice.reasons["native"]) == 1 and words in choice.reasons["native"][0]
    with pytest.raises(UnsupportedError, match="gives no logits alone"):
        gate_logits(*tokens_and_gate(1, 32, 4, 0)[:2], tier="native")
