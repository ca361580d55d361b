"""A checkpoint at a glance, sound or not, from headers alone."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_mk.errors import WeightError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.lab.checkpoints import write_checkpoint
from moe_mk.lab.checkpoints.like import tensors_of
from moe_mk.lab.cli.checkpoints import config_problems
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.weights import CONVENTIONS, LayerSpec, SafetensorsSource, inspect_checkpoint, load_layer

PREFIX = "model.layers.3.mlp."


def test_a_sound_checkpoint_is_described(tiny_directory: Path) -> None:
    facts = inspect_checkpoint(tiny_directory)
    assert facts.sound
    assert (facts.model_type, facts.quant_method, facts.block) == ("deepseek_v3", "fp8", (16, 16))
    assert facts.num_files == len(list(tiny_directory.glob("*.safetensors")))
    assert facts.num_bytes == sum(path.stat().st_size for path in tiny_directory.glob("*.safetensors"))
    (layer,) = facts.layers
    assert (layer.layer, layer.prefix, layer.convention) == (3, PREFIX, "official")
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (4, 64, 32)
    assert (layer.shared_intermediate_size, layer.has_gate_bias) == (32, True)
    assert (layer.dtype, layer.scale_dtype, layer.block) == ("F8_E4M3", "F32", (16, 16))
    assert facts.num_tensors == layer.num_tensors == 2 + 5 * 3 * 2
    assert layer.num_bytes == 512 + 16 + 5 * 3 * (2048 + 32)


def test_no_weight_is_opened(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafetensorsSource, "open", Mock(side_effect=AssertionError("a tensor was opened")))
    assert inspect_checkpoint(tiny_directory).sound


def test_a_file_is_described_with_the_config_in_its_folder(tiny_directory: Path, tmp_path: Path) -> None:
    state = {name: tensor for file in tiny_directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file(state, tmp_path / "one.safetensors")
    shutil.copy(tiny_directory / "config.json", tmp_path)
    facts, whole = inspect_checkpoint(tmp_path / "one.safetensors"), inspect_checkpoint(tiny_directory)
    assert facts.sound and (facts.model_type, facts.quant_method, facts.block) == ("deepseek_v3", "fp8", (16, 16))
    assert facts.num_files == 1 and facts.layers == whole.layers
    (tmp_path / "another.gguf").touch()
    assert inspect_checkpoint(tmp_path).layers == whole.layers, "of a folder with both, safetensors"


def test_facts_go_into_json(tiny_directory: Path) -> None:
    stated = json.loads(json.dumps(inspect_checkpoint(tiny_directory).as_dict()))
    assert stated["sound"] is True
    assert stated["layers"][0]["block"] == [16, 16]


@pytest.mark.parametrize("convention", ["fused", "stacked", "mixtral", "converted"])
def test_other_conventions_are_recognised_without_a_config(
    renamed: Callable[[str], dict[str, Tensor]], tmp_path: Path, convention: str
) -> None:
    state = renamed(convention)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [16, 16]}}))
    facts = inspect_checkpoint(tmp_path)
    assert facts.sound, facts
    assert (facts.layers[0].convention, facts.layers[0].num_experts) == (convention, 4)
    (tmp_path / "config.json").unlink()
    without = inspect_checkpoint(tmp_path)
    assert (without.model_type, without.block) == ("", None)
    assert any("of a wrong shape" in problem for problem in without.layers[0].problems)  # 128 x 128 is assumed


def test_several_layers_are_listed_in_order(tiny: Shape, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(tiny, layers=(10, 2), quant="bf16"))
    facts = inspect_checkpoint(tmp_path)
    assert [(layer.layer, layer.dtype, layer.scale_dtype) for layer in facts.layers] == [
        (2, "BF16", ""),
        (10, "BF16", ""),
    ]
    assert facts.sound


def test_damage_is_listed_with_its_layer(tiny_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_directory, tmp_path / "damaged")
    shards = sorted((tmp_path / "damaged").glob("*.safetensors"))
    os.truncate(shards[0], shards[0].stat().st_size - 1)
    shards[1].unlink()
    index = json.loads((tmp_path / "damaged" / "model.safetensors.index.json").read_text())
    del index["weight_map"][f"{PREFIX}experts.3.up_proj.weight"]
    index["weight_map"][f"{PREFIX}surprise"] = shards[0].name
    (tmp_path / "damaged" / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = inspect_checkpoint(tmp_path / "damaged")
    assert not facts.sound
    missing = f"{shards[1].name} is named by the index but does not exist in {tmp_path / 'damaged'}"
    assert facts.problems == (missing,)
    reported = "\n".join(facts.layers[0].problems)
    assert f"{missing} (" in reported
    assert f"{shards[0].name} does not hold tensors that the index looks for there (1 tensors" in reported
    assert "1 experts are half filled: expert 3 lacks experts.3.up_proj.weight" in reported
    assert "1 tensors are unexpected: surprise" in reported
    assert "1 tensors are cut off" in reported


def test_a_layer_of_an_unknown_kind_states_why(tmp_path: Path) -> None:
    packed = {f"layers.0.ffn.experts.0.w{i}.weight": torch.zeros((4, 4), dtype=torch.int8) for i in (1, 2, 3)}
    save_file(packed, tmp_path / "a.safetensors")
    (layer,) = inspect_checkpoint(tmp_path).layers
    assert layer.problems == ("expert weights of dtype I8 are not supported",)
    save_file({"layers.0.ffn.experts.0.w1.weight": torch.zeros((4, 4))}, tmp_path / "a.safetensors")
    (layer,) = inspect_checkpoint(tmp_path).layers
    assert layer.problems == ("no expert has a down projection",)
    with pytest.raises(WeightError, match="layer 0 cannot be described: no expert has a down projection"):
        layer.layer_spec()


def test_a_dense_checkpoint_and_a_broken_config_are_problems(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros((4, 4))}, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text("{broken")
    facts = inspect_checkpoint(tmp_path)
    assert not facts.sound
    assert "config.json cannot be read" in facts.problems[0]
    assert "this checkpoint has no MoE layer" in facts.problems[1]


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    state = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file(change(state), target / "model.safetensors")
    shutil.copy(source / "config.json", target)
    return target


FOUR_BITS = itertools.product(("nvfp4", "mxfp4"), ("bf16", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8"))


@pytest.mark.parametrize(("routed", "shared"), [("fp8_block", "bf16"), ("int8", "bf16"), *FOUR_BITS])
def test_shared_experts_of_another_format_are_described_and_loaded(routed: str, shared: str, tmp_path: Path) -> None:
    schemes, names = [scheme_of_kind(kind, (32, 64)) for kind in (routed, shared)], CONVENTIONS["scaled"]
    spec = LayerSpec(4, 256, 128, schemes[0], 1, 64, shared_scheme=schemes[1])
    save_file({PREFIX + name: t for name, t in tensors_of(spec, names, seed=1).items()}, tmp_path / "a.safetensors")
    sides = {"weight_block_size": [32, 64]} if "fp8_block" in (routed, shared) else {}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": sides}))
    facts = inspect_checkpoint(tmp_path)
    assert facts.sound and facts.layers[0].layer_spec() == spec, facts
    loaded = load_layer(SafetensorsSource(tmp_path), 3, facts.layers[0].layer_spec(), owned=[0])
    assert loaded.shared is not None and loaded.shared.up_IH.scheme == schemes[1]


def test_a_config_that_contradicts_the_tensors_is_a_problem(tiny_directory: Path, tmp_path: Path) -> None:
    folder = rewritten(tiny_directory, tmp_path, lambda state: state)
    assert config_problems(folder, inspect_checkpoint(folder)) == []
    hf = json.loads((folder / "config.json").read_text())
    hf |= {"hidden_size": 128, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (folder / "config.json").write_text(json.dumps(hf))
    assert config_problems(folder, inspect_checkpoint(folder)) == [
        "hidden size: the configuration states 128, the tensors of layer 3 have 64",
        "format: the configuration states nvfp4, the tensors of layer 3 have fp8_block",
    ]

    def other_biases(state: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: t for name, t in state.items() if not name.endswith("e_score_correction_bias")}
        return kept | {f"{PREFIX}gate.bias": torch.zeros(16)}

    assert config_problems(folder, inspect_checkpoint(rewritten(tiny_directory, folder, other_biases))) == [
        "bias for selection: the configuration states True, the tensors of layer 3 have False",
        "bias of the router's logits: the configuration states False, the tensors of layer 3 have True",
    ]
    (folder / "config.json").write_text(json.dumps({**hf, "moe_latent_size": 8}))  # of another family
    assert "moe_latent_size is 8" in config_problems(folder, inspect_checkpoint(folder))[0]


def test_stacks_of_other_names_and_transposed_ones_are_named(tmp_path: Path) -> None:
    save_file({"a.input_linear.weight": torch.zeros(4, 8, 16)}, tmp_path / "model.safetensors")
    assert (
        inspect_checkpoint(tmp_path)
        .problems[-1]
        .endswith("stacks of matrices that are not read: a.input_linear.weight")
    )
    stacks = {"experts.gate_up_proj": (4, 16, 64), "experts.down_proj": (4, 32, 16), "gate.weight": (4, 16)}
    save_file({PREFIX + name: torch.zeros(shape) for name, shape in stacks.items()}, tmp_path / "model.safetensors")
    layer = inspect_checkpoint(tmp_path).layers[0]
    assert layer.stacks_transposed and layer.layer_spec().stacks_transposed and not layer.problems
    assert (layer.hidden_size, layer.intermediate_size) == (16, 32)
