"""How experts are stored: settings that fit together, and what each config.json calls them."""

import json
from pathlib import Path
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
    made = QuantConfig.parse(quant_from_hf(quantization_config(kind, (128, 128)), "here"), "here")
    stated = "dynamic" if kind in ("fp8_channel", "fp8_tensor") else None
    assert made == QuantConfig(weights=kind, activation_scales=stated) and made.kind == kind  # type: ignore[arg-type]


@pytest.mark.parametrize("stated,expected", json.loads(Path(__file__).with_name("quant_sections.json").read_text()))
def test_a_section_is_read_or_what_is_not_supported_is_named(stated: dict[str, Any], expected: Any) -> None:
    if not isinstance(expected, str):
        assert quant_from_hf(stated, "here", ONE_LAYER) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        quant_from_hf(stated, "here", ONE_LAYER)


@pytest.mark.parametrize(
    "settings,problem",
    [
        ({"weights": "int8", "activations": "fp8"}, "'fp8' do not go with int8 weights; use auto, none, int8"),
        ({"weights": "mxfp4", "input_scale": 0.5}, "input_scale=0.5 means nothing for mxfp4 weights; drop it"),
        ({"weights": "bf16", "activations": "nvfp4"}, "'nvfp4' do not go with bf16 weights; use auto, none"),
        ({"weights": "nvfp4", "input_scale": 0.5, "hidden_scale": 0.5}, "goes with the input_scale of FP8 weights"),
        ({"weights": "fp8_tensor", "hidden_scale": 0.5}, "goes with the input_scale of FP8 weights; give both"),
        ({"weights": "int4_g128", "gptq_v2": True}, "zero points, which int4_g128 weights do not have"),
        ({"weights": "fp8_block", "down": "mxfp4"}, "down='mxfp4' with 'fp8_block': only bf16, .* can be mixed"),
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
    assert named(weights="fp8_block", block=(128, 64)) == "fp8_1x64", "as wide as blocks, whatever their height"
    shared = QuantConfig(weights="nvfp4", shared="fp8_block", block=(128, 64)).shared_activations
    assert shared is not None and shared.name == "fp8_1x64"


def test_edges_are_those_of_blocks_and_scales_of_rows_have_none() -> None:
    edges = {kind: QuantConfig(weights=kind).edges for kind in KINDS}  # type: ignore[arg-type]
    assert edges["fp8_block"] == edges["int8_block"] == (128, 128)
    assert edges["mxfp4"] == edges["mxfp8"] == (1, 32) and edges["nvfp4"] == (1, 16)
    assert edges["bf16"] == edges["int8"] == edges["fp8_channel"] == edges["fp8_tensor"] == (1, 1)
