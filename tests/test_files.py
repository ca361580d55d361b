"""Files that say more than they hold are refused before memory is taken, in an error that names file and limit."""

import errno
import fcntl
import mmap
import os
import pickle
import re
import traceback
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from moe_mk import files
from moe_mk.config.base import read_mapping
from moe_mk.config.tuned import load_measured
from moe_mk.errors import MoEMKError
from moe_mk.files import (
    HEADER_BYTES,
    INDEX_BYTES,
    JSON_BYTES,
    LINE_BYTES,
    MIB,
    MOST_LEVELS,
    MOST_VALUES,
    YAML_BYTES,
    read_bytes,
    read_json,
    read_yaml,
)
from moe_mk.lab.cli.certify import _read as read_certificate
from moe_mk.lab.cli.inputs import read_token_ids
from moe_mk.lab.cli.loads import read_loads
from moe_mk.lab.files import expect_small_header, partial_folder, read_lines
from moe_mk.lab.trace.foreign import read_pt
from moe_mk.lab.trace.importers import from_router_tensors, import_trace
from moe_mk.lab.tuning.vllm import read_vllm
from moe_mk.weights import SafetensorsSource, inspect_checkpoint
from moe_mk.weights.expert_store import ExpertStore, write_store
from moe_mk.weights.source import INDEX
from tests.support.alone import NEEDS_PEAKS, alone, status

HUGE = 5 << 30
VLLM = "E=8,N=64,device_name=NVIDIA_H200.json"
ROOM_BYTES = 300 * MIB
"""What all of these files together may take. One of them stands for 8 GB."""


def hollow(file: Path, size: int = HUGE, head: bytes = b"") -> Path:
    """A file of zeros that takes no room on a disk."""
    with file.open("wb") as out:
        out.write(head)
        out.truncate(size)
    return file


def packed(file: Path, method: int = zipfile.ZIP_DEFLATED, /, **arrays: NDArray[Any]) -> Path:
    with zipfile.ZipFile(file, "w", method) as members:
        for name, array in arrays.items():
            with members.open(f"{name}.npy", "w") as out:
                np.lib.format.write_array(out, array)
    return file


class Calls:
    def __init__(self, what: Callable[..., object], *args: object) -> None:
        self.what, self.args = what, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.what, self.args


def calling(file: Path, what: Callable[..., object], *args: object) -> Path:
    """A .pt file whose description makes a call that torch.load allows."""
    torch.save({"records": []}, file)
    with zipfile.ZipFile(file) as members:
        records = {info.filename: members.read(info) for info in members.infolist()}
    with zipfile.ZipFile(file, "w") as members:
        for name, held in records.items():
            text = pickle.dumps({"logical_count": Calls(what, *args)}, 2) if name.endswith("data.pkl") else held
            members.writestr(name, text)
    return file


def again(file: Path, method: int) -> Path:
    """A .pt file with its records compressed."""
    with zipfile.ZipFile(file) as members:
        records = {info.filename: members.read(info) for info in members.infolist()}
    with zipfile.ZipFile(file, "w", method) as members:
        for name, held in records.items():
            members.writestr(name, held)
    return file


