"""How experts are stored: settings that fit together, and what each config.json calls them."""

from __future__ import annotations

from typing import Any

import pytest

from moe_mk.config import QuantConfig
from moe_mk.config.hf_quant import quant_from_hf
from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints.dialects import quantization_config
from moe_mk.quant.kinds import KINDS, PLAIN_KINDS

ONE_LAYER = {"num_hidden_layers": 1}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PLAIN_KINDS])
def test_what_we_write_is_what_we_read(kind: str) -> None:
    settings = QuantConfig.parse(quant_from_hf(quantization_config(kind, (128, 128)), "here"), "here")
    assert settings == QuantConfig(weights=kind) and settings.kind == kind  # type: ignore[arg-type]


def compressed(weights: dict[str, Any], tokens: dict[str, Any] | None) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel", **weights}, "input_activations": tokens}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def mixed(**algorithms: str) -> dict[str, Any]:
    layers = {f"model.layers.0.mlp.{name.replace('__', '.')}": {"quant_algo": a} for name, a in algorithms.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def in_fours(tokens: dict[str, Any] | None) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return {**compressed(weights, tokens), "format": "mxfp4-pack-quantized"}


@pytest.mark.parametrize(
    "stated,expected",
    [
        (mixed(experts="NVFP4", shared_experts="MXFP8"), {"weights": "nvfp4", "shared": "mxfp8"}),
        (mixed(experts="FP8", shared_experts="FP8"), {"weights": "fp8_tensor"}),
        (
            mixed(experts__0__gate_proj="W4A16_NVFP4", experts__0__down_proj="W4A16_NVFP4"),
            {"weights": "nvfp4", "activations": "none", "shared": "bf16"},
        ),
        (in_fours(None), {"weights": "mxfp4", "activations": "none"}),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, {"weights": "mxfp4"}),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, {"weights": "mxfp4", "activations": "mxfp8"}),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, {"weights": "nvfp4"}),
    ],
)
def test_other_ways_of_saying_it(stated: dict[str, Any], expected: dict[str, Any]) -> None:
    assert quant_from_hf(stated, "here", ONE_LAYER) == expected


def test_weight_only_int8_rounds_no_activations() -> None:
    assert quant_from_hf(compressed({}, None), "here") == {"weights": "int8", "activations": "none"}


@pytest.mark.parametrize(
    "stated,problem",
    [
        (compressed({"num_bits": 4}, None), r"weights\.num_bits is 4"),
        ({**compressed({"num_bits": 3}, None), "format": "pack-quantized"}, "3 bits in groups of"),
        (
            {**compressed({"group_size": 32, "actorder": "group"}, None), "format": "pack-quantized"},
            r"weights\.actorder is 'group'",
        ),
        (compressed({"strategy": "group"}, None), r"weights\.strategy is 'group', not one of channel, block"),
        (compressed({"symmetric": False}, None), r"weights\.symmetric is False"),
        (compressed({}, {"num_bits": 8, "type": "float"}), r"input_activations are 8-bit 'float'"),
        ({"quant_method": "compressed-tensors"}, "config_groups has no groups but None, one is expected"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (mixed(experts="NVFP4", shared_experts="FP8"), "quantized_layers states 'FP8' for shared experts"),
        (mixed(experts__0__up_proj="NVFP4", experts__0__w2="FP8"), "states NVFP4 and FP8 for experts"),
        (in_fours({"num_bits": 4, "type": "float", "group_size": 32}), "input_activations are .* with MXFP4 weights"),
    ],
)
def test_what_is_not_supported_is_named(stated: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        quant_from_hf(stated, "here", ONE_LAYER)


@pytest.mark.parametrize(
    "settings,problem",
    [
        ({"weights": "int8", "activations": "fp8"}, "'fp8' do not go with int8 weights; use auto, none, int8"),
        ({"weights": "mxfp4", "input_scale": 0.5}, "input_scale=0.5 means nothing for mxfp4 weights; drop it"),
        ({"weights": "bf16", "activations": "nvfp4"}, "'nvfp4' do not go with bf16 weights; use auto, none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        QuantConfig.parse(settings, "here")


def test_activations_by_the_habit_of_a_type_or_as_reported() -> None:
    def named(**settings: Any) -> str | None:
        scheme = QuantConfig(**settings).activation_scheme
        return None if scheme is None else scheme.name

    assert named(weights="mxfp4") is None and named(weights="mxfp4", activations="mxfp8") == "mxfp8"
    assert named(weights="mxfp4", activations="fp8") == "fp8_1x128"
    assert named(weights="mxfp4", activations="fp8", scale="ue8m0") == "fp8_1x128_ue8m0"
    assert named(weights="int8") == "int8_token" and named(weights="int8", activations="none") is None
    assert named(weights="fp8_tensor") == "fp8_token"
    assert named(weights="fp8_tensor", input_scale=0.25) == "fp8_static_x0.25"
    assert named(weights="nvfp4") == "nvfp4_1x16" and named(weights="nvfp4", input_scale=0.5) == "nvfp4_1x16_x0.5"


def test_edges_are_those_of_blocks_and_scales_of_rows_have_none() -> None:
    edges = {kind: QuantConfig(weights=kind).edges for kind in KINDS}  # type: ignore[arg-type]
    assert edges["fp8_block"] == edges["int8_block"] == (128, 128)
    assert edges["mxfp4"] == edges["mxfp8"] == (1, 32) and edges["nvfp4"] == (1, 16)
    assert edges["bf16"] == edges["int8"] == edges["fp8_channel"] == edges["fp8_tensor"] == (1, 1)
