"""The expected error, term by term, and what requantised down projections add to it."""

from dataclasses import replace

import pytest

from moe_mk import oracle
from moe_mk.config.quant import QuantConfig
from moe_mk.oracle.expected_error import error_of
from moe_mk.oracle.fallback import Effect, added_rounding, effect_of, held_in
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.plain import BF16, FP32
from tests.support.problems import small

BF16_ERROR = BF16.relative_rms


def added(decision: oracle.Decision, other: oracle.Decision) -> float:
    """The square of what the other one has more."""
    return error_of(other) ** 2 - error_of(decision) ** 2


def test_every_conversion_adds_its_own_square() -> None:
    asked = small("cpu", ep=1)
    decision = oracle.select(asked)
    requantised = replace(decision, effect=Effect("a", "b", 1.0, 0.02, ""))
    assert added(decision, requantised) == pytest.approx(5 * 0.02**2)  # before both GEMMs: 4 and 1
    assert added(decision, replace(decision, wire=FP8_1x128)) == pytest.approx(4 * FP8_1x128.relative_rms**2)
    computed = replace(decision, wire=FP8_1x128, compute=FP8_1x128)
    assert added(decision, computed) == pytest.approx(5 * (FP8_1x128.relative_rms**2 - BF16_ERROR**2))
    by_hand = [({"latent_size": 128}, 6 * BF16_ERROR**2), ({"input_norm": 1e-6}, 4 * BF16_ERROR**2)]
    wide = {"num_shared_experts": 1, "shared_intermediate_size": 2**20}
    for change, square in (*by_hand, (wide, (2**20 - 128) / 2 * FP32.relative_rms**2)):
        config = asked.config.model_copy(update={"model": asked.config.model.model_copy(update=change)})
        other = replace(decision, problem=replace(asked, config=config))
        assert added(decision, other) == pytest.approx(square, rel=1e-3), change


@pytest.mark.parametrize("changed", ["weights", "down"])
def test_rounding_is_that_of_the_matrices_that_lose_most(changed: str) -> None:
    """One kind of matrix keeps its type, whichever it is, and the other one is requantised."""
    stored = QuantConfig.parse({"weights": "q8_0", "down": "q8_0"} | {changed: "q4_1"}, "stored")
    held = QuantConfig.parse({"weights": "q8_0", "down": "q8_0"}, "held")
    before = held_in(stored, small("cpu", ep=1))
    effect = effect_of(before, held_in(held, before))
    lost = added_rounding(stored.weight_scheme if changed == "weights" else stored.down_scheme, held.weight_scheme)
    assert effect is not None and effect.rounding == lost > 0
    assert effect_of(before, before) is None
