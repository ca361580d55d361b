"""transformers' own configurations, family by family, and what is refused in them."""

import json
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import transformers

from moe_mk.config import MoEConfig, load_config
from moe_mk.config.hf import settings_from_hf
from moe_mk.errors import ConfigError
from tests.config.test_keys import EQUATION, MODELOPT, full

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def saved(made: transformers.PreTrainedConfig, **changes: Any) -> dict[str, Any]:
    """What `save_pretrained` would write, as parsed JSON."""
    return {**json.loads(made.to_json_string()), **changes}


def deepseek_v3(**changes: Any) -> dict[str, Any]:
    return saved(transformers.DeepseekV3Config(), **changes)


def written(folder: Path, hf: Mapping[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    return folder


def plain(name: str) -> MoEConfig:
    """A shipped model as its plain twin: without quantisation and sizes that no config.json has."""
    return load_config(name).with_(quant={}, total_params_b=None, active_params_b=None)


CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], MoEConfig]]] = {
    "deepseek_v3": (lambda: deepseek_v3(quantization_config=FP8), lambda: plain("deepseek_v3").with_(
        quant={"weights": "fp8_block"})),
    "deepseek_v3 in bf16": (deepseek_v3, lambda: plain("deepseek_v3")),
    "kimi_k2": (lambda: deepseek_v3(
        model_type="kimi_k2", n_routed_experts=384, n_group=1, topk_group=1, routed_scaling_factor=2.827,
        topk_method="noaux_tc", scoring_func="sigmoid", quantization_config=FP8), lambda: load_config("kimi_k2")),
    "deepseek_v2_lite": (lambda: saved(transformers.DeepseekV2Config(
        hidden_size=2048, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False)), lambda: load_config("deepseek_v2_lite")),
    "qwen3_moe": (lambda: saved(transformers.Qwen3MoeConfig(
        hidden_size=4096, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)),
        lambda: load_config("qwen3_moe")),
    "glm_4_5": (lambda: saved(transformers.Glm4MoeConfig(
        hidden_size=5120, moe_intermediate_size=1536, n_routed_experts=160, n_shared_experts=1, num_experts_per_tok=8,
        routed_scaling_factor=2.5, norm_topk_prob=True)), lambda: load_config("glm_4_5")),
    "deepseek_v4_flash": (lambda: saved(transformers.DeepseekV4Config(), expert_dtype="fp4", quantization_config=FP8),
                          lambda: load_config("deepseek_v4_flash")),
    "deepseek_v4_flash in bf16": (lambda: saved(transformers.DeepseekV4Config()), lambda: plain("deepseek_v4_flash")),
    "mixtral_8x7b": (lambda: saved(transformers.MixtralConfig()), lambda: load_config("mixtral_8x7b")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_config_of_transformers_is_the_shipped_model(name: str, tmp_path: Path) -> None:
    hf, shipped = CASES[name]
    read = MoEConfig.from_hf(written(tmp_path, hf()), experts="torch_cpu")
    assert read == shipped().with_(experts="torch_cpu")


@pytest.mark.parametrize("wrapper", ["deepseek_v3 text_config", "new_vl llm_config", "kimi_k2 language_config"])
def test_wrappers_keep_their_text_model_inside(wrapper: str) -> None:
    text, (name, section) = deepseek_v3(hidden_act="swish"), wrapper.split()
    expected = settings_from_hf({**text, "hidden_act": "silu"}, "here")
    if name == text["model_type"]:
        del text["model_type"]  # that of the whole model
    assert settings_from_hf({"model_type": name, section: text}, "here") == expected


def of_class(family: str, **changes: Any) -> dict[str, Any]:
    return saved(transformers.AutoConfig.for_model(family), **changes)


V2 = {"n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0, "norm_topk_prob": False}
UNSHARED = EQUATION | {"model_type": "deepseek_v3", "config": {}}
READINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((deepseek_v3(**{key: dtype}), {"model.quant": {"weights": kind}}) for key in ("dtype", "torch_dtype")
      for dtype, kind in (("float16", "fp16"), ("float32", "fp32"), ("torch.bfloat16", "bf16"))),
    ({"model_type": "kimi_k25", "dtype": "float16", "text_config": full("deepseek_v3", torch_dtype=None)},
     {"model.quant.weights": "fp16"}),
    (full("deepseek_v2", **V2, topk_method="group_limited_greedy"), {"router.num_expert_group": 8,
     "router.topk_group": 3, "router.scoring_func": "softmax", "router.renormalize": False,
     "router.routed_scaling_factor": 16.0}),
    (full("deepseek_v2", **V2, topk_method="greedy"), {"router.num_expert_group": 1, "router.topk_group": 1}),
    (full("deepseek_v4", vision_n_layers=2, vocab_size=99), {"router.first_image_token": 99}),
    (full("gpt_oss"), {"model.stacks_transposed": True}),
    (full("gpt_oss", quantization_config={"quant_method": "mxfp4"}), {"model.stacks_transposed": False}),
    (of_class("mistral4", n_group=2, topk_group=1), {"router.group_score": "two_best"}),
    (of_class("hy_v4", n_shared_experts=1, swiglu_limit=7.0), {
        "model.activation": "swiglu_limit", "model.swiglu_limit": 7.0, "model.shared_activation": "silu"}),
    (of_class("kimi_linear", hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
              routed_expert_hidden_size=64, latent_moe_use_norm=False),
     {"model.activation": "situ", "model.swiglu_limit": 25.0, "model.swiglu_alpha": 4.0, "model.latent_size": 64,
      "model.latent_norm": None}),
    (full("minimax_m2", use_routing_bias=False), {"router.has_correction_bias": False}),
    (full("deepseek_v3", layer_equation=UNSHARED, quantization_config={**MODELOPT, "ignore": ["*shared_experts*"]}),
     {"model.quant": {"weights": "nvfp4"}}),
    ({"model_type": "x", "text_config": {**UNSHARED, "quantization_config": {
        "quant_method": "compressed-tensors", "moe_sparsity_config": {"method": "prune", "num_experts": [3, 3]}}},
      "layer_equation": UNSHARED}, {"model.num_experts": 3}),
    (full("qwen3_moe", quantization={"bits": 4, "group_size": 64, "model.layers.0.mlp.gate": True}),
     {"model.quant.weights": "int4_g64_affine"}),
]  # fmt: skip


@pytest.mark.parametrize(("hf", "expected"), READINGS)
def test_a_configuration_is_read_as_its_class_computes(hf: dict[str, Any], expected: dict[str, Any]) -> None:
    read = settings_from_hf(hf, "here")
    for path, value in expected.items():
        assert reduce(dict.get, path.split("."), read) == value, path
    assert MoEConfig.parse(read, "here")


def test_the_fp8_configuration_of_transformers_itself_is_read() -> None:
    quant = transformers.FineGrainedFP8Config(weight_block_size=(64, 128)).to_dict()
    config = MoEConfig.parse(settings_from_hf(deepseek_v3(quantization_config=quant), "here"), "here")
    assert config.model.quant.is_fp8 and config.model.quant.block == (64, 128)


@pytest.mark.parametrize(
    "hf, problem",
    [
        ({"model_type": "llama"}, r"here: no MoE layer is known for model_type 'llama'.*known: .*deepseek_v3"),
        ({"model_type": "deepseek_v"}, r"did you mean 'deepseek_v[234]'"),
        ({}, "no MoE layer is known for model_type ''"),
        ({"model_type": "gemma4_text", "hidden_size": 8, "enable_moe_block": False}, "enable_moe_block is False"),
        (full("longcat_flash", per_layer_config={"1": {"moe_topk": 3}}), "layer 1: moe_topk"),
        (full("qwen3_moe", quantization={"bits": 4}, quantization_config={"bits": 8}), "quantization and .* differ"),
        ({"model_type": "mixtral", "hidden_size": 8}, "none of intermediate_size is given; is this a MoE model"),
    ],
)
def test_what_is_no_moe_model_of_ours_is_refused(hf: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings_from_hf(hf, "here")


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size", "num_experts_per_tok"])
def test_a_missing_key_is_named_and_never_guessed(key: str) -> None:
    # Without moe_intermediate_size the intermediate_size of the dense layers must not be taken.
    hf = deepseek_v3()
    del hf[key]
    with pytest.raises(ConfigError, match=f"here: none of {key}.* is given"):
        settings_from_hf(hf, "here")


OWN: dict[str, Any] = {
    "num_experts_per_tok": 4, "norm_topk_prob": False, "moe_intermediate_size": 1408,
    "num_key_value_heads": 1, "skip": ["mlp"],
}  # fmt: skip


@pytest.mark.parametrize("key", OWN)
def test_values_that_layers_have_of_their_own_are_theirs_alone(key: str) -> None:
    """`per_layer_config` of transformers 5.24."""
    hf = transformers.Qwen3MoeConfig().to_dict()
    stated = hf | {"per_layer_config": {"1": {key: OWN[key]}}}
    assert settings_from_hf(stated, "x", 2) == settings_from_hf(hf, "x", 2)
    expected = settings_from_hf(hf | ({key: OWN[key]} if key != "skip" else {}), "x", 1)
    assert settings_from_hf(stated, "x", 1) == expected
    if expected == settings_from_hf(hf, "x"):
        assert settings_from_hf(stated, "x") == expected
        return
    with pytest.raises(ConfigError, match=rf"per_layer_config differs \(layer 1: {key}\); name one: from_hf"):
        settings_from_hf(stated, "x")


@pytest.mark.parametrize("stated", [{"a": {"head_dim": 1}}, {"1": 3}, [1]])
def test_a_list_of_own_values_that_is_none_is_refused(stated: Any) -> None:
    with pytest.raises(ConfigError, match="per_layer_config is no table"):
        settings_from_hf(transformers.Qwen3MoeConfig().to_dict() | {"per_layer_config": stated}, "x")
