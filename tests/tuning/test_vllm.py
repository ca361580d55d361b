"""vLLM's tuned files are read as they are."""

import json
from pathlib import Path

import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.tuning import read_vllm

NAME = "E=256,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[64,128].json"
SMALL = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
LARGE = SMALL | {"BLOCK_SIZE_M": 64, "GROUP_SIZE_M": 32}


def write(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(content))
    return path


def test_name_and_content_are_read(tmp_path: Path) -> None:
    tuned = read_vllm(write(tmp_path, NAME, {"triton_version": "3.5.1", "64": LARGE, "1": SMALL}))
    assert (tuned.num_experts, tuned.intermediate_size, tuned.device) == (256, 128, "NVIDIA_H200")
    assert (tuned.dtype, tuned.block, tuned.triton_version) == ("fp8_w8a8", (64, 128), "3.5.1")
    assert list(tuned.parameters) == [1, 64]


def test_nothing_serves_outside_the_tuned_range(tmp_path: Path) -> None:
    tuned = read_vllm(write(tmp_path, NAME, {"1": SMALL, "64": LARGE}))
    assert tuned.at(1) == SMALL and tuned.at(7) == SMALL and tuned.at(9) == LARGE and tuned.at(64) == LARGE
    assert tuned.at(65) is None


@pytest.mark.parametrize(("name", "dtype", "block"), [
    ("E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3.json", None, None),
    ("E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8.json", "fp8_w8a8", None),
    ("E=8,N=14336,device_name=AMD_Instinct_MI300X,block_shape=[128, 128].json", None, (128, 128)),
])  # fmt: skip
def test_every_way_to_name_a_file(tmp_path: Path, name: str, dtype: str | None, block: tuple[int, int] | None) -> None:
    tuned = read_vllm(write(tmp_path, name, {"1": SMALL}))
    assert (tuned.dtype, tuned.block, tuned.triton_version) == (dtype, block, None)


@pytest.mark.parametrize(("name", "content", "stated"), [
    ("tuned.json", {"1": SMALL}, "is not the name of a tuned file"), (NAME, {}, "has no sizes"),
    (NAME, {"0": SMALL}, "not positive"), (NAME, {"many": SMALL}, "contains no tuned parameters"),
    (NAME, {"1": 3}, "contains no tuned parameters"),
])  # fmt: skip
def test_anything_else_is_refused(tmp_path: Path, name: str, content: object, stated: str) -> None:
    with pytest.raises(ConfigError, match=stated):
        read_vllm(write(tmp_path, name, content))