def merging(file: Path) -> Path:
    """Merge keys copy the pairs that they name: 10 ** 9 pairs in a few lines."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10)]
    file.write_text("\n".join(lines))
    return file


def inspect_config(folder: Path) -> None:
    raise MoEMKError(f"{folder}: " + "; ".join(inspect_checkpoint(folder).problems))


def tuned(file: Path) -> object:
    return load_measured(file, "moe-mk tune")


READERS: dict[str, Callable[[Path], object]] = {
    "trace": import_trace, "loads": read_loads, "ids": read_token_ids, "weights": SafetensorsSource,
    "config": inspect_config, "settings": read_mapping, "tuned": tuned, "vllm": read_vllm,
    "certificate": read_certificate,
}  # fmt: skip


def hostile_files(folder: Path) -> list[tuple[str, Path, str]]:
    """Reader, file, and what the error states; nothing where the file is read."""
    for name in ("index", "config"):
        (folder / name).mkdir()
    hollow(folder / "index" / INDEX)
    save_file({"a": torch.ones(2)}, folder / "config" / "x.safetensors")
    hollow(folder / "config" / "config.json")
    zeros = np.zeros((200_000, 1_000), np.bool_)
    header = hollow(folder / "header.safetensors", head=(HUGE - 8).to_bytes(8, "little"))
    torch.save({"logical_count": torch.ones(1).expand(2_000_000_000)}, folder / "spread.pt")
    torch.save({"records": [torch.ones(1 << 16)] * 1000}, folder / "often.pt")
    torch.save({"logical_count": torch.zeros(1 << 25, dtype=torch.uint8)}, folder / "packed.pt")
    too_long = f"has {HUGE - 8} bytes, the limit is {HEADER_BYTES}"
    halves = {f"layer_{n}.topk_ids": zeros[:9000] for n in range(2)}
    ones = {"layers.1.routing_map": ~zeros[:16_000]}
    return [
        ("trace", packed(folder / "zeros.npz", routing_map=zeros), "1 arrays have 200000128 bytes; of .* the limit is"),
        (
            "trace",
            packed(folder / "halves.npz", zipfile.ZIP_DEFLATED, **halves),
            "2 arrays have 18000256 bytes; of .* the limit is 16777216 ",
        ),
        ("trace", packed(folder / "b.npz", zipfile.ZIP_BZIP2, topk_ids=zeros[:9]), "is packed by method 12"),
        ("trace", packed(folder / "x.npz", zipfile.ZIP_LZMA, topk_ids=zeros[:9]), "is packed by method 14"),
        ("trace", packed(folder / "map.npz", zipfile.ZIP_DEFLATED, **ones), ""),
        ("trace", packed(folder / "ids.npz", topk_ids=np.ones((2000, 8000), np.uint8)), "pass num_experts, 2 or more"),
        ("trace", folder / "spread.pt", "its tensors have 8000000000 bytes or more, the limit"),
        ("loads", folder / "spread.pt", "its tensors have 8000000000 bytes or more, the limit"),
        ("trace", folder / "often.pt", r"its tensors have \d+ bytes or more, the limit"),
        ("loads", again(folder / "packed.pt", zipfile.ZIP_DEFLATED), "records are compressed"),
        ("loads", calling(folder / "bytes.pt", bytearray, HUGE), r"names \w+ bytearray"),
        ("loads", calling(folder / "float.pt", torch.FloatTensor, HUGE), "names torch FloatTensor"),
        ("loads", header, f"its header {too_long}"),
        ("ids", header, f"its header {too_long}"),
        ("trace", header, f"its header {too_long}"),
        ("weights", header, f"header.safetensors has a header of {HUGE - 8} bytes, the limit is {HEADER_BYTES}"),
        ("weights", folder / "index", f"{HUGE} bytes, the limit is {INDEX_BYTES}"),
        ("config", folder / "config", f"{HUGE} bytes, the limit is {JSON_BYTES}"),
        ("settings", hollow(folder / "a.yaml"), f"{HUGE} bytes, the limit is {YAML_BYTES}"),
        ("settings", hollow(folder / "a.json"), f"{HUGE} bytes, the limit is {JSON_BYTES}"),
        ("settings", merging(folder / "merge.yaml"), f"more than {MOST_VALUES} values"),
        ("tuned", folder / "a.json", f"{HUGE} bytes, the limit is {JSON_BYTES}"),
        ("vllm", hollow(folder / VLLM), f"{HUGE} bytes, the limit is {JSON_BYTES}"),
        ("certificate", folder / "a.json", f"{HUGE} bytes, the limit is {JSON_BYTES}"),
        ("loads", folder / "a.json", f"{HUGE} bytes, the limit is {INDEX_BYTES}"),
        ("trace", hollow(folder / "a.jsonl"), f"a line of more than {LINE_BYTES} bytes"),
    ]


def read_them_all(files: list[list[str]]) -> list[tuple[str, int]]:
    """What every reader states of its file, and the memory that all so far have taken."""
    before, found = status("VmHWM"), []
    for reader, file in files:
        try:
            READERS[reader](Path(file))
            text = ""
        except MoEMKError as problem:
            text = str(problem)
        found.append((text, status("VmHWM") - before))
    return found


@NEEDS_PEAKS
@pytest.mark.slow
def test_no_reader_takes_more_memory_than_the_size_of_a_file_allows(tmp_path: Path) -> None:
    cases = hostile_files(tmp_path)
    results = alone(read_them_all, [(reader, file) for reader, file, _ in cases])
    for (reader, file, words), (text, took) in zip(cases, results, strict=True):
        assert re.search(words, text) and bool(words) == bool(text), (reader, file.name, text)
        assert not words or file.name in text or words.startswith("pass num_experts"), (file.name, text)
        assert took < ROOM_BYTES, (reader, file.name, took)


def test_values_of_yaml_are_counted_at_every_use_of_an_alias(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: &a {x: 1, y: [2, 3]}\nb: {<<: *a, y: 4}\nc: [*a, *a]\n")
    assert read_yaml(file) == {"a": {"x": 1, "y": [2, 3]}, "b": {"x": 1, "y": 4}, "c": [{"x": 1, "y": [2, 3]}] * 2}
    file.write_text("a: &a [" + "1, " * 999 + "1]\nb: [" + "*a, " * 98 + "*a]\n")
    with pytest.raises(ValueError, match=f"more than {MOST_VALUES} values, each alias counted"):
        read_yaml(file)
    file.write_text("a: &a [1, *a]\n")
    with pytest.raises(ValueError, match="an alias stands inside the value that it names"):
        read_yaml(file)
    file.write_text("[" * MOST_LEVELS + "]" * MOST_LEVELS)
    assert isinstance(read_yaml(file), list)
    file.write_text("kernel: {wire: plain}\nrouter: {top_k: 2}\nkernel: {tiles: 2}\n")
    with pytest.raises(ValueError, match="the key 'kernel' appears twice in one mapping"):
        read_yaml(file)
    file.write_text("[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1))
    with pytest.raises(ValueError, match=f"nested above {MOST_LEVELS} levels"):
        read_yaml(file)


def test_limits_hold_to_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="it has 5 bytes, the limit is 4"):
        read_bytes(tmp_path / "a", 4)
    hollow(tmp_path / "header", 100, HEADER_BYTES.to_bytes(8, "little"))
    expect_small_header(tmp_path / "header")
    hollow(tmp_path / "header", 100, (HEADER_BYTES + 1).to_bytes(8, "little"))
    with pytest.raises(ValueError, match=f"its header has {HEADER_BYTES + 1} bytes, the limit is {HEADER_BYTES}"):
        expect_small_header(tmp_path / "header")
    (tmp_path / "lines").write_bytes(b"1\n\n2")
    assert list(read_lines(tmp_path / "lines")) == [b"1\n", b"\n", b"2"]
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(tmp_path / "deep")


@pytest.mark.parametrize("reader", [read_json, read_yaml, expect_small_header, lambda path: list(read_lines(path))])
def test_pipes_and_devices_are_not_read(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match="it is no regular file"):
            reader(path)


def test_what_recorders_write_is_read_as_before(tmp_path: Path) -> None:
    held = {
        "rank": 3, "name": "a", "mean": 2.5, "none": None, "flag": True, "list": [1, (2, 3)], "set": {4},
        "int": torch.arange(6, dtype=torch.int32).view(2, 3), "part": torch.arange(10)[2:4], "bytes": b"ab",
        "bf16": torch.ones(2, dtype=torch.bfloat16), "dtype": torch.float16, "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.ones(2)), "ordered": OrderedDict(x=1), "turned": torch.ones(2, 3).T,
    }  # fmt: skip
    torch.save(held, tmp_path / "a.pt")
    read = read_pt(tmp_path / "a.pt")
    assert isinstance(read, dict) and list(read) == list(held)
    for name, value in held.items():
        assert torch.equal(read[name], value) if isinstance(value, torch.Tensor) else read[name] == value


def test_a_map_that_is_sorted_in_pieces_gives_what_it_gave_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    chosen = torch.rand((50, 8), generator=draw) < 0.4
    tensors = {"layer_1.routing_map": chosen, "layer_1.probs": torch.rand((50, 8), generator=draw)}
    whole = from_router_tensors(tensors)
    monkeypatch.setattr("moe_mk.lab.trace.importers.PIECE", 24)
    pieces = from_router_tensors(tensors)
    assert torch.equal(whole.ids_RK, pieces.ids_RK)
    assert whole.weights_RK is not None and pieces.weights_RK is not None
    assert torch.equal(whole.weights_RK, pieces.weights_RK)
    for row, ids in zip(chosen, whole.ids_RK, strict=True):
        assert [int(e) for e in ids if e >= 0] == row.nonzero().flatten().tolist()


def fail_half_way(path: Path, error: Exception) -> None:
    with files.replacing(path) as temporary:
        temporary.write_text("half")
        raise error


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    target, link = tmp_path / "report.json", tmp_path / "link.json"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)
    with pytest.raises(RuntimeError):
        fail_half_way(link, RuntimeError())
    assert target.read_text() == "before" and sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "report.json"]
    files.write_text(link, "after")
    assert target.read_text() == "after" and link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "report.json"]
    (circle := tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        files.write_text(circle, "text")


def test_a_full_disk_names_the_file_and_both_sizes(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    with pytest.raises(OSError, match=r"the disk is full: 4 bytes were written, \d+ are free.*report.json"):
        fail_half_way(target, OSError(errno.ENOSPC, "No space left on device", "a temporary file"))
    assert not any(tmp_path.iterdir())


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write_text(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)


def in_containers(count: int, work: Callable[[int], object]) -> list[int]:
    """The exit codes of processes that see the same numbers of processes and threads, as in two containers."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with mock.patch("os.getpid", return_value=1), mock.patch("threading.get_native_id", return_value=1):
                    work(number)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def write_as(path: Path, letter: int) -> None:
    size = 200_000
    for _ in range(12):
        if path.suffix == ".experts":
            write_store(path, {}, 4, 4096 * 8, (memoryview(bytes([65 + letter]) * 4096 * 8) for _ in range(4)))
            with ExpertStore(path) as store:
                mapped = mmap.mmap(-1, 4096 * 8)
                for expert in range(4):
                    store.read(expert, memoryview(mapped))
                    assert len(set(mapped[:])) == 1
        elif path.suffix == ".json":
            files.write_text(path, chr(97 + letter) * size)
            found = path.read_text()
            assert len(found) == size and len(set(found)) == 1
        else:
            with partial_folder(path, name=".made") as partial:
                for name in "ab":
                    (partial / name).write_bytes(bytes([letter]) * size)
            assert all(len(set((path / name).read_bytes())) == 1 for name in "ab")


