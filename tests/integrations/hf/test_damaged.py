"""Checkpoints that are damaged, or hold something else than the model: refused before the model is changed."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

from moe_mk.errors import MoEMKError
from moe_mk.integrations.hf.packed import PackedExperts, _are_alike
from moe_mk.integrations.transformers import replace_experts
from moe_mk.quant.grouped import GROUPED
from moe_mk.weights.source import INDEX
from tests.integrations.hf.packed import family_model, write_packed
from tests.weights.test_hostile_files import changed_texts


def damaged(folder: Path) -> Iterator[tuple[str, bool]]:
    """Damage a checkpoint in one way after another: what was done, and whether the checkpoint may still be whole."""
    yield from other_texts(folder / "config.json")
    shard = folder / "model.safetensors"
    whole, tensors = shard.read_bytes(), load_file(shard)
    size = int.from_bytes(whole[:8], "little")
    for name in [name for name in tensors if "layers.2.mlp.experts.3.up" in name and "shape" not in name]:
        held = tensors[name]
        others = [held[:8].clone(), held[None].clone(), held.to(torch.int8), None]
        others += [held.clone().index_fill(0, torch.tensor([5]), v) for v in (math.nan, math.inf) if "scale" in name]
        for at, other in enumerate(others):
            rest = {key: tensor for key, tensor in tensors.items() if key != name}
            save_file(rest if other is None else rest | {name: other}, shard, {"format": "pt"})
            yield f"{name}, {at}", False
    for part in (whole[: len(whole) // 2], whole[:-1], whole[:8], b"", whole + b"x", whole[:size] + whole[size + 8 :]):
        shard.write_bytes(part)
        yield f"{len(part)} bytes of {len(whole)}", False
    shard.rename(outside := folder.parent / "outside.safetensors")
    yield "no file of tensors", False
    shard.write_bytes(whole)
    outside.write_bytes(whole)
    shards = dict.fromkeys(tensors, shard.name)
    for other in ("../outside.safetensors", str(outside), "none.safetensors", ""):
        (folder / INDEX).write_text(json.dumps({"weight_map": shards | {name: other}}))
        yield f"the index names {other!r}", False
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(list(shards.items())[-9:])}))
    yield from other_texts(folder / INDEX)


def other_texts(file: Path) -> Iterator[tuple[str, bool]]:
    right = file.read_bytes()
    texts = list(changed_texts(json.loads(right)))
    for text in texts[:: max(1, len(texts) // 12)]:
        file.write_bytes(text)
        yield f"{file.name}: {text[-200:]!r}", True
    file.write_bytes(right)


@pytest.mark.slow
def test_no_damage_ends_in_an_error_of_another_kind_or_in_a_model_that_is_half_replaced(tmp_path: Path) -> None:
    folder, refused = write_packed(tmp_path / "folder", "qwen3_moe", "int4_g32"), 0
    model = family_model("qwen3_moe")
    for what, may_be_whole in damaged(folder):
        try:
            replace_experts(model, folder)
        except MoEMKError:
            refused += 1
            assert not any(isinstance(module, PackedExperts) for module in model.modules()), what
        else:
            assert may_be_whole, f"{what}: not noticed"
            model = family_model("qwen3_moe")
    assert refused > 30


def test_formats_are_alike_where_tensors_of_one_are_tensors_of_the_other() -> None:
    facts = SimpleNamespace(hidden_size=128, intermediate_size=256, kind="")
    for stated, one in GROUPED.items():
        for facts.kind, other in GROUPED.items():
            sizes = [(facts.hidden_size, facts.intermediate_size), (facts.intermediate_size, facts.hidden_size)]
            same = all(one.scale_shape(*size) == other.scale_shape(*size) for size in sizes)
            own = [(each.bits, each.has_zeros, each.has_biases) for each in (one, other)]
            assert _are_alike(stated, facts) == (same and own[0] == own[1]), (stated, facts.kind)  # type: ignore[arg-type]
    facts.kind = "mxfp4"
    assert _are_alike("mxfp4", facts) and not _are_alike("int4_g32", facts)  # type: ignore[arg-type]
