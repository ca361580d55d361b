"""Hostile settings: every one is a ConfigError, at once, in a message of bearable length."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_mk import MoEConfig
from moe_mk.config.hf import settings_from_hf
from moe_mk.config.hf_quant import quant_from_hf
from moe_mk.errors import ConfigError
from moe_mk.quant.plain import BF16
from moe_mk.shapes import divisors_of
from moe_mk.weights import LayerSpec
from moe_mk.weights.layer_spec import MOST_EXPERTS

LAUGHS = "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)
])  # fmt: skip
"""Twelve lines that stand for 9^12 texts."""


def config(**changes: Any) -> dict[str, Any]:
    model = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
    data: dict[str, Any] = {"model": model, "router": {"top_k": 2}, "kernel": {}, "parallel": {}}
    for key, value in changes.items():
        group, name = key.split("__")
        data[group][name] = value
    return data


@pytest.mark.parametrize("data", [None, 7, "x", [1], ["ab"]])
def test_settings_that_are_no_mapping_are_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^here holds a {type(data).__name__}, expected a mapping of settings"):
        MoEConfig.parse(data, "here")


def test_a_few_lines_that_stand_for_billions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"{LAUGHS}\nmodel: {{hidden_size: *a11}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a.yaml cannot be read: there are more than 100000 values, each alias"):
        MoEConfig.load(file)


def test_a_value_that_stands_for_billions_is_shown_in_short() -> None:
    value: list[Any] = []
    for _ in range(11):
        value = [value] * 10
    with pytest.raises(ConfigError, match=r"model.hidden_size: .*got \[\[\[") as caught:
        MoEConfig.parse(config(model__hidden_size=value), "here")
    assert len(str(caught.value)) < 10 * 1000


def test_a_number_too_long_to_be_written_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.hidden_size: .*at most 63 bits, got one of 33216"):
        MoEConfig.parse(config(model__hidden_size=10**9999), "here")


def test_the_largest_size_is_divided_as_fast_as_a_small_one() -> None:
    assert divisors_of(2**31 - 1) == [1, 2**31 - 1]
    assert divisors_of(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    with pytest.raises(ConfigError, match=r"parallel.tp=2 does not divide .*possible: 1, 2147483647"):
        MoEConfig.parse(config(model__moe_intermediate_size=2**31 - 1, parallel__tp=2), "here")


def test_more_experts_than_anybody_asks_for_by_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=rf"num_experts={MOST_EXPERTS + 1} exceeds {MOST_EXPERTS}"):
        LayerSpec(MOST_EXPERTS + 1, 64, 32, BF16)
    assert LayerSpec(MOST_EXPERTS, 64, 32, BF16).num_experts == MOST_EXPERTS


@pytest.mark.parametrize(
    ("weights", "down", "of_hidden", "of_inter"),
    [("mxfp4", "", 2, 2), ("nvfp4", "", 2, 2), ("q8_0", "", 32, 32), ("q4_k", "", 256, 256), ("bf16", "int4_g32", 1, 2),
     ("int4_g32", "bf16", 2, 1), ("q4_k", "q8_0", 256, 32)],
)  # fmt: skip
def test_packed_values_divide_the_sizes(weights: str, down: str, of_hidden: int, of_inter: int) -> None:
    sizes = {"model__hidden_size": 512 + of_hidden // 2, "model__moe_intermediate_size": 512 + of_inter // 2}
    with pytest.raises(ConfigError) as caught:
        MoEConfig.parse(config(**sizes, model__quant={"weights": weights, **({"down": down} if down else {})}), "here")
    for kind, values, key, setting in (
        (weights, of_hidden, "hidden_size", "weights"),
        (down or weights, of_inter, "moe_intermediate_size", "down" if down else "weights"),
    ):
        stated = f"{kind} weights pack {values} values of a row, which do not divide {key}={512 + values // 2}"
        assert (stated in str(caught.value)) == (values > 1), stated
        assert values == 1 or f"use multiples of {values} or another model.quant.{setting}" in str(caught.value)


def test_a_group_that_is_no_mapping_is_named() -> None:
    with pytest.raises(ConfigError, match="config_groups has no groups but"):
        quant_from_hf({"quant_method": "compressed-tensors", "config_groups": {"g": 3}}, "here")


@pytest.mark.parametrize("text", [3, None, ["x"], {"model_type": "kimi_k25", "text_config": {}}], ids=str)
def test_a_text_model_inside_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"no MoE layer is known for model_type 'kimi_k25'"):
        settings_from_hf({"model_type": "kimi_k25", "text_config": text}, "here")


def test_text_models_inside_each_other_are_not_followed_down(tmp_path: Path) -> None:
    nested: dict[str, Any] = {"model_type": "kimi_k25"}
    for _ in range(900):
        nested = {"model_type": "kimi_k25", "text_config": nested}
    (tmp_path / "config.json").write_text(json.dumps(nested), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no MoE layer is known for model_type 'kimi_k25'"):
        MoEConfig.from_hf(tmp_path)


@pytest.mark.parametrize("quant", [0, "", [], False, 0.0, "fp8", [1]])
def test_a_section_that_is_no_mapping_is_refused_also_where_it_is_empty(quant: Any) -> None:
    hf = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
    hf |= {"num_experts_per_tok": 2, "quantization_config": quant}
    with pytest.raises(ConfigError, match=r"quantization_config is .*, expected a mapping"):
        settings_from_hf(hf, "here")
