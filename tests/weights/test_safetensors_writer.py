"""Files written piece by piece are whole, aligned, and what the safetensors library reads."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_mk.lab.checkpoints.safetensors_writer import ALIGNMENT, Planned, SafetensorsWriter
from moe_mk.weights.safetensors_header import read_header

TENSORS = {
    "codes": torch.arange(7, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn),
    "halves": torch.arange(5, dtype=torch.bfloat16, device="cpu"),
    "singles": torch.arange(6, dtype=torch.float32, device="cpu").reshape(2, 3),
}


def write(path: Path) -> None:
    planned = [Planned(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]
    with SafetensorsWriter(path, planned, {"format": "pt", "note": "x"}) as file:
        for name in ("singles", "codes"):
            file.write(name, TENSORS[name])
        file.write("halves", TENSORS["halves"][3:], offset=6)
        file.write("halves", TENSORS["halves"][:3])


def expect_whole(path: Path) -> None:
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[n].view(torch.uint8), tensor.view(torch.uint8)) for n, tensor in TENSORS.items())


def test_pieces_in_any_order_make_a_file_that_the_library_reads(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors")
    expect_whole(tmp_path / "x.safetensors")
    assert read_header(tmp_path / "x.safetensors").metadata == {"format": "pt", "note": "x"}


def test_every_tensor_is_aligned_to_its_elements_and_the_data_to_64(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors").tensors
    assert min(entry.start for entry in entries.values()) % ALIGNMENT == 0
    assert all(entry.start % TENSORS[name].element_size() == 0 for name, entry in entries.items())


def test_a_system_that_writes_less_than_asked_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, bytes(data[:3]), offset))
    write(tmp_path / "x.safetensors")
    expect_whole(tmp_path / "x.safetensors")
