"""Synthetic checkpoints: official layout, deterministic, whole or not there, with numbers that catch mistakes."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.lab.checkpoints import is_complete, write_checkpoint
from moe_mk.lab.checkpoints.synthesize import SPARE_BYTES
from moe_mk.weights import SafetensorsSource, load_layer

INDEX = "model.safetensors.index.json"
PREFIX = "model.layers.3.mlp."


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.row(5)
def test_the_layout_is_the_official_one(tiny: Shape, tiny_directory: Path) -> None:
    index = json.loads((tiny_directory / INDEX).read_text())
    shards = sorted(path.name for path in tiny_directory.glob("*.safetensors"))
    count = len(shards)
    assert count > 1
    assert shards == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert set(index["weight_map"].values()) == set(shards)
    held = {name: tensor for shard in shards for name, tensor in load_file(tiny_directory / shard).items()}
    assert all(name in load_file(tiny_directory / shard) for name, shard in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in held.values())
    names = {f"{PREFIX}gate.weight", f"{PREFIX}gate.e_score_correction_bias"}
    for mlp in [f"experts.{e}" for e in range(4)] + ["shared_experts"]:
        for p in ("gate", "up", "down"):
            names |= {f"{PREFIX}{mlp}.{p}_proj.weight", f"{PREFIX}{mlp}.{p}_proj.weight_scale_inv"}
    assert held.keys() == names
    assert held[f"{PREFIX}experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert held[f"{PREFIX}experts.0.up_proj.weight_scale_inv"].dtype == torch.float32
    assert held[f"{PREFIX}gate.weight"].dtype == torch.bfloat16
    assert held[f"{PREFIX}gate.e_score_correction_bias"].dtype == torch.float32


@pytest.mark.row(5)
def test_the_config_of_the_full_layer_states_what_deepseek_v3_states() -> None:
    config = Shape().hf_config()
    expected = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu",
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    quantization = config["quantization_config"]
    assert quantization == {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    }  # fmt: skip
    assert "quantization_config" not in Shape(quant="bf16").hf_config()


def test_the_same_seed_gives_the_same_bytes_whatever_the_threads(tiny: Shape, tmp_path: Path) -> None:
    for name, seed, threads in (("a", 5, 1), ("b", 5, 3), ("c", 6, 1)):
        write_checkpoint(tmp_path / name, tiny, seed=seed, threads=threads, shard_bytes=16 << 10)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    for shard in (tmp_path / "a").glob("*.safetensors"):
        one, other = load_file(shard), load_file(tmp_path / "c" / shard.name)
        assert len(one) == 1 or sum(tensor.nbytes for tensor in one.values()) <= 16 << 10
        assert not any(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


def test_shards_do_not_change_the_tensors(tiny: Shape, tiny_directory: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny, seed=1)
    (only,) = tmp_path.glob("*.safetensors")
    whole = load_file(only)
    for shard in tiny_directory.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            assert torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8))


@pytest.mark.row(96)
def test_blocks_use_the_whole_range_and_their_scales_differ(tiny_state: dict[str, torch.Tensor]) -> None:
    for name, scales in tiny_state.items():
        if name.endswith("scale_inv"):
            values = tiny_state[name.removesuffix("_scale_inv")].to(torch.float32)
            rows, columns = values.shape
            blocks = values.reshape(rows // 16, 16, columns // 16, 16).abs().amax(dim=(1, 3))
            assert (blocks == 448).all()
            assert scales.max() > 1.2 * scales.min()


def test_outputs_of_normed_inputs_are_of_the_order_of_one(tmp_path: Path) -> None:
    shape = Shape(2, 512, 256, top_k=1, num_groups=1, top_k_groups=1)
    write_checkpoint(tmp_path, shape)
    slot = load_layer(SafetensorsSource(tmp_path), 3, shape.layer_spec(), owned=[0]).experts.slot(0)
    x_TH = torch.randn((64, 512), dtype=torch.float32, device="cpu")
    assert slot.gate_IH is not None
    gate, up, down = (q.dequantize(torch.float32) for q in (slot.gate_IH, slot.up_IH, slot.down_HI))
    y_TH = (torch.nn.functional.silu(x_TH @ gate.T) * (x_TH @ up.T)) @ down.T
    assert 0.3 < y_TH.pow(2).mean().sqrt().item() < 3


def test_gate_biases_are_negative_enough_to_show_a_wrong_mask(tiny_state: dict[str, torch.Tensor]) -> None:
    bias_E = tiny_state[f"{PREFIX}gate.e_score_correction_bias"]
    assert (bias_E != 0).all()
    # A score is at most 1 and mostly near 0.5: shifted below 0, a masked group at 0 would win.
    assert bias_E.mean() < -0.5


@pytest.mark.row(97)
def test_power_of_two_scales_are_exact_and_announced(tiny: Shape, tmp_path: Path) -> None:
    shape = replace(tiny, power_of_two_scales=True)
    write_checkpoint(tmp_path, shape)
    (shard,) = tmp_path.glob("*.safetensors")
    scales = [t for name, t in load_file(shard).items() if name.endswith("scale_inv")]
    assert all((torch.frexp(t)[0] == 0.5).all() and t.dtype == torch.float32 for t in scales)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["scale_fmt"] == "ue8m0"


def test_several_layers_go_into_one_checkpoint(tiny: Shape, tmp_path: Path) -> None:
    shape = replace(tiny, layers=(1, 2))
    write_checkpoint(tmp_path, shape)
    one, two = (load_layer(SafetensorsSource(tmp_path), n, shape.layer_spec(), owned=[0]) for n in (1, 2))
    assert not torch.equal(one.gate_EH, two.gate_EH)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["first_k_dense_replace"], config["num_hidden_layers"]) == (1, 3)


def test_progress_grows_to_the_number_of_bytes(tiny: Shape, tmp_path: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    total = write_checkpoint(tmp_path, tiny, on_progress=lambda *stated: reported.append(stated))
    assert reported[-1] == ("write", total, total)
    assert [done for _, done, _ in reported] == sorted(done for _, done, _ in reported)


def test_a_checkpoint_is_complete_only_for_its_shape_and_seed(
    tiny: Shape, tiny_directory: Path, tmp_path: Path
) -> None:
    assert is_complete(tiny_directory, tiny, seed=1)
    assert not is_complete(tiny_directory, tiny, seed=2)
    assert not is_complete(tiny_directory, replace(tiny, top_k=1), seed=1)
    assert not is_complete(tmp_path / "nowhere", tiny, seed=1)
    shutil.copytree(tiny_directory, tmp_path / "copy")
    shard = sorted((tmp_path / "copy").glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1)
    assert not is_complete(tmp_path / "copy", tiny, seed=1)
    shard.unlink()
    assert not is_complete(tmp_path / "copy", tiny, seed=1)
    (tmp_path / "copy" / INDEX).write_text("[]")
    assert not is_complete(tmp_path / "copy", tiny, seed=1)


@pytest.mark.parametrize("has_room", [True, False])
def test_an_interrupted_run_leaves_none_and_the_earlier_checkpoint_if_both_fit(
    tiny: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    write_checkpoint(tmp_path, tiny, seed=7)
    if not has_room:
        usage = shutil.disk_usage(tmp_path)._replace(free=SPARE_BYTES)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, tiny, seed=8, shard_bytes=16 << 10, on_progress=interrupt)
    assert is_complete(tmp_path, tiny, seed=7) == has_room and not is_complete(tmp_path, tiny, seed=8)
    assert has_room or not any(tmp_path.iterdir())
    monkeypatch.undo()
    write_checkpoint(tmp_path, tiny, seed=8)
    assert is_complete(tmp_path, tiny, seed=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        INDEX,
    ]


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", INDEX, "config.json"])
def test_a_foreign_checkpoint_is_never_touched(tiny: Shape, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(ConfigError, match=f"holds 1 files that were not written here, e.g. {name}; choose an empty"):
        write_checkpoint(tmp_path, tiny)
    assert contents(tmp_path) == {name: b"precious"}
    with pytest.raises(ConfigError, match="is a file; choose a directory"):
        write_checkpoint(tmp_path / name, tiny)


def test_a_disk_that_is_too_small_is_reported_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"needs 11.3 GB .* has 3 GB free; write fewer experts or choose another"):
        write_checkpoint(tmp_path / "big", Shape())


@pytest.mark.parametrize("change, words", [
    ({"num_experts": 12}, r"num_experts=12 in num_groups=8 groups of 1.5,.*Use num_groups=1.*or num_experts=16 or 24"),
    ({"num_experts": 8, "top_k_groups": 8}, r"groups of 1,.*hold at least 2 experts.*Use num_groups=1 or 2 or 4"),
    ({"num_experts": 8}, r"hold at least 2 experts.*Use num_groups=1 or 2 or 4, or num_experts=16"),
    ({"num_experts": 32, "top_k_groups": 1}, r"top_k_groups=1 are kept, cannot give top_k=8.*Use num_groups=1"),
    ({"num_experts": 4}, "cannot give top_k=8 experts.*Use top_k of at most 4"),
    ({"num_experts": 0, "hidden_size": -1}, "num_experts=0 must be at least 1; hidden_size=-1 must be at least 1"),
    ({"layers": ()}, "layers=.. must be one or more different layers"),
    ({"layers": (3, 3)}, "must be one or more different layers"),
    ({"quant": "int4"}, "quant='int4' must be one of fp8, bf16"),
    ({"block": (0, 128)}, "block=.0, 128. must be two positive numbers"),
    ({"num_shared_experts": -1}, "num_shared_experts=-1 must not be negative"),
])  # fmt: skip
def test_a_shape_that_cannot_be_routed_states_what_could(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(Shape(), **change)


def test_shards_must_have_room_for_something(tiny: Shape, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard_bytes=0 must be at least 1"):
        write_checkpoint(tmp_path, tiny, shard_bytes=0)
