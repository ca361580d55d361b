"""What an experts backend states against a problem, from its traits alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_mk import ConfigError, Problem
from moe_mk.experts import EXPERTS, ExpertsTraits
from moe_mk.experts.reference import ReferenceExperts, ReferenceMonolithic
from moe_mk.quant.plain import FP16
from moe_mk.tokens import GroupedTokens, OutputStage
from moe_mk.weights.expert_weights import Weights
from tests.support import problems

CPU = torch.device("cpu")


def reported(traits: ExpertsTraits, asked: Problem) -> dict[str, str]:
    class Imagined(ReferenceExperts):
        pass

    Imagined.traits = traits
    return {reason.code: str(reason) for reason in Imagined.reasons_against(asked)}


problem = partial(problems.problem, device="h100", dtype=FP16)


def test_every_reason_is_reported_at_once() -> None:
    traits = ExpertsTraits(
        summary="picky", emits={GroupedTokens: OutputStage.RAW}, weights=frozenset({"fp8_block"}), computes=("plain",),
        kinds=frozenset({"cuda"}), min_arch=(10, 0), block_sides=frozenset({64}), activations=frozenset({"relu2"}),
        dtypes=frozenset({"bf16"}), deterministic=False,
    )  # fmt: skip
    blocks = {"weights": "fp8_block", "block": (64, 128)}
    assert reported(traits, problem(activations="checkpoint", deterministic=True, quant=blocks)) == {
        "arch": "needs sm_100, this device is sm_90",
        "deterministic": "is not deterministic [kernel.deterministic = false]",
        "block": "reads FP8 blocks with sides 64, the experts have 64x128",
        "activation": "has relu2, the model needs silu",
        "dtype": "computes in bf16, the layer is fp16",
        "activations": "multiplies with plain activations only [kernel.activations = auto]",
    }
    only_fp8 = replace(traits, computes=("fp8",), weights=frozenset({"plain"}))
    both = reported(only_fp8, problem(activations="plain"))
    assert both["activations"] == "multiplies with FP8 activations only [kernel.activations = auto]"
    assert both["weights"] == "reads plain weights, the experts are fp8_128x128"


@pytest.mark.parametrize(
    "backend", [name for name, each in EXPERTS.items() if {"mxfp4", "plain"} <= each.traits.weights]
)
def test_a_down_projection_of_another_format_is_read_or_refused_by_its_name(backend: str) -> None:
    chosen = EXPERTS[backend]
    reasons = chosen.reasons_against(problem(quant={"weights": "mxfp4", "down": "bf16"}))
    refused = [str(reason) for reason in reasons if reason.code == "weights"]
    named = "reads one format for all projections, the experts have bf16 and mxfp4"
    assert (named in refused) == (not chosen.traits.mixed_weights)


def test_experts_that_route_inside_judge_problems_by_the_same_traits_and_refuse_all_that_they_leave_out() -> None:
    asked = problem(graphs=True)
    assert ReferenceMonolithic.reasons_against(asked) == ReferenceExperts.reasons_against(asked)
    assert ReferenceMonolithic.workspace_bytes(asked, 100) > ReferenceExperts.workspace_bytes(asked, 100)
    for left_out in (
        {"hash_vocabulary": 9}, {"first_image_token": 9}, {"weight_on_input": True, "top_k": 1}, {"input_norm": 1e-5},
        {"has_expert_scale": True}, {"num_zero_experts": 2}, {"num_fused_shared_experts": 1}, {"kind": "expert_choice"},
    ):  # fmt: skip
        assert [why.code for why in ReferenceMonolithic.reasons_against(problems.small(**left_out))] == ["routing"]


def test_an_override_with_other_parameters_is_refused() -> None:
    class OneArgument(ReferenceExperts):
        def relayout(self, weights: Weights) -> Weights:  # type: ignore[override]
            return super().relayout(weights)

    expected = r"relayout\(self, weights\) should be relayout\(self, weights, on_progress\)"
    with pytest.raises(ConfigError, match=expected):
        EXPERTS.register("one_argument")(OneArgument)
    assert "one_argument" not in EXPERTS
