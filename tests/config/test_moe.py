"""The settings of a layer: fields that must fit each other, overrides, derived sizes."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

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


@pytest.mark.parametrize(
    "router, problem",
    [
        ({"top_k": 17, "topk_group": 4}, r"router.top_k=17 exceeds model.num_experts=16; lower top_k"),
        ({"topk_group": 5}, r"router.topk_group=5 exceeds router.num_expert_group=4; keep at most 4 groups"),
        (
            {"num_expert_group": 3},
            r"model.num_experts=16 does not divide into router.num_expert_group=3 .*use 2 groups",
        ),
        (
            {"topk_group": 1, "top_k": 5},
            r"router.topk_group=1 groups of 4 experts leave 4 to choose router.top_k=5 from; keep 2 groups or more",
        ),
    ],
)
def test_a_router_that_does_not_fit_the_model_is_refused_with_a_fix(router: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^test: {problem}"):
        config(router=router)


def test_all_problems_across_groups_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"router.top_k=17.*router.topk_group=5.*parallel.ep=17.*parallel.tp=3"):
        config(router={"top_k": 17, "topk_group": 5}, parallel={"ep": 17, "tp": 3})


@pytest.mark.row(31)
@pytest.mark.parametrize(
    "model, parallel, problem",
    [
        (
            {},
            {"ep": 17},
            r"parallel.ep=17 exceeds model.num_experts=16, which leaves ranks without experts; use 1 to 16 ranks",
        ),
        (
            {},
            {"ep": 6, "placement": [*range(16)]},
            r"parallel.ep=6 does not divide the length of parallel.placement=16; add 2 replicas or use 2 ranks",
        ),
        (
            {},
            {"ep": 32, "placement": [*range(16), *range(4)]},
            r"parallel.ep=32 exceeds the length of parallel.placement=20",
        ),
        (
            {"quant": {"weights": "fp8_block"}, "moe_intermediate_size": 2048, "num_shared_experts": 1,
             "shared_intermediate_size": 768},
            {"tp": 4},
            r"parallel.tp=4 does not divide model.moe_intermediate_size=2048 and 768 of the shared experts "
            r"at the edges of 128x128 blocks; possible: 1, 2$",
        ),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit_are_refused_by_field(
    model: dict[str, Any], parallel: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(model=model, parallel=parallel)


@pytest.mark.parametrize(
    "model, parallel",
    [
        ({}, {"ep": 16}),
        ({}, {"ep": 5}),  # uneven ranks are fine
        ({}, {"ep": 20, "placement": [*range(16), *range(4)]}),  # more ranks than experts, with replicas
        ({"num_shared_experts": 2}, {"tp": 8}),
    ],
)
def test_degrees_that_fit_are_taken(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    made = config(model=model, parallel=parallel)
    assert made.parallel.model_dump(mode="json", include=set(parallel)) == parallel


SHARES = st.sampled_from([0, 7, 8, 16, 24, 32, 64])


@given(SHARES, st.integers(1, 4), st.sampled_from([(1, 1), (16, 16), (8, 32), (32, 8)]), SHARES, st.booleans())
def test_a_tp_size_is_legal_exactly_if_every_share_is_whole_and_starts_at_a_block_edge(
    share: int, tp: int, block: tuple[int, int], shared_share: int, is_whole: bool
) -> None:
    width, shared = share * tp + (not is_whole or not share), shared_share * tp
    quant = {"weights": "fp8_block", "block": block} if block != (1, 1) else {}
    model = {"moe_intermediate_size": width, "quant": quant, "num_shared_experts": int(shared > 0)}
    model |= {"shared_intermediate_size": shared or None}
    legal = tp == 1 or all(w % tp == 0 and (w // tp) % side == 0 for w in (width, shared) for side in block)
    if legal:
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


def test_overrides_are_checked_like_everything_else() -> None:
    before = config()
    with pytest.raises(ConfigError, match=r"unknown setting 'expert'; did you mean 'experts'\?"):
        before.with_(expert="torch_cpu")
    with pytest.raises(ConfigError, match="overrides: router.top_k=99 exceeds model.num_experts=16"):
        before.with_(top_k=99, topk_group=4)
    with pytest.raises(ConfigError, match="kernel.graphs: .*got 'perhaps'"):
        before.with_(graphs="perhaps")
    assert before == config()


def test_no_key_stands_in_two_groups() -> None:
    # Otherwise an override by bare key could not be placed.
    groups = [field.annotation for field in MoEConfig.model_fields.values()]
    keys = [key for cls in groups if isinstance(cls, type) and issubclass(cls, BaseModel) for key in cls.model_fields]
    assert len(keys) == len(set(keys)) > 20
