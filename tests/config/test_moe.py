"""The settings of a layer: fields that must fit each other, overrides, derived sizes."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from moe_mk.config import ModelConfig, MoEConfig, QuantConfig, load_config
from moe_mk.errors import ConfigError
from moe_mk.lab.cli.explain import active_fraction
from moe_mk.quant import BF16, FP16, FP32, FP8_1x128, FP8_1x128_UE8M0, FP8_128x128, FP8_128x128_UE8M0, weight_scheme


def config(**groups: Mapping[str, Any]) -> MoEConfig:
    """16 experts of 512 x 256 in 4 groups, top-4 of 2 groups, with some settings changed."""
    data: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 16},
        "router": {"top_k": 4, "num_expert_group": 4, "topk_group": 2},
        "parallel": {},
        "kernel": {},
    }
    for name, changes in groups.items():
        data[name] |= changes
    return MoEConfig.parse(data, "test")


OVER = {"router": {"top_k": 17, "num_expert_group": 3, "topk_group": 5}, "parallel": {"ep": 17, "tp": 3}}
SHARED = {"moe_intermediate_size": 2048, "num_shared_experts": 1, "shared_intermediate_size": 768}


@pytest.mark.row(31)
@pytest.mark.parametrize(
    "groups, problem",
    [
        (
            OVER,
            r"^test: router.top_k=17 exceeds model.num_experts=16; lower top_k; router.topk_group=5 exceeds router."
            r"num_expert_group=3; keep at most 3 groups; model.num_experts=16 does not divide into router."
            r"num_expert_group=3 groups; use 2 groups; parallel.ep=17 exceeds model.num_experts=16, which leaves ranks "
            r"without experts; use 1 to 16 ranks; parallel.tp=3 does not divide",
        ),
        (
            {"router": {"topk_group": 1, "top_k": 5}},
            r"router.topk_group=1 groups of 4 experts leave 4 to choose router.top_k=5 from; keep 2 groups or more",
        ),
        (
            {"parallel": {"ep": 6, "placement": [*range(16)]}},
            r"parallel.ep=6 does not divide the length of parallel.placement=16; add 2 replicas or use 2 ranks",
        ),
        (
            {"parallel": {"ep": 32, "placement": [*range(16), *range(4)]}},
            r"parallel.ep=32 exceeds the length of parallel.placement=20",
        ),
        (
            {"model": {"quant": {"weights": "fp8_block"}, **SHARED}, "parallel": {"tp": 4}},
            r"parallel.tp=4 does not divide model.moe_intermediate_size=2048 and 768 of the shared experts "
            r"at the edges of 128x128 blocks; possible: 1, 2$",
        ),
    ],
)
def test_degrees_that_do_not_fit_are_refused_by_field(groups: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(**groups)


SETTINGS: dict[str, dict[str, Any]] = {
    "groups": {"num_expert_group": 4, "topk_group": 2}, "bias": {"has_correction_bias": True},
    "logit_bias": {"has_logit_bias": True}, "hash": {"hash_vocabulary": 9}, "image": {"first_image_token": 5},
    "factors": {"has_expert_scale": True}, "on_input": {"weight_on_input": True, "top_k": 1}, "three": {"top_k": 3},
    "eight": {"top_k": 8}, "noisy": {"kind": "noisy_topk"}, "capacity": {"kind": "expert_capacity"},
    "tries": {"num_choices": 5}, "zero": {"num_zero_experts": 4}, "fused": {"num_fused_shared_experts": 3},
    "shared": {"num_shared_experts": 1}, "latent": {"latent_size": 65}, "norm": {"input_norm": 1e-6},
    "ungated": {"gated": False}, "oai": {"activation": "swiglu_oai", "swiglu_limit": 7.0},
    "shared_oai": {"num_shared_experts": 1, "shared_activation": "swiglu_oai", "shared_swiglu_limit": 7.0},
    "shared_gate": {"num_shared_experts": 1, "shared_gate": True}, "odd": {"moe_intermediate_size": 255},
    "odd_hidden": {"hidden_size": 511}, "odd_shared": {"num_shared_experts": 1, "shared_intermediate_size": 255},
    "mxfp4": {"quant": {"weights": "mxfp4"}}, "plain_shared": {"quant": {"weights": "mxfp4", "shared": "bf16"}},
    "down": {"quant": {"weights": "bf16", "down": "mxfp4"}}, "q8_0": {"quant": {"weights": "q8_0"}},
    "graphs": {"graphs": True}, "invariant": {"invariant": True}, "batch": {"batch_invariant": True},
    "tiles": {"tiles": 2}, "wire": {"wire": "fp8"}, "own_wire": {"wire": "checkpoint"}, "tp": {"tp": 4},
    "fp8": {"quant": {"weights": "fp8_block"}}, "ep": {"ep": 16}, "ep5": {"ep": 5},
    "copies": {"placement": (*range(16), 0, 1)},
}  # fmt: skip
REFUSED = {
    "groups": "noisy capacity zero fused", "bias": "hash noisy capacity", "image": "noisy capacity",
    "logit_bias": "noisy capacity", "hash": "noisy capacity zero fused graphs", "factors": "zero",
    "on_input": "zero fused", "three": "fused", "eight": "tries", "zero": "fused latent norm", "shared": "norm",
    "latent": "norm mxfp4 plain_shared q8_0 invariant batch", "norm": "shared_oai shared_gate odd_shared",
    "ungated": "oai shared_oai", "odd": "mxfp4 plain_shared down q8_0 tp", "odd_hidden": "mxfp4 plain_shared q8_0",
    "odd_shared": "mxfp4 down tp", "invariant": "tiles wire own_wire", "tp": "fp8", "ep": "copies", "ep5": "copies",
}  # fmt: skip


FREE = config(router={"num_expert_group": 1, "topk_group": 1})


def is_possible(*names: str) -> bool:
    try:
        FREE.with_(**{key: value for name in names for key, value in SETTINGS[name].items()})
    except ConfigError:
        return False
    return True


def test_settings_exclude_each_other_as_listed_and_no_others() -> None:
    assert all(map(is_possible, SETTINGS))
    found = {one: " ".join(
        other for other in list(SETTINGS)[at:]
        if not SETTINGS[one].keys() & SETTINGS[other].keys() - {"num_shared_experts"} and not is_possible(one, other)
    ) for at, one in enumerate(SETTINGS, 1)}  # fmt: skip
    assert {one: others for one, others in found.items() if others} == REFUSED


@pytest.mark.parametrize(
    "kinds",
    ["bf16 same", "fp8_block same", "fp8_block bf16", "bf16 fp8_block", "bf16 bf16 int8_g32", "int8_g32 bf16 bf16"],
)
def test_a_tp_size_is_legal_exactly_if_every_share_is_whole_and_starts_at_a_block_edge(kinds: str) -> None:
    weights, of_shared, *of_down = kinds.split()
    for share, shared_share, tp, block in product((7, 8, 24, 32), (0, 7, 8, 32), (1, 2, 3), ((8, 32), (32, 8))):
        for width, shared in ((share * tp, shared_share * tp), (share * tp + 1, shared_share * tp)):
            model = {"moe_intermediate_size": width, "num_shared_experts": int(shared > 0)}
            model |= {"shared_intermediate_size": shared or None}
            model |= {
                "quant": {"weights": weights, "shared": of_shared, "block": block}
                | dict(zip(["down"], of_down, strict=False))
            }
            sides = block if "fp8_block" in kinds else (32 if "int8_g32" in of_down else 1,)
            if tp == 1 or all(w % tp == 0 and (w // tp) % side == 0 for w in (width, shared) for side in sides):
                assert config(model=model, parallel={"tp": tp}).parallel.tp == tp
            else:
                with pytest.raises(ConfigError, match=f"parallel.tp={tp} does not divide"):
                    config(model=model, parallel={"tp": tp})


def test_shared_experts_have_one_width_together() -> None:
    shape = {"hidden_size": 8, "moe_intermediate_size": 1408, "num_experts": 4}
    assert ModelConfig.parse(shape, "").shared_size == 0
    assert ModelConfig.parse({**shape, "num_shared_experts": 2}, "").shared_size == 2816
    assert ModelConfig.parse({**shape, "num_shared_experts": 2, "shared_intermediate_size": 100}, "").shared_size == 100
    with pytest.raises(ConfigError, match="shared_intermediate_size=100 but num_shared_experts=0; set num_shared"):
        ModelConfig.parse({**shape, "shared_intermediate_size": 100}, "")


def test_quantisation_names_its_schemes() -> None:
    fp8 = QuantConfig(weights="fp8_block")
    assert fp8.is_fp8 and fp8.weight_scheme == FP8_128x128 and fp8.activation_scheme == FP8_1x128
    ue8m0 = QuantConfig(weights="fp8_block", scale="ue8m0")
    assert ue8m0.weight_scheme == FP8_128x128_UE8M0 and ue8m0.activation_scheme == FP8_1x128_UE8M0
    odd = QuantConfig(weights="fp8_block", block=(64, 32))
    assert odd.weight_scheme == weight_scheme((64, 32)) and odd.activation_scheme == weight_scheme((1, 32))
    assert [QuantConfig(weights=name).weight_scheme for name in ("bf16", "fp16", "fp32")] == [BF16, FP16, FP32]
    assert QuantConfig().activation_scheme is None and not QuantConfig().is_fp8
    with pytest.raises(ConfigError, match=r"block: both sides must be positive, got \(0, 128\)"):
        QuantConfig.parse({"block": (0, 128)}, "")


@pytest.mark.row(5)
def test_a_token_of_deepseek_v3_uses_5_51_percent_of_the_parameters() -> None:
    # 37 of 671 billion
    assert f"{active_fraction(load_config('deepseek_v3')):.2%}" == "5.51%"


def test_without_sizes_the_fraction_is_that_of_the_layer() -> None:
    assert active_fraction(config()) == 4 / 16
    assert active_fraction(config(model={"num_shared_experts": 2})) == (4 + 2) / (16 + 2)
