"""The fused gate and grouped top-k against a case by hand and against plain loops over f64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.prepared import RouteMode, Scoring
from tests.kernels.native.layers import route, spaced


def test_ties_go_to_the_lower_index(isa_here) -> None:
    native, isa = isa_here
    x, gate = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(8, 64)
    ids, weights, _ = route(native, x, gate, torch.zeros(8), RouteMode(3, num_groups=4, top_groups=2), isa=isa)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [[pytest.approx(1 / 3)] * 3] * 2


def by_loops(logits: torch.Tensor, bias: torch.Tensor | None, mode: RouteMode) -> tuple[list[int], list[float]]:
    """One token in plain Python on the kernel's own logits, so that ties are the same ones."""
    scores = (logits.sigmoid() if mode.scoring is Scoring.SIGMOID else logits.softmax(0)).tolist()
    choice = [s + (0 if bias is None else bias[e].item()) for e, s in enumerate(scores)]
    size = len(choice) // mode.num_groups
    groups = []
    for g in range(mode.num_groups):
        best = sorted(choice[g * size : (g + 1) * size], reverse=True)
        groups.append(best[0] if bias is None or size == 1 else best[0] + best[1])
    kept = sorted(range(mode.num_groups), key=lambda g: (-groups[g], g))[: mode.top_groups]
    within = [e for g in kept for e in range(g * size, (g + 1) * size)]
    chosen = sorted(within, key=lambda e: (-choice[e], e))[: mode.top_k]
    total = sum(scores[e] for e in chosen) if mode.renormalize else 1.0
    return chosen, [scores[e] / total * mode.scale for e in chosen]


SIZES = st.tuples(st.integers(0, 20), st.integers(1, 100), st.integers(1, 5), st.integers(1, 5))
"""Tokens, hidden size, experts of a group, groups."""


@settings(max_examples=40)
@given(SIZES, st.sampled_from(list(Scoring)), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_any_routing_equals_plain_loops(
    native: Native, sizes: tuple[int, ...], scoring: Scoring, biased: bool, renormalize: bool, f32: bool, data: Any
) -> None:
    tokens, hidden, group_size, groups = sizes
    experts = group_size * groups
    kept = data.draw(st.integers(1, groups))
    mode = RouteMode(data.draw(st.integers(1, kept * group_size)), scoring, groups, kept, renormalize, 1.5)
    g = torch.Generator("cpu").manual_seed(experts + tokens)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    gate = torch.randn(experts, hidden, generator=g) * hidden**-0.5
    gate = gate if f32 else gate.bfloat16()
    bias = torch.rand(experts, generator=g) if biased else None
    for isa in native.isas:
        ids, weights, logits = route(native, x, gate, bias, mode, isa=isa, threads=2)
        torch.testing.assert_close(logits.double(), x.double() @ gate.double().T, atol=1e-4, rtol=1e-5)
        for t in range(tokens):
            chosen, wanted = by_loops(logits[t].double(), bias, mode)
            assert ids[t].tolist() == chosen
            assert weights[t].tolist() == pytest.approx(wanted, rel=1.3e-7)


@pytest.mark.parametrize("experts", [4, 7, 67, 256])
def test_bits_do_not_depend_on_threads_or_batch_mates(isa_here, experts: int) -> None:
    native, isa = isa_here
    x, gate, bias = torch.randn(40, 200).bfloat16(), torch.randn(experts, 200), torch.rand(experts)
    mode = RouteMode(4)
    together = route(native, x, gate, bias, mode, isa=isa, threads=3)
    for threads in (1, 2, 8):
        other = route(native, x, gate, bias, mode, isa=isa, threads=threads)
        assert all(torch.equal(a, b) for a, b in zip(other, together, strict=True)), threads
    for part in (slice(0, 1), slice(17, 33), slice(39, 40)):
        alone = route(native, x[part], gate, bias, mode, isa=isa)
        assert all(torch.equal(a, b[part]) for a, b in zip(alone, together, strict=True))


def test_strides_of_tokens_are_read_and_those_of_the_gate_refused(native: Native) -> None:
    x, gate, bias = torch.randn(5, 40).bfloat16(), torch.randn(9, 40), torch.rand(9)
    mode = RouteMode(3)
    wanted = route(native, x, gate, bias, mode)

    far = spaced(bias.unsqueeze(0), columns=True)[0]
    for each in (spaced(x, columns=columns) for columns in (False, True)):
        assert all(torch.equal(a, b) for a, b in zip(route(native, each, gate, bias, mode), wanted, strict=True))
    for tensors in (*((x, spaced(gate, columns=columns), bias) for columns in (False, True)), (x, gate, far)):
        with pytest.raises(ShapeError, match="of gate and bias, expected contiguous ones"):
            route(native, *tensors, mode)


def test_a_token_with_a_nan_score_goes_nowhere_and_its_neighbours_do_not_mind(native: Native) -> None:
    gate = torch.randn(4, 32)
    x = torch.ones(3, 32).bfloat16()
    x[1, 5] = float("nan")
    ids, weights, _ = route(native, x, gate, None, RouteMode(2))
    assert ids[1].tolist() == [-1, -1] and weights[1].tolist() == [0.0, 0.0]
    assert (ids[[0, 2]] >= 0).all() and torch.equal(ids[0], ids[2])


def test_an_expert_with_a_bias_of_minus_infinity_is_never_chosen(native: Native) -> None:
    # Two of four experts are out; of three choices one is left over and goes nowhere.
    bias = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf])
    ids, weights, _ = route(native, torch.ones(1, 32).bfloat16(), torch.randn(4, 32), bias, RouteMode(3))
    assert sorted(ids[0].tolist()) == [-1, 0, 2] and ids[0, 2] == -1 and weights[0, 2] == 0
    assert weights.sum().item() == pytest.approx(1.0)


def test_impossible_requests_are_reported(native: Native) -> None:
    x, gate = torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(6, 32)
    with pytest.raises(ConfigError, match="6 experts do not make 4 groups"):
        route(native, x, gate, None, RouteMode(1, num_groups=4))
    with pytest.raises(ConfigError, match=r"top_k=3, but 1 of 3 groups hold 2 experts"):
        route(native, x, gate, None, RouteMode(3, num_groups=3))
    with pytest.raises(ShapeError, match=r"cpu route: x has dtype torch.float32, expected torch.bfloat16"):
        route(native, x.float(), gate, None, RouteMode(1))
    with pytest.raises(ShapeError, match=r"cpu route: gate has H=31 \(axis 1\), expected H=32"):
        route(native, x, gate[:, :31].contiguous(), None, RouteMode(1))
    with pytest.raises(ShapeError, match=r"cpu route: bias has E=5 \(axis 0\), expected E=6; has dtype torch.bfloat16"):
        route(native, x, gate, torch.zeros(5, dtype=torch.bfloat16), RouteMode(1))
