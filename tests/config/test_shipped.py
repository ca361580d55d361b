"""The configurations that come with the library load, are what they say, and survive a round trip."""

import json
from pathlib import Path

import pytest
import yaml

from moe_mk.config import (
    DeviceProfile,
    MoEConfig,
    config_folder,
    device_profile,
    load_config,
    shipped_devices,
    shipped_models,
)
from moe_mk.errors import ConfigError


def test_what_is_promised_is_there() -> None:
    assert {"deepseek_v3", "deepseek_v2_lite", "kimi_k2", "qwen3_moe", "glm_4_5", "mixtral_8x7b", "tiny"} <= set(
        shipped_models()
    )
    assert {"cpu", "h100", "h200", "b200", "mi300x"} <= set(shipped_devices())
    assert all(path.parent.parent == config_folder() for path in shipped_models().values())


@pytest.mark.row(5)
@pytest.mark.parametrize("name", shipped_models())
def test_every_model_survives_yaml_and_json(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    data = config.model_dump(mode="json")
    assert MoEConfig.parse(data, "dump") == MoEConfig.parse(config.model_dump(), "dump") == config
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(data), encoding="utf-8")
    assert load_config(tmp_path / "a.yaml") == load_config(str(tmp_path / "a.json")) == config
    assert load_config(shipped_models()[name]) == config


@pytest.mark.parametrize("name", shipped_devices())
def test_every_device_survives_yaml_and_is_called_what_its_file_is(name: str, tmp_path: Path) -> None:
    profile = device_profile(name)
    assert profile.name == name and (profile.arch is not None) == (profile.kind == "cuda")
    assert bool(profile.gfx) == (profile.kind == "rocm")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(profile.model_dump(mode="json")), encoding="utf-8")
    assert device_profile(tmp_path / "mine.yaml") == DeviceProfile.parse(profile.model_dump(), "dump") == profile


@pytest.mark.row(5)
def test_deepseek_v3_by_hand() -> None:
    config = load_config("deepseek_v3")
    model, router = config.model, config.router
    assert (model.hidden_size, model.moe_intermediate_size, model.num_experts, model.num_shared_experts) == (
        7168, 2048, 256, 1,
    )  # fmt: skip
    assert (router.top_k, router.num_expert_group, router.topk_group) == (8, 8, 4)
    assert (router.scoring_func, router.has_correction_bias, router.renormalize) == ("sigmoid", True, True)
    assert router.routed_scaling_factor == 2.5 and model.quant.weight_scheme.name == "fp8_128x128"
    # 256 experts of three FP8 matrices with their scales: 11.3 GB
    per_expert = 3 * model.quant.weight_scheme.num_bytes(2048, 7168)
    assert 256 * per_expert == pytest.approx(11.3e9, rel=0.005)


def test_a_folder_or_config_json_is_of_transformers(tmp_path: Path) -> None:
    mixtral = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
               "num_experts_per_tok": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(mixtral), encoding="utf-8")
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == load_config("mixtral_8x7b")


def test_what_is_not_there_is_answered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="deepseek_v4 is neither a file nor a shipped model; did you mean 'deep"):
        load_config("deepseek_v4")
    with pytest.raises(ConfigError, match=r"h300 is neither a file nor a shipped device; did you mean 'h[12]00'\?"):
        device_profile("h300")
    with pytest.raises(ConfigError, match=f"{tmp_path} has no config.json; name the folder of a downloaded checkpoint"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="deepseek-ai/DeepSeek-V3 does not exist; name the folder"):
        MoEConfig.from_hf("deepseek-ai/DeepSeek-V3")
