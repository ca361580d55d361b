"""Conversion: any type to any other, with an honest report, and nothing else changed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_mk import MoELayer
from moe_mk.config import MoEConfig
from moe_mk.config.hf import SECOND
from moe_mk.errors import ConfigError, WeightError
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.checkpoints.checkpoint_shape import GGUF_FILES
from moe_mk.lab.checkpoints.convert import REPORT, TARGETS, convert_checkpoint, kind_of_target
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.weights import SafetensorsSource, inspect_checkpoint, load_layer

SHAPE = CheckpointShape(4, 128, 128, layers=(1,), top_k=2, num_groups=2, top_k_groups=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    home = tmp_path_factory.mktemp("sources")

    def of(quant: str) -> Path:
        folder = home / quant
        if not folder.exists():
            write_checkpoint(folder, replace(SHAPE, quant=quant), threads=1)
            (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
        return folder

    return of


def tensors_of(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            state |= {name: shard.get_tensor(name) for name in list(shard.keys())}
    return state


def experts(folder: Path) -> list[Tensor]:
    facts = inspect_checkpoint(folder)
    weights = load_layer(SafetensorsSource(folder), 1, facts.layers[0].layer_spec(), owned=range(4))
    slots = [*weights.experts.slots, weights.shared]
    return [q.dequantize(torch.float32) for s in slots if s for q in (s.gate_IH, s.up_IH, s.down_HI) if q]


SOME_GROUPED = ("int4_g32", "int8_row_zp")
SAFETENSORS = [to for to in TARGETS if to not in (*GROUPED, *GGUF_FILES) or to in SOME_GROUPED]


@pytest.mark.parametrize("to", SAFETENSORS)
@pytest.mark.parametrize("quant", ["bf16", "mxfp4"])
def test_a_conversion_reports_what_it_did(quant: str, to: str, written: Callable[[str], Path], tmp_path: Path) -> None:
    source, target = written(quant), tmp_path / "out"
    report = convert_checkpoint(source, target, to)
    assert inspect_checkpoint(target).sound and (target / "tokenizer.json").exists()
    scheme = scheme_of_kind(kind_of_target(to))
    assert MoEConfig.from_hf(target).model.quant.weight_scheme == scheme
    if to in SOME_GROUPED:
        assert MoEConfig.from_hf(target).model.quant.shared == inspect_checkpoint(target).layers[0].shared == "bf16"
    pairs = zip(experts(source), experts(target), strict=True)
    distances = [float((new - old).norm() / old.norm()) for old, new in pairs]
    reported = [distance for error in report.errors for distance in (error.gate, error.up, error.down)]
    assert reported == pytest.approx(distances, rel=1e-4, abs=1e-9), "expert by expert, the shared ones last"
    assert all(error.worst == max(error.gate, error.up, error.down) for error in report.errors)
    exact = to == quant or (quant == "mxfp4" and to in ("bf16", "mxfp8"))
    assert (max(reported) == 0) if exact else (0 < max(reported) < 1.5 * scheme.relative_rms)
    assert json.loads((target / REPORT).read_text(encoding="utf-8"))["experts"][0]["expert"] == 0


@pytest.mark.parametrize("to", ["bf16", "fp8"])
@pytest.mark.parametrize("place", ["dtype", "compression_config", "text_config", SECOND])
def test_a_format_is_restated_wherever_it_is(place: str, to: str, written: Any, tmp_path: Path) -> None:
    source = Path(shutil.copytree(written("nvfp4"), tmp_path / "source"))
    hf = json.loads((source / "config.json").read_text())
    stated = {"quantization_config": hf.pop("quantization_config"), "dtype": "float16"}
    del hf["torch_dtype"]
    if place == SECOND:
        (source / SECOND).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    changed = {"dtype": stated, "text_config": {"text_config": hf | stated, "model_type": "kimi_k25"},
               "compression_config": {place: stated["quantization_config"]}, SECOND: {}}[place]  # fmt: skip
    (source / "config.json").write_text(json.dumps(changed if place == "text_config" else hf | changed))
    convert_checkpoint(source, tmp_path / "out", to)
    assert MoEConfig.from_hf(tmp_path / "out").model.quant.weight_scheme == scheme_of_kind(kind_of_target(to))
    MoELayer.from_checkpoint(tmp_path / "out", 1)


def test_what_is_no_expert_is_copied_bit_for_bit(written: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    state = tensors_of(written("bf16"))
    others = {"model.embed_tokens.weight": torch.randn(300, 128).bfloat16(), "model.norm.weight": torch.rand(128)}
    save_file({**state, **others, "model.layers.0.scalar": torch.tensor(3.0)}, source / "model.safetensors")
    (source / "config.json").write_bytes((written("bf16") / "config.json").read_bytes())
    convert_checkpoint(source, tmp_path / "out", "nvfp4", shard_bytes=64 << 10)
    got = tensors_of(tmp_path / "out")
    for name, tensor in others.items():
        assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype
    assert float(got["model.layers.0.scalar"]) == 3.0
    router = "model.layers.1.mlp.gate.weight"
    assert torch.equal(got[router], state[router])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert tensors_of(source).keys() == {*state, *others, "model.layers.0.scalar"}, "the source is untouched"


def test_a_target_in_use_and_an_unknown_type_are_refused(written: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"used is in use; choose a folder that is empty"):
        convert_checkpoint(written("bf16"), tmp_path / "used", "int8")
    with pytest.raises(ConfigError, match=r"cannot be converted to 'int4'; use one of bf16, fp8"):
        convert_checkpoint(written("bf16"), tmp_path / "new", "int4")
    assert (tmp_path / "used" / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("quant,words", [
    ("mxfp4", r"(?s)layer 1, expert 2 is damaged.*1 scales are not finite and positive"),
    ("bf16", r"(?s)cannot be converted:.*expert 3 lacks"),
])  # fmt: skip
def test_a_damaged_or_lost_expert_is_named(quant: str, words: str, written: Any, tmp_path: Path) -> None:
    state, source = tensors_of(written(quant)), tmp_path / "source"
    source.mkdir()
    if quant == "mxfp4":
        state["model.layers.1.mlp.experts.2.up_proj.weight_scale"].view(torch.uint8)[5, 0] = 0xFF
    else:
        del state["model.layers.1.mlp.experts.3.down_proj.weight"]
    save_file(state, source / "model.safetensors")
    with pytest.raises(WeightError, match=words):
        convert_checkpoint(source, tmp_path / "out", "fp8")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"], "nothing that looks whole, nothing to clear away"


def test_a_folder_that_looks_left_behind_stays(written: Callable[[str], Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(written("bf16"), tmp_path / "model.partial"))
    convert_checkpoint(source, tmp_path / "model", "int8")
    assert {entry.name for entry in tmp_path.iterdir()} >= {"model", "model.partial"} and any(source.iterdir())
