"""Lists of modules select what their writers select: transformers' own matching on every name, others as recorded."""

import json
import random
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.quantizers_utils import should_convert_module

from moe_mk.config import MoEConfig
from moe_mk.config.hf import FAMILIES, module_names, section_of, text_of
from moe_mk.config.hf_quant import LISTS
from moe_mk.config.modules import Block, Module, layers_with_experts, matcher, of_checkpoint, of_names
from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints.like import write_like
from moe_mk.layer.settings import config_of
from tests.config.test_published import BY_LAYER, PUBLISHED, REFUSED, published, written

READ = sorted(PUBLISHED.keys() - REFUSED.keys())
QWEN = published("Qwen--Qwen3-30B-A3B")["config"]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
INT4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def read(folder: Path, quant: dict[str, Any], layer: int | None = None, config: dict[str, Any] = QWEN) -> str:
    """The kind of the experts, and of shared ones where it is another one."""
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quant}))
    found = MoEConfig.from_hf(folder, layer=layer).model.quant
    return found.weights if found.shared in ("same", found.weights) else f"{found.weights} {found.shared}"


def every_module(name: str) -> Iterator[Module]:
    """All linear maps of the experts of a published model."""
    hf = published(name)["config"]
    text = text_of(hf)
    block = module_names(hf, MoEConfig.parse(config_settings(name), name).model.name)
    experts = next((text[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if text.get(key)), 8)
    block = Block(block.prefix, block.experts, block.shared, layers_with_experts(text), experts, every=False)
    yield from block.modules("experts")
    yield from block.modules("shared_experts")


def config_settings(name: str) -> dict[str, Any]:
    from moe_mk.config.hf import settings_from_hf

    return settings_from_hf(
        {**published(name)["config"], "quantization_config": None}, name, 3 if name in BY_LAYER else None
    )


def drawn(draw: random.Random, names: list[str]) -> list[str]:
    """A list of modules as people write them: names, starts and ends of names, and expressions."""
    made = []
    for _ in range(draw.randint(1, 4)):
        parts = draw.choice(names).split(".")
        some = parts[draw.randrange(len(parts)) :][: draw.randint(1, 6)]
        text = ".".join(some)
        made.append(draw.choice((
            text, ".".join(parts[: draw.randint(1, len(parts))]), parts[-1], text.replace(".", r"\."), f".*{text}.*",
            f"(?!.*{some[0]}).*", f".*{some[-1]}$", ".".join("*" if each.isdigit() else each for each in parts),
            text + ".*", ".".join(r"\d+" if each.isdigit() else each for each in parts), f"{parts[0]}|{some[-1]}",
        )))  # fmt: skip
    return made


@pytest.mark.parametrize("name", [*READ[::6], "google--gemma-4-26B-A4B", "openai--gpt-oss-20b"])
def test_lists_of_transformers_select_what_its_own_function_selects(name: str) -> None:
    modules, draw = list(every_module(name)), random.Random(name)
    names = [module.name for module in modules]
    stated = published(name)["config"].get("quantization_config") or {}
    lists = [
        list(stated[key])
        for key in LISTS
        if stated.get(key) and not {"quant_algo", "global_quant_config"} & stated.keys()
    ]
    lists += [drawn(draw, names) for _ in range(8)]
    for patterns in lists:
        fits = matcher("transformers", patterns)
        for module in draw.sample(modules, min(len(modules), 120 if len(patterns) < 50 else 12)):
            left = not should_convert_module(module.name, patterns)
            left |= module.holder != "" and not should_convert_module(module.holder, patterns)
            assert fits(module) == left, (module, patterns)


def test_a_list_selects_whole_layers_projections_and_roles_by_the_names_of_the_family(tmp_path: Path) -> None:
    whole = {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.1", "model.layers.2"]}
    kinds = {layer: read(tmp_path, whole, layer) for layer in (0, 1, 2, 10, 12, 20, 47)}
    assert {layer for layer, kind in kinds.items() if kind == "bf16"} == {1, 2}
    with pytest.raises(ConfigError, match=r"none in layers 1, 2 .name one: layer=N"):
        read(tmp_path, whole)
    ahead = {**GPTQ, "dynamic": {r"-:(?!.*\.experts\.).*": {}}}
    assert read(tmp_path, ahead) == "int4_g128"
    assert read(tmp_path, {**GPTQ, "dynamic": {r"-:(?!.*self_attn).*": {}}}) == "bf16"
    attention = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]
    assert read(tmp_path, {**GPTQ, "modules_in_block_to_quantize": attention}) == "bf16"
    inner = {**GPTQ, "modules_in_block_to_quantize": ["gate_proj", "up_proj", "down_proj"]}
    assert read(tmp_path, inner) == "int4_g128"
    assert read(tmp_path, {**GPTQ, "block_name_to_quantize": "model.visual.blocks"}) == "bf16"


def test_targets_of_routed_experts_leave_shared_ones(tmp_path: Path) -> None:
    deepseek = {**published("deepseek-ai--DeepSeek-V3")["config"], "quantization_config": None}
    quant = {**PACKED, "config_groups": {"g": {**INT4, "targets": [r"re:.*mlp\.experts\..*"]}}}
    assert read(tmp_path, quant, 5, deepseek) == "int4_g128 bf16"
    assert read(tmp_path, quant, None, deepseek) == "int4_g128 bf16"
    both = {**PACKED, "config_groups": {"g": {**INT4, "targets": [r"re:.*experts\..*"]}}}
    assert read(tmp_path, both, 5, deepseek) == "int4_g128"


@pytest.mark.parametrize("odd", [4, 23, 46])
def test_a_layer_that_is_neither_first_nor_middle_nor_last_counts(odd: int, tmp_path: Path) -> None:
    ignore = [rf"re:.*layers\.{odd}\.mlp\.experts\..*"]
    quant = {**PACKED, "config_groups": {"g": {**INT4, "targets": ["Linear"]}}, "ignore": ignore}
    assert [read(tmp_path, quant, layer) for layer in (odd, odd - 1, odd + 1)] == ["bf16", "int4_g128", "int4_g128"]
    with pytest.raises(ConfigError, match=f"none in layers {odd} .name one: layer=N"):
        read(tmp_path, quant)


def test_an_expert_with_a_format_of_its_own_is_named(tmp_path: Path) -> None:
    for expert in (3, 77, 127):
        left = [f"model.layers.9.mlp.experts.{expert}.{word}_proj" for word in ("gate", "up", "down")]
        quant = {**PACKED, "config_groups": {"g": {**INT4, "targets": ["Linear"]}}, "ignore": left}
        with pytest.raises(ConfigError, match=f"experts: experts {expert} of layer 9 are left as they are"):
            read(tmp_path, quant, 9)
        assert read(tmp_path, quant, 8) == "int4_g128"
    with pytest.raises(ConfigError, match="experts: experts 127 of layer 9 are left as they are"):
        read(tmp_path, quant)


def test_lists_that_name_modules_under_another_root_are_refused_and_not_skipped(tmp_path: Path) -> None:
    listed = {f"language_model.model.layers.{n}.mlp.experts": {"quant_algo": "NVFP4"} for n in range(48)}
    quant = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    with pytest.raises(ConfigError, match=r"name language_model.model.layers.0.mlp.experts, .*called model.layers.0"):
        read(tmp_path, quant)


def test_of_nested_names_the_innermost_one_decides(tmp_path: Path) -> None:
    kinds = {"NVFP4": "nvfp4", "MXFP8": "mxfp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel"}
    mlp = "model.layers.9.mlp"
    own = [f"{mlp}.experts.{e}.{word}_proj" for e in range(128) for word in ("gate", "up", "down")]
    levels = [["model.layers.9"], [mlp], [f"{mlp}.experts"], own]
    for chosen in permutations(range(4), 2):
        of_levels = dict(zip(chosen, kinds, strict=False))
        listed = {name: {"quant_algo": of_levels[level]} for level in chosen for name in levels[level]}
        quant = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
        assert read(tmp_path, quant, 9) == kinds[of_levels[max(chosen)]], of_levels


def test_names_are_those_of_the_tensors_where_a_folder_has_them(tmp_path: Path) -> None:
    """A checkpoint under other names than those of its family: a list is about the names that it has."""
    names = [
        f"text.layers.{n}.moe_block.experts.{e}.{w}.weight" for n in (0, 3) for e in (0, 1) for w in ("w1", "w2", "w3")
    ]
    names.insert(0, "draft.0.moe_block.experts.0.gate_proj.weight")
    block = of_names([*names, "text.layers.3.moe_block.shared_expert.w1.weight", "mtp.0.moe_block.experts.0.w1.weight"])
    assert block is not None and block.prefix == "text.layers.{N}.moe_block." and block.layers == (0, 3)
    assert block.experts == ("experts.{e}.w1", "experts.{e}.w3", "experts.{e}.w2") and block.shared == (
        "shared_expert.w1",
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a")}))
    ignored = {**PACKED, "config_groups": {"g": {**INT4, "targets": ["Linear"]}}, "ignore": ["re:text.layers.3.moe_.*"]}
    assert (read(tmp_path, ignored, 3), read(tmp_path, ignored, 0)) == ("bf16", "int4_g128")
    assert read(tmp_path, ignored, None, {**QWEN, "num_hidden_layers": 3}) == "int4_g128", "layer 3 predicts tokens"
    (tmp_path / "model.safetensors.index.json").write_text("[]")  # which the loader reports
    assert read(tmp_path, ignored, 3) == "int4_g128"


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_the_names_of_a_family_are_those_of_a_small_checkpoint(name: str, tmp_path: Path) -> None:
    """As `weights.names` spells them; stacks of all experts are one module where they are not quantised by module."""
    (tmp_path / "like").mkdir()
    number = write_like(tmp_path / "small", written(tmp_path / "like", name))
    found, config = of_checkpoint(tmp_path / "small"), config_of(tmp_path / "small", number)
    ours = module_names(published(name)["config"], config.model.name)
    assert found is not None and found.prefix == ours.prefix and found.layers == (number,)
    if found.experts != ("experts",):
        assert found.experts == ours.experts
    assert not config.model.num_shared_experts or found.shared == ours.shared


LAYERS: list[tuple[dict[str, Any], list[int]]] = [
    ({"num_hidden_layers": 5, "first_k_dense_replace": 2}, [2, 3, 4]),
    ({"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
    ({"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5]),
    ({"num_hidden_layers": 6, "moe_layers_enum": "3,4,5"}, [3, 4, 5]),
    ({"num_hidden_layers": 6, "moe_layers": [1, 3]}, [1, 3]),
    ({"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "moe_layer_freq": 1}, [1, 3]),
    ({"num_hidden_layers": 4, "moe_layer_freq": [0, 1, 0, 1]}, [1, 3]),
    ({"num_hidden_layers": 4, "hybrid_override_pattern": "M*EE"}, [2, 3]),
    ({"num_hidden_layers": 10**9}, [0]), ({"num_hidden_layers": 10**400}, [0]), ({}, [0]),
]  # fmt: skip


@pytest.mark.parametrize(("stated", "layers"), LAYERS)
def test_layers_with_experts(stated: dict[str, Any], layers: list[int]) -> None:
    assert list(layers_with_experts(stated)) == layers


def test_every_family_has_one_template() -> None:
    for family in FAMILIES:
        for hf in ({"model_type": family}, {"model_type": "outer", "text_config": {"model_type": family}}):
            block = module_names(hf, family)
            assert block.prefix.count("{N}") == 1 and block.experts and section_of(hf) in (None, "text_config")
