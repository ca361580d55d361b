"""Every registered transport carries every hostile case, in every wire scheme it states it can carry."""

from collections.abc import Hashable

import pytest

from moe_mk.lab.testing.conformance import check_transport
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant import BF16, FP32, INT8_TOKEN, MXFP8, NVFP4_TOKENS
from moe_mk.quant.fp8 import FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.tensor import QuantScheme
from tests.support.formats import FORMATS
from tests.support.tiers import quick_where

WIRES: dict[str, list[QuantScheme]] = {
    "plain": [FP32, BF16],
    "fp8": [FP8_1x128, FP8_1x128_UE8M0],
    "int8": [INT8_TOKEN],
    "mxfp8": [MXFP8],
    "nvfp4": [NVFP4_TOKENS],
}
IN_FOUR = (BF16, FP8_1x128)
"""Schemes in which ranks that are threads are four; two of them carry every scheme."""


def is_quick(name: str, ranks: int, wire: QuantScheme) -> bool:
    """Where own transports take turns: two with rows as they are and as FP8 blocks, four in BF16. Else two in BF16."""
    traits = PREPARE_FINALIZE[name].traits
    turns = not traits.blocking and not traits.library
    return (ranks == 2 and wire in IN_FOUR and turns) or (wire is BF16 and (turns or ranks == 2))


def axes(name: str, ranks: int, wire: QuantScheme) -> tuple[Hashable, ...]:
    return name, ranks, next(family for family, schemes in WIRES.items() if wire in schemes)


CASES = [
    (name, ranks, wire)
    for name, transport in PREPARE_FINALIZE.items()
    for ranks in (1, 2, 4)
    if transport.traits.min_ranks <= ranks <= (transport.traits.max_ranks or ranks)
    for family in sorted(transport.traits.wire)
    for wire in WIRES[family]
    if ranks < 4 or wire in IN_FOUR or not transport.traits.blocking
]


@pytest.mark.parametrize(
    "name,ranks,wire", quick_where(is_quick, CASES, axes), ids=lambda value: str(getattr(value, "name", value))
)
def test_tokens_return_times_the_sum_of_their_weights(name: str, ranks: int, wire: QuantScheme) -> None:
    dtype = FP32 if wire is FP32 else BF16
    form, tokens = next(f for f in FORMATS if f.dtype is dtype), next(iter(PREPARE_FINALIZE[name].traits.tokens))
    asked = form.problem(ep=ranks, tokens=tokens, allow_emulated=True)
    missing = [r for r in PREPARE_FINALIZE[name].reasons_against(asked) if r.code in ("device", "library", "dtype")]
    if missing:
        pytest.skip("; ".join(map(str, missing)))
    assert check_transport(name, num_ranks=ranks, wire=wire, dtype=dtype) >= 12


def test_every_registered_transport_is_tried() -> None:
    assert {name for name, *_ in CASES} == set(PREPARE_FINALIZE)


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_one_expert_a_rank_and_one_expert_a_token(name: str) -> None:
    assert check_transport(name, num_ranks=4, num_experts=4, top_k=1, hidden_size=8) >= 12


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_more_choices_than_experts_of_a_rank(name: str) -> None:
    assert check_transport(name, num_ranks=2, num_experts=6, top_k=6, hidden_size=8) >= 12
