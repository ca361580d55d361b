"""Laws for callables of any library: a right one keeps them all in every interface, and each law alone is broken."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.lab.testing.cases import draw_experts
from moe_mk.lab.testing.laws import COUNTS, OF_CALLS, Call, Outcome, check, interface_of
from moe_mk.lab.testing.limits import NonConforming, no_global_changes
from moe_mk.oracle.expected_error import ALL_TOKENS, ONE_TOKEN
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme
from tests.support.tiers import quick_where

EXPERTS = draw_experts(BF16, 6, 32, 32, seed=1)
W13, W2 = EXPERTS.w13.dequantize(torch.float32), EXPERTS.w2.dequantize(torch.float32)
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def right(x: Tensor, ids: Tensor, weights: Tensor, round_to: QuantScheme | None = None) -> Tensor:
    """Each assignment by itself in f32, so that bits do not depend on the batch."""

    def rounded(rows: Tensor) -> Tensor:
        return rows if round_to is None else round_to.quantize(rows).dequantize(torch.float32)

    (tokens, top_k), hidden = ids.shape, x.shape[1]
    if not tokens:
        return torch.empty_like(x)
    safe = ids.long().clamp(min=0).flatten()
    rows = rounded(x.float().nan_to_num(3e38, 3e38)).repeat_interleave(top_k, 0)
    gate, up = torch.bmm(W13[safe], rows[:, :, None])[:, :, 0].chunk(2, 1)
    h = rounded((torch.nn.functional.silu(gate) * up).nan_to_num(0.0, 0.0, 0.0))
    y = torch.bmm(W2[safe], h[:, :, None])[:, :, 0].view(tokens, top_k, hidden)
    return (y * weights.float()[:, :, None]).masked_fill(ids[:, :, None] < 0, 0.0).sum(1).to(x.dtype)


def found(fn: Callable[..., Tensor], compute: QuantScheme | None = None) -> list[Outcome]:
    return check(fn, EXPERTS, compute=compute, most_tokens=41, around=(64,))


UP = 1 + 2**-7
"""By at least one unit in the last place of bf16."""


def one_choice_renormalised(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = right(x, ids, weights)
    return y / weights if ids.shape[1] == 1 and len(x) < 64 else y


def wrong_at_40_tokens(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = right(x, ids, weights)
    y[39:] *= float(len(x) != 40)
    return y


def clamps_outliers(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(x.clamp(-448, 448), ids, weights)


def needs_two_experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = right(x, ids, weights)
    return y * 0.5 if len(ids.unique()) == 1 and len(x) > 1 and ids.min() >= 0 else y


def absent_is_the_last_expert(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(x, torch.where(ids < 0, len(W2) - 1, ids), weights)


def one_row_at_least(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(x, ids, weights) if len(x) else torch.zeros((1, x.shape[1]), dtype=x.dtype)


def fails_without_tokens(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    if not len(x):
        raise RuntimeError("the grid is empty")
    return right(x, ids, weights)


def in_f32(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(x, ids, weights).float()


def nan_of_all(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(x, ids, weights) + 0.0 * x.sum()


def in_place(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = right(x, ids, weights)
    x.copy_(y)
    return y


def writes_into_its_input(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return x.set_(x.clone()).copy_(right(x, ids, weights))


class ReusesItsOutput:
    def __init__(self) -> None:
        self.buffer = torch.empty((512, 32), dtype=torch.bfloat16)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.buffer[: len(x)].copy_(right(x, ids, weights))


class RemembersTensors:
    """Rows that were quantised once are kept for a tensor that is seen again."""

    def __init__(self) -> None:
        self.x, self.y = torch.empty(0), torch.empty(0)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.x is not x:
            self.x, self.y = x, right(x, ids, weights)
        return self.y.clone()


class LastBitByCall:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y, self.calls = right(x, ids, weights), self.calls + 1
        y[:1, 0] *= UP if self.calls % 2 else 1.0
        return y


def last_bit_by_place(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = right(x, ids, weights)
    y[1::2, 0] *= UP
    return y


def last_bit_by_count(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = right(x, ids, weights)
    y[:, 0] *= UP if len(x) < 32 else 1.0
    return y


BROKEN: dict[str, tuple[Callable[[], Experts], str, str]] = {
    "one choice renormalised": (lambda: one_choice_renormalised, "values", "33 tokens are wrong"),
    "wrong at 40 tokens": (lambda: wrong_at_40_tokens, "counts", r"1 of 40 tokens are wrong, \[39\], by up to 1$"),
    "clamps outliers": (lambda: clamps_outliers, "counts", "of . tokens are wrong"),
    "needs two experts": (lambda: needs_two_experts, "one expert", "130 of 130 tokens are wrong"),
    "absent is the last expert": (lambda: absent_is_the_last_expert, "nowhere", "tokens are wrong"),
    "one row at least": (lambda: one_row_at_least, "empty", r"the output is \(1, 32\), not \(0, 32\)"),
    "fails without tokens": (lambda: fails_without_tokens, "empty", "RuntimeError: the grid is empty"),
    "in f32": (lambda: in_f32, "shape", r"torch\.float32"),
    "NaN of all": (lambda: nan_of_all, "alone", "31 of 31 tokens are wrong"),
    "in place": (lambda: in_place, "inputs", "^x changed"),
    "reuses its output": (ReusesItsOutput, "kept", "changed in the next one"),
    "remembers tensors": (RemembersTensors, "calls", "after other values in the same tensors"),
    "last bit by call": (LastBitByCall, "deterministic", "different bits"),
    "last bit by place": (lambda: last_bit_by_place, "permuted", "tokens in another order: .* rows have other bits"),
    "last bit by count": (lambda: last_bit_by_count, "invariant", "of 33 tokens: .* rows have other bits"),
}
QUICK = ("clamps outliers", "remembers tensors", "last bit by place")


@pytest.mark.row(176)
@pytest.mark.parametrize("name", quick_where(lambda name: name in QUICK, list(BROKEN)))
def test_a_broken_callable_is_refused_by_one_law_alone(name: str) -> None:
    make, law, message = BROKEN[name]
    (outcome,) = [each for each in found(make()) if each.status != "kept"]
    assert outcome.law.name == law and re.search(message, outcome.message), outcome
    assert outcome.status == ("refused" if name == "fails without tokens" else "broken")


def test_every_law_is_broken_by_a_callable() -> None:
    assert {law for _, law, _ in BROKEN.values()} == {law.name for law in OF_CALLS}


def fused_experts(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str = "silu"
) -> Tensor:
    assert torch.equal(w1.float(), W13) and topk_ids.dtype is torch.int32 and topk_weights.dtype is torch.float32
    return right(hidden_states, topk_ids, topk_weights)


def experts_forward(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    assert torch.equal(self.down_proj.float(), W2) and top_k_weights.dtype is torch.bfloat16
    absent = top_k_index >= self.num_experts
    assert bool(absent.any()) is self._is_expert_parallel and not top_k_weights[absent].any()
    return right(hidden_states, top_k_index.masked_fill(absent, -1), top_k_weights)


class Module(torch.nn.Module):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return right(hidden_states, top_k_index.masked_fill(top_k_index == len(W2), -1), top_k_weights)


INTERFACES = {"fused_experts": fused_experts, "function": experts_forward, "module": Module(), "call": right}


@pytest.mark.row(176)
@pytest.mark.parametrize("interface", quick_where(lambda name: name == "call", list(INTERFACES)))
def test_a_right_callable_keeps_every_law_in_every_interface(interface: str) -> None:
    fn = partial(right, round_to=None) if interface == "call" else INTERFACES[interface]
    assert interface_of(fn) == interface
    assert [str(each) for each in found(fn)] == [f"{law.name}: kept" for law in OF_CALLS]


def test_other_parameters_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"got \(x, router_logits\); pass a lambda x, ids, weights"):
        interface_of(lambda x, router_logits: x)


@pytest.mark.slow
def test_rows_that_are_rounded_are_right_within_that_rounding_only() -> None:
    rounding = partial(right, round_to=INT8_TOKEN)
    assert all(each.status == "kept" for each in found(rounding, INT8_TOKEN))
    assert "counts" in {each.law.name for each in found(rounding) if each.status == "broken"}


def test_the_smallest_call_of_a_broken_law_is_one_that_breaks_it() -> None:
    (outcome,) = check(clamps_outliers, EXPERTS, most_tokens=300, around=(), laws=(COUNTS,))
    call = outcome.call
    assert call is not None and len(call) == 1 and float(call.x_TH.abs().max()) > 448
    assert call.wrong(clamps_outliers(call.x_TH, call.ids_TK, call.weights_TK))
    assert not call.wrong(right(call.x_TH, call.ids_TK, call.weights_TK))


@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_each_limit_of_an_output_is_one_by_itself(tokens: int) -> None:
    wanted, error = torch.ones((tokens, 4), dtype=torch.float64), torch.full((tokens,), 0.25, dtype=torch.float64)
    call = Call(wanted, torch.zeros((tokens, 1)), torch.ones((tokens, 1)), wanted, error)
    step = torch.full((4,), 0.25 / 2, dtype=torch.float64)  # one error long
    for of_all, of_one in product((0.0, 0.99 * ALL_TOKENS, 1.01 * ALL_TOKENS), (0.0, 0.99 * ONE_TOKEN, torch.nan)):
        y_TH = wanted + of_all * step
        y_TH[0] = wanted[0] + max(of_all, of_one, key=lambda each: (each != each, each)) * step
        distance_T = (y_TH - wanted).norm(dim=1)
        together = float(distance_T.norm()) <= ALL_TOKENS * float(error.norm())
        fits = together and bool((distance_T <= ONE_TOKEN * error).all())
        assert (call.wrong(y_TH) == "") == fits, (of_all, of_one)


STATES: dict[str, tuple[Callable[..., object], Sequence[Any]]] = {
    "random numbers of torch": (lambda _: torch.rand(1), (0, 1)),
    "random numbers of Python": (lambda _: random.gauss(0.0, 1.0), (0, 1)),
    "random numbers of numpy": (np.random.normal, (0, 1)),
    "the default dtype": (torch.set_default_dtype, (torch.float64, torch.float32)),
    "the default device": (torch.set_default_device, ("meta", None)),
    "the number of threads": (torch.set_num_threads, (torch.get_num_threads() + 1, torch.get_num_threads())),
    "the gradient mode": (torch.set_grad_enabled, (False, True)),
    "deterministic algorithms": (torch.use_deterministic_algorithms, (True, False)),
    "precision of products": (torch.set_float32_matmul_precision, ("medium", "highest")),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_the_process_that_a_call_changes_is_named(name: str) -> None:
    change, values = STATES[name]
    for value in values:  # a second normal number changes less than the first one
        with pytest.raises(NonConforming, match=f"^a call: {name} of the process"), no_global_changes("a call"):
            change(value)
