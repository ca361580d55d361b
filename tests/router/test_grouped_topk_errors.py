"""The public grouped top-k: what does not fit, with the way out."""

import math

import pytest
import torch

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.router import grouped_topk
from moe_mk.router.topk import group_problems
from tests.support.draws import normal


def test_problems_at_the_edges() -> None:
    assert group_problems(12, 12, 4, 4) == group_problems(12, 6, 4, 2) == group_problems(12, 1, 12, 1) == []
    for top_k, both in ((12, False), (13, True), (1, False), (0, True)):  # 8 groups do not divide 12 experts
        assert len(group_problems(12, top_k, 8, 4)) == 1 + both
    for given in ((12, 7, 4, 2), (12, 1, 4, 5), (12, 1, 4, 0), (12, 1, 13, 1)):
        assert len(group_problems(*given)) == 1 + (given == (12, 1, 4, 0)), given


def test_numbers_that_do_not_fit_are_named_with_the_way_out() -> None:
    logits = normal(2, 12)
    with pytest.raises(ConfigError, match=r"num_expert_group=8 does not divide E=12 experts; use num_expert_group=6"):
        grouped_topk(logits, 2, 8, 4)
    with pytest.raises(ConfigError, match=r"topk_group=5 of num_expert_group=4 groups.*use topk_group in \[1, 4\]"):
        grouped_topk(logits, 2, 4, 5)
    with pytest.raises(
        ConfigError, match=r"top_k=8 .*topk_group=2 groups of 3 experts = 6 selectable.*topk_group >= 3"
    ):
        grouped_topk(logits, 8, 4, 2)
    with pytest.raises(ConfigError, match=r"top_k=12 .* = 6 selectable; .* or topk_group >= 4$"):
        grouped_topk(logits, 12, 4, 2)
    with pytest.raises(ConfigError, match=r"top_k=13 .*use top_k in \[1, 6\]$"):
        grouped_topk(logits, 13, 4, 2)
    with pytest.raises(ConfigError, match=r"top_k=0 "):
        grouped_topk(logits, 0, 4, 2)
    with pytest.raises(ConfigError, match=r"num_expert_group=0 does not divide"):
        grouped_topk(logits, 2, 0, 1)
    with pytest.raises(ConfigError, match=r"top_k=1 .*E=0"):
        grouped_topk(torch.empty(2, 0, dtype=torch.float32), 1, 1, 1)


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'sigmoid'.*routed_scaling_factor=nan.*does not divide E=12"):
        grouped_topk(normal(2, 12), 2, 8, 4, "sigmod", routed_scaling_factor=math.nan)


def test_wrong_tensors_are_named() -> None:
    with pytest.raises(ShapeError, match=r"router_logits has 1 dimensions"):
        grouped_topk(normal(8), 2, 4, 2)
    with pytest.raises(ShapeError, match=r"router_logits has dtype torch.int64"):
        grouped_topk(torch.zeros(2, 8, dtype=torch.int64), 2, 4, 2)
    with pytest.raises(ShapeError, match=r"e_score_correction_bias has E=7 \(axis 0\), expected E=8"):
        grouped_topk(normal(2, 8), 2, 4, 2, e_score_correction_bias=normal(7))
    with pytest.raises(ShapeError, match=r"e_score_correction_bias has dtype torch.int32"):
        grouped_topk(normal(2, 8), 2, 4, 2, e_score_correction_bias=torch.zeros(8, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"e_score_correction_bias is on meta"):
        grouped_topk(normal(2, 8), 2, 4, 2, e_score_correction_bias=torch.empty(8, dtype=torch.float32, device="meta"))
