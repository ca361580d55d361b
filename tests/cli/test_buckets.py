"""`explain` states for every number of tokens who would serve, at what price, and what the floor is."""

import re

import pytest

from moe_mk.lab.cli.explain import BUCKETS, Question, decide_on, experts_floor_us, rivals_of
from moe_mk.lab.plan.roofline import LayerShape, Rates, experts_us
from tests.cli.conftest import moe_mk

H200 = Question("deepseek_v3", "h200", 64, libraries="triton")


def test_the_floor_is_that_of_the_roofline() -> None:
    decision = decide_on(Question("deepseek_v3", "h200", 64, 4, libraries="triton", overrides={"ep": 8, "tp": 2}))
    rates = Rates.of(decision.problem.device)
    assert experts_floor_us(decision) == experts_us(LayerShape(7168, 1024, 256, 8, ep=8), 64, rates)
    # Weights of 32 half experts at 4.8 TB/s: 32 x 22.02 MB, and the rows. Of the 16 ranks 4 are on a node.
    assert experts_floor_us(decision) == pytest.approx(149.4, abs=0.3) and decision.problem.ranks_per_node == 4


def test_explain_ranks_triton_and_the_reference_by_number_of_tokens() -> None:
    decision = decide_on(H200)
    priced = {v.experts: v for v in decision.verdicts if v.prepare_finalize == "no_ep" and v.cost_us is not None}
    assert decision.chosen.experts == "triton" and priced["triton"].cost_us < priced["reference"].cost_us
    stated = moe_mk("explain", "deepseek_v3", "--device", "h200", "--installed", "triton").output
    for tokens in BUCKETS:
        line = re.search(rf"^ *{tokens} +([\d,]+) us +([\d,]+) us +no_ep \+ triton, model;", stated, re.MULTILINE)
        assert line, stated
        price, floor = (int(figure.replace(",", "")) for figure in line.groups())
        assert price > floor > 40


def test_no_floor_is_shown_where_there_is_no_fp8_unit() -> None:
    stated = moe_mk("explain", "deepseek_v3", "--device", "cpu").output
    assert "by tokens" not in stated


def test_every_line_ranks_the_other_experts_behind_the_same_transport() -> None:
    decision = decide_on(Question("deepseek_v3", "h200", 64, libraries="triton,deep_gemm,flashinfer"))
    found = re.findall(r"(\w+) ([\d,]+) us", rivals_of(decision))
    assert [name for name, _ in found] == ["flashinfer_cutlass", "deep_gemm", "reference"]
    prices = [int(price.replace(",", "")) for _, price in found]
    assert prices == sorted(prices) and prices[0] > (decision.chosen.cost_us or 0)
    alone = decide_on(Question("deepseek_v3", "h200", 64, libraries="triton", overrides={"experts": "triton"}))
    assert rivals_of(alone).startswith("reference")