@pytest.mark.parametrize("name", ["tuned.json", "layer.experts", "checkpoint"])
def test_writers_of_one_path_in_several_containers_do_not_disturb_each_other(tmp_path: Path, name: str) -> None:
    """Each writer and reader sees whole files of one writer, and nothing is left."""
    path = tmp_path / name
    if not path.suffix:
        path.mkdir()
    assert in_containers(3, lambda letter: write_as(path, letter)) == [0] * 3
    assert list(tmp_path.iterdir()) == [path] and (path.is_file() or {"a", "b"} == {p.name for p in path.iterdir()})


def test_a_link_at_the_name_of_a_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another user who has guessed it: the file behind the link stays, and another name is taken or none."""
    victim, target = tmp_path / "victim", tmp_path / "report.json"
    victim.write_text("mine")
    monkeypatch.setattr(files, "token_hex", lambda size: "00")
    (tmp_path / ".report.json.00.partial").symlink_to(victim)
    with pytest.raises(FileExistsError, match="report.json"):
        files.write_text(target, "text")
    assert victim.read_text() == "mine" and not target.exists() and (tmp_path / ".report.json.00.partial").is_symlink()


@pytest.mark.parametrize("when", ["before it is opened", "before it is locked", "while another process locks it"])
def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    made: list[Path] = []
    opened = os.open

    def swept(path: Path, *given: int, **named: int) -> int:
        if made or ".partial" not in str(path):
            return opened(path, *given, **named)
        made.append(path)
        if when == "before it is opened":
            Path(path).rmdir()
            return opened(path, *given, **named)
        handle = opened(path, *given)
        if when == "before it is locked":
            Path(path).rmdir()
        else:
            fcntl.flock(opened(path, *given), fcntl.LOCK_EX)
        return handle

    monkeypatch.setattr(os, "open", swept)
    with partial_folder(tmp_path / "checkpoint") as partial:
        assert made and partial not in made
        (partial / "a").write_text("whole")
    assert (tmp_path / "checkpoint" / "a").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    opened = os.open

    def swept(path: Path, *given: int) -> int:
        handle = opened(path, *given)
        made.append(path)
        if len(made) == 1:
            Path(path).unlink()
        return handle

    monkeypatch.setattr(os, "open", swept)
    path, handle = files.new_file(tmp_path / "a", locked=True)
    monkeypatch.undo()
    with files.abandoned(path) as is_left:
        assert not is_left and len(made) == 2 and path.exists()
    os.close(handle)
    with files.abandoned(path) as is_left:
        assert is_left
