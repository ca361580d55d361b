"""Opening tensors by name: views of the files, never outside the directory, and damage reported in words."""

import itertools
import json
import mmap
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_mk.errors import WeightError
from moe_mk.weights import MappingSource, SafetensorsSource
from moe_mk.weights import source as source_module
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.safetensors_header import read_header
from moe_mk.weights.source import Copies, discard_pages, in_memory, is_mapped

INDEX = "model.safetensors.index.json"


def save(directory: Path, shard_of: dict[str, str]) -> None:
    """One tensor a name, and an index that states where it is."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX).write_text(json.dumps({"weight_map": shard_of}))
    for shard in set(shard_of.values()):
        tensors = {n: torch.ones(4, dtype=torch.float32) for n, s in shard_of.items() if s == shard}
        save_file(tensors, directory / Path(shard).name)


def test_a_tensor_is_read_through_the_index(tmp_path: Path) -> None:
    save(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    source = SafetensorsSource(tmp_path)
    assert sorted(source.names()) == ["a", "b"]
    assert source.open("b").tolist() == [1.0] * 4
    entry = source.entry("a")
    assert (entry.shape, entry.dtype, entry.num_bytes, entry.missing_bytes) == ((4,), torch.float32, 16, 0)
    bytes_on_disk = (tmp_path / "one.safetensors").read_bytes()[entry.start : entry.start + entry.num_bytes]
    assert torch.frombuffer(bytearray(bytes_on_disk), dtype=torch.float32).tolist() == [1.0] * 4


def test_a_directory_without_an_index_and_a_single_file_work_too(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "y.safetensors")
    assert sorted(SafetensorsSource(tmp_path).names()) == ["a", "b"]
    assert list(SafetensorsSource(tmp_path / "y.safetensors").names()) == ["b"]


@pytest.mark.parametrize("shard", ["../x", "/etc/x", "a/../../x", "", "..", "circle", "\ud800", "a\0b"])
def test_an_index_cannot_point_outside_its_directory(tmp_path: Path, shard: str) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard, "b": "fine.safetensors"}}))
    with pytest.raises(WeightError, match=r"names 1 files that are not inside the directory: .*; put the files"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("index", [True, False])
def test_a_symbolic_link_cannot_lead_outside_either(tmp_path: Path, index: bool) -> None:
    save(tmp_path / "model", {"a": "one.safetensors"})
    if not index:
        (tmp_path / "model" / INDEX).unlink()
    (tmp_path / "model" / "one.safetensors").rename(tmp_path / "secret")
    (tmp_path / "model" / "one.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(WeightError, match=r"not inside the directory: 'one.safetensors'"):
        SafetensorsSource(tmp_path / "model")


def test_a_snapshot_of_the_hugging_face_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    save(snapshot, {"a": "one.safetensors"})
    blobs.mkdir()
    (snapshot / "one.safetensors").rename(blobs / "f00")
    (snapshot / "one.safetensors").symlink_to("../../blobs/f00")
    assert SafetensorsSource(snapshot).open("a").tolist() == [1.0] * 4


NO_INDEX = ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', "{not json", "[" * 100_000, "1" * 5000]


@pytest.mark.parametrize("text", [*NO_INDEX, '{"weight_map": {"\\ud800": "a"}}'], ids=range(len(NO_INDEX) + 1))
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightError, match="is not an index with a weight_map|has 1 names that are no text"):
        SafetensorsSource(tmp_path)


def test_a_directory_that_is_none_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="does not exist; pass a checkpoint directory"):
        SafetensorsSource(tmp_path / "nowhere")
    with pytest.raises(WeightError, match=r"holds no model.safetensors.index.json and no \*.safetensors"):
        SafetensorsSource(tmp_path)


def test_without_an_index_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    shutil.copy(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    with pytest.raises(WeightError, match="1 tensors lie in two files: a in x.safetensors and y.safetensors"):
        SafetensorsSource(tmp_path)


def test_a_missing_shard_and_a_missing_tensor_are_reported(tmp_path: Path) -> None:
    save(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    (tmp_path / "two.safetensors").unlink()
    index = {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    source = SafetensorsSource(tmp_path)
    with pytest.raises(WeightError, match="two.safetensors is named by the index but does not exist"):
        source.entry("b")
    with pytest.raises(WeightError, match="one.safetensors does not hold tensors that the index looks for"):
        source.entry("c")


def test_a_truncated_file_states_how_much_is_missing(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(100)}, tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", (tmp_path / "x.safetensors").stat().st_size - 20)
    entries = read_header(tmp_path / "x.safetensors").tensors
    assert sum(entry.missing_bytes for entry in entries.values()) == 20
    assert entries["b"].missing_bytes == 20
    with pytest.raises(WeightError, match="x.safetensors cannot be opened"):
        SafetensorsSource(tmp_path).open("b")


def test_a_file_that_does_not_begin_with_the_size_of_its_header_is_reported(tmp_path: Path) -> None:
    for size, words in (
        (1 << 60, "is not a safetensors file"),
        (100, "is truncated: 10 bytes, its header alone has 108"),
    ):
        (tmp_path / "x.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(WeightError, match=words):
            read_header(tmp_path / "x.safetensors")


def test_a_state_dict_is_a_source_too() -> None:
    weight = torch.nn.Parameter(torch.ones((2, 3), dtype=torch.bfloat16, device="cpu"))
    source = MappingSource({"a": weight, "m": torch.empty(2, dtype=torch.float32, device="meta")})
    assert source.entry("a").shape == (2, 3)
    assert source.entry("a").dtype_name == "BF16"
    assert source.open("a").data_ptr() == weight.data_ptr()
    assert not source.open("a").requires_grad
    source.read_ahead("a")
    with pytest.raises(WeightError, match="m is on the meta device"):
        source.entry("m")


CHANGES: list[Callable[[Tensor, random.Random], Tensor]] = [
    lambda x, draw: x.narrow(axis := draw.randrange(x.dim()), (n := x.shape[axis]) // 4, (n + 1) // 2),
    lambda x, draw: x.transpose(0, -1),
    lambda x, draw: x[::2],
    lambda x, draw: x[draw.randrange(len(x))] if x.dim() > 1 else x,
    lambda x, draw: x.view(torch.int16) if x.shape[-1] % 2 == x.storage_offset() % 2 == 0 and x.is_contiguous() else x,
]


@pytest.mark.parametrize("seed", range(40))
def test_any_view_of_a_file_is_read_in_pieces_and_found_from_its_copy(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE", 48)
    monkeypatch.setattr(source_module, "MOST_AT_ONCE", 7)
    whole, copies = torch.randint(256, (6, 7, 8), dtype=torch.uint8), Copies()
    save_file({"a": torch.zeros(3), "b": whole}, tmp_path / "x.safetensors")
    changes = random.Random(seed).choices(CHANGES, k=3)

    def changed(x: Tensor) -> Tensor:
        draw = random.Random(seed)
        return next(itertools.islice(itertools.accumulate(changes, lambda y, f: f(y, draw), initial=x), at, None))

    for at in range(4):
        view = changed(SafetensorsSource(tmp_path).open("b"))
        copy = copies.of(view)
        assert is_mapped(view) and torch.equal(copy, changed(whole)) and not is_mapped(copy)
        back = copies.back(part := changed(copy))
        assert torch.equal(in_memory(back), part) and (is_mapped(back) or view.stride() != copy.stride() or at)


def test_whole_pages_alone_are_given_back() -> None:
    memory = torch.frombuffer(
        mmap.mmap(-1, 6 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    ).fill_(7)
    discard_pages(memory[100 : 4 * mmap.PAGESIZE + 50])
    assert memory.view(6, -1).unique_consecutive(dim=0)[:, 0].tolist() == [7, 0, 7] and not memory[mmap.PAGESIZE]
    assert int((memory == 7).sum()) == 3 * mmap.PAGESIZE


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614\nsize 4998663696\n"


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", INDEX, "model.gguf"])
def test_a_pointer_of_git_lfs_is_called_one(name: str, tmp_path: Path) -> None:
    if name.endswith("safetensors"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"experts.0.up_proj.weight": name}}))
    (tmp_path / name).write_text(POINTER)
    facts = f"{name} is a git-LFS pointer to 4998663696 bytes.*: run git lfs pull in {tmp_path}"
    with pytest.raises(WeightError, match=facts):
        open_source(tmp_path).entry("experts.0.up_proj.weight")


@pytest.mark.parametrize("files,words", [
    (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], r"but 1 files of pickled tensors \(pyto"),
    (["consolidated.00.pth", "consolidated.01.pth"], r"2 files of pickled tensors \(consolidated.00.pth, .*save_pre"),
    (["model.safetensors.incomplete"], r"an unfinished download \(model.safetensors.incomplete\)"),
    (["config.json", "4bit/model.safetensors"], r"; .*/4bit does"), (["config.json"], r"\*.safetensors file$"),
])  # fmt: skip
def test_a_folder_without_safetensors_is_named_by_what_it_holds(files: list[str], words: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(WeightError, match=rf"holds no {INDEX} and no .*{words}"):
        open_source(tmp_path)


def test_names_of_an_index_share_the_paths_of_its_files(tmp_path: Path) -> None:
    """An index may have a million names."""
    save(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    source = SafetensorsSource(tmp_path)
    assert source._file_of["a"] is source._file_of["b"]
