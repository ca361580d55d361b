"""Checkpoints that nobody means well with: refused in words, fast, and nothing outside the folder is read."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_mk import DeepseekV3MoE
from moe_mk.errors import MoEMKError, WeightError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.lab.checkpoints import write_checkpoint
from moe_mk.lab.checkpoints.convert import convert_checkpoint
from moe_mk.quant.nvfp4 import NVFP4
from moe_mk.weights import LayerSpec, MappingSource, SafetensorsSource, inspect_checkpoint, load_layer
from moe_mk.weights.gguf_source import read_gguf
from moe_mk.weights.names import CONVENTIONS, block_prefixes, layer_of
from moe_mk.weights.safetensors_header import read_header
from moe_mk.weights.source import INDEX

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
ENTRIES = (
    {"dtype": []}, {"shape": [math.inf]}, {"shape": [10**4000, 10**4000]}, {"shape": "2"}, {"shape": [True]},
    {"shape": [2.5]}, {"data_offsets": [0, math.inf]}, {"data_offsets": ["0", "8"]},
)  # fmt: skip


def file_of(path: Path, header: dict[str, Any] | str, data: int = 8) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


@pytest.mark.parametrize(
    "header,words",
    [
        ("[" * 100_000, "its header is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "its header is not JSON"),
        ("[]", "its header is not a JSON object"),
        ({"a": 3}, "the entry of a is 3"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "the entry of a is"),
        ({"a": F32 | {"data_offsets": [0, 4]}}, r"a of shape \[2\] F32 needs 8 bytes"),
        ({"a": F32 | {"shape": [-2], "data_offsets": [0, -8]}}, r"a of shape \[-2\]"),
        *(({"a": F32 | entry}, "the entry of a is") for entry in ENTRIES),
        ({"\ud800": F32}, "1 names of tensors are no text"),
        ({"a": F32, "b": F32}, "b shares bytes with a"),
        (f'{{"a": {json.dumps(F32)}, "a": 0}}', "its header is not JSON .*'a' appears twice"),
        ({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, "b shares bytes with a"),
        ({"a": F32 | {"data_offsets": [8, 16]}}, "a starts 8 bytes after the header"),
        ({"a": F32 | {"shape": [1], "data_offsets": [0, 4]}}, "4 bytes behind a belong to no tensor"),
    ],
    ids=str,
)
def test_a_header_that_cannot_be_is_reported(tmp_path: Path, header: dict[str, Any] | str, words: str) -> None:
    with pytest.raises(WeightError, match=rf"x.safetensors is damaged: {words}"):
        read_header(file_of(tmp_path / "x.safetensors", header))


def test_a_dtype_that_torch_lacks_is_kept_by_name_and_so_are_tensors_without_values(tmp_path: Path) -> None:
    a, b, c = ({"dtype": "F4", "shape": [n], "data_offsets": at} for n, at in ((4, [0, 2]), (2, [2, 3]), (0, [0, 0])))
    tensors = read_header(file_of(tmp_path / "x.safetensors", {"a": a, "b": b, "c": c}, 3)).tensors
    for entry, num_bytes in ((tensors["a"], 2), (tensors["b"], 1), (tensors["c"], 0)):
        assert (entry.dtype, entry.dtype_name, entry.num_bytes) == (None, "F4", num_bytes)


def test_a_pipe_is_no_shard_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(WeightError, match=r"x.safetensors is no regular file"):
        SafetensorsSource(tmp_path)


def test_a_shard_with_a_name_of_thousands_of_letters_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(WeightError, match=r"is named by the index but does not exist"):
        SafetensorsSource(tmp_path).entry("a")


def test_numbers_in_names_may_have_any_length() -> None:
    nines = "9" * 5000
    assert layer_of(f"model.layers.{nines}.mlp.") is None
    assert block_prefixes([f"model.layers.{nines}.mlp.experts.0.up_proj.weight"]) == [f"model.layers.{nines}.mlp."]
    assert all(c.parse(f"experts.{nines}.up_proj.weight") is None for c in CONVENTIONS.values())


@pytest.mark.parametrize("router", [True, False])
def test_billions_of_experts_in_a_header_are_not_listed_one_by_one(tmp_path: Path, router: bool) -> None:
    # The header of the gate states 10^9 experts, or the name of the only expert does; the file holds neither.
    down = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}
    entries = {f"model.layers.0.mlp.experts.{0 if router else 10**8}.down_proj.weight": down}
    if router:
        gate = {"dtype": "BF16", "shape": [10**9, 2], "data_offsets": [8, 8 + 4 * 10**9]}
        entries["model.layers.0.mlp.gate.weight"] = gate
    file_of(tmp_path / "x.safetensors", entries)
    (layer,) = inspect_checkpoint(tmp_path).layers
    assert any(f"num_experts={10**9 if router else 10**8 + 1} exceeds" in problem for problem in layer.problems)


def test_what_names_have_no_word_for_is_reported(renamed: Callable[[str], dict[str, Tensor]], tiny: Shape) -> None:
    asked = replace(tiny.layer_spec(), has_expert_bias=True, has_logit_bias=True)
    with pytest.raises(WeightError, match=r"mixtral names have none for biases of experts .*\n.*a bias of the logits"):
        load_layer(MappingSource(renamed("mixtral")), 3, asked, owned=[0])
    nvfp4 = LayerSpec(4, 64, 32, NVFP4, has_gate_bias=True)
    with pytest.raises(WeightError, match=r"official names have none for global scales of nvfp4"):
        load_layer(MappingSource(renamed("official")), 3, nvfp4, owned=[0])


def test_a_conversion_copies_nothing_from_outside(tmp_path: Path) -> None:
    shape = Shape(2, 32, 32, layers=(0,), top_k=1, num_groups=1, top_k_groups=1, quant="bf16")
    write_checkpoint(tmp_path / "from", shape, threads=1)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "from" / "tokenizer.json").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "from" / "own.json").write_text("{}")
    convert_checkpoint(tmp_path / "from", tmp_path / "to", "fp8")
    assert (tmp_path / "to" / "own.json").exists() and not (tmp_path / "to" / "tokenizer.json").exists()


def outcome_of(path: Path) -> str:
    """What reading a checkpoint ends in: "same layer" as of `tiny`, or a typed error. Errors of other types pass on."""
    try:
        inspect_checkpoint(path)
        layer = DeepseekV3MoE.from_checkpoint(path, 3, experts="reference", activations="plain")
    except MoEMKError as refusal:
        unnamed = not any(file.name in str(refusal) for file in (path, *path.glob("*")))
        return f"unnamed: {refusal}" if unnamed else type(refusal).__name__
    with torch.no_grad():
        return str(layer(torch.ones(3, layer.config.model.hidden_size, dtype=torch.bfloat16)).float().sum().item())


@pytest.mark.parametrize("shape", [(), (0, 64)])
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused(
    tiny_directory: Path, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    whole = {name: t for file in tiny_directory.glob("*.safetensors") for name, t in load_file(file).items()}
    (tmp_path / "config.json").write_bytes((tiny_directory / "config.json").read_bytes())
    for name in [name for name in whole if "1.down" in name or "expert" not in name or "shared_experts.up" in name]:
        for changed in (torch.zeros(shape, dtype=whole[name].dtype), None):
            state = {n: changed if n == name else t for n, t in whole.items() if n != name or changed is not None}
            save_file(state, tmp_path / "model.safetensors")
            assert outcome_of(tmp_path) == "WeightError", f"{name} {shape} {changed is None}"


VALUES: tuple[Any, ...] = (None, -1, 0, 2**63, math.inf, math.nan, 1.5, "x", "", "../a", "a\0", [], {}, True, [0], "U8")
FREE = ("n_group", "topk_group", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor")


def changed(content: Any) -> Iterator[Any]:
    """What may stand in a file instead of a value; at any depth one key is dropped or renamed, or one value changed."""
    yield from (*VALUES, [content], {"value": content}, str(content))
    if isinstance(content, list):
        for at, old in enumerate(content):
            yield from ([*content[:at], new, *content[at + 1 :]] for new in changed(old))
    if isinstance(content, dict):
        for key, old in content.items():
            rest = {name: value for name, value in content.items() if name != key}
            yield from (rest, rest | {f"{key}_": old}, *(content | {key: new} for new in changed(old)))


def changed_texts(content: Any) -> Iterator[bytes]:
    text = json.dumps(content)
    yield from (b"", text.encode("utf-16"), text.encode("utf-8-sig"), b"[" * 100_000, b"\xff" + text.encode())
    yield from (each.encode() for each in (text[:-9], text + "x", f'{text[:-1]}, "a": 0, "a": 0}}'))
    yield from (json.dumps(each).encode() for each in changed(content))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["config.json", INDEX, "*.safetensors"])
def test_no_change_of_a_file_ends_in_an_error_of_another_kind(file: str, tiny_directory: Path, tmp_path: Path) -> None:
    folder, right = tmp_path / "changed", outcome_of(tiny_directory)
    shutil.copytree(tiny_directory, folder)
    file = next(folder.glob(file)).name
    octets = (folder / file).read_bytes()
    size = int.from_bytes(octets[:8], "little") if file.endswith("safetensors") else 0
    content = json.loads(octets[8 : 8 + size] if size else octets)
    texts = list(changed_texts(content))
    for text in texts[:: max(1, len(texts) // 80)]:
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + octets[8 + size :] if size else text)
        found = outcome_of(folder)
        if found not in ("WeightError", "ConfigError", right):
            assert file == "config.json", f"{found}: {text!r}"
            assert any(json.loads(text).get(key) != content[key] for key in FREE), f"{found}: {text!r}"


def test_a_gguf_header_that_cannot_be_is_reported(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package reads and writes the files: pip install 'moe-mk[gguf]'")
    writer = gguf.GGUFWriter(file := tmp_path / "model.gguf", "deepseek2")
    writer.add_array("numbers", [7, 8, 9])
    for name in "ab":
        writer.add_tensor(name, torch.ones(2, 16).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    octets = file.read_bytes()
    length = octets.index(b"numbers") + len(b"numbers") + 8  # behind the types of the value and of its elements
    sizes = octets.index((1).to_bytes(8, "little") + b"b") + 13  # behind name and number of dimensions
    place = sizes + 20  # behind two sizes and the type

    def changed(at: int, value: int) -> bytes:
        return octets[:at] + value.to_bytes(8, "little") + octets[at + 8 :]

    arrays_of_arrays = ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * 2000
    for damaged, words in (
        (changed(length, 5_000_000), "an array at byte .* has 5000000 values, the limit is"),
        (changed(length, 100_000), "a value at byte .* is beyond the end of the file"),
        (octets[: length - 4] + arrays_of_arrays, "RecursionError"),
        (changed(place, 0), "b begins at byte .*, its place is"),
        (changed(place, 256), "b begins at byte .*, its place is"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(WeightError, match=f"model.gguf has no readable GGUF header .*{words}"):
            read_gguf(file)
    file.write_bytes(changed(sizes, 2**60))
    assert [*read_gguf(file).tensors.values()][-1].num_bytes == 2**60 * 2 * 4, "counted without an end"


@pytest.mark.slow
def test_no_change_of_a_gguf_file_ends_in_an_error_of_another_kind(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package reads and writes the files: pip install 'moe-mk[gguf]'")
    shape = Shape(4, 64, 64, layers=(3,), top_k=2, num_groups=1, top_k_groups=1, quant="q8_0")
    write_checkpoint(tmp_path / "whole", shape)
    right, octets = outcome_of(tmp_path / "whole"), (tmp_path / "whole" / "model.gguf").read_bytes()
    # The header alone: data that change are other weights, not another format.
    random, file = Random(34), tmp_path / "model.gguf"
    end = min(entry.start for entry in read_gguf(tmp_path / "whole" / "model.gguf").tensors.values())
    for trial in range(100):
        changed = bytearray(octets)
        at = random.randrange(end) if trial != 1 else octets.index(b"embedding_length") + 20
        changed[at] = random.choice((0, 1, 255, changed[at] ^ (1 << random.randrange(8))))
        file.write_bytes(changed if trial % 10 else octets[: random.randrange(len(octets))])
        found = outcome_of(file)
        assert found in ("WeightError", "ConfigError", right), f"trial {trial}, byte {at}: {found}"
