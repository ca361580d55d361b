"""Devices that are here, and those that are not."""

import os

import pytest
import torch

from moe_mk.config import device_profile
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.external.device import (
    collective_backend,
    describe,
    device_of_rank,
    profile_here,
    synchronize,
    usable_device,
)
from moe_mk.lab.cli.run import peak_host_bytes
from tests.support.alone import NEEDS_PEAKS, status

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_the_cpu_is_always_usable() -> None:
    assert usable_device("cpu") == usable_device(CPU) == CPU


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused_with_reason_and_way_out(no_gpu: None, name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"device {name} cannot be used\n  - .*\n  - use --device cpu"):
        usable_device(name)
    with pytest.raises(UnsupportedError, match="cannot be used"):
        device_of_rank(name, 3)


def test_other_kinds_of_device_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="device meta cannot be used\n  - this library runs on cpu and cuda"):
        usable_device("meta")


@pytest.mark.parametrize(
    "ask", [usable_device, lambda name: device_of_rank(name, 0), lambda n: collective_backend(n, 1)]
)
def test_what_is_no_device_is_a_setting_that_cannot_work(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(ConfigError, match="'gpuu' is not a device"):
        ask("gpuu")


def test_gpus_are_counted_and_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert usable_device("cuda") == torch.device("cuda", 1) and usable_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(UnsupportedError, match="device cuda:2 cannot be used\n  - 2 GPUs are visible"):
        usable_device("cuda:2")
    assert [device_of_rank("cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert [collective_backend("cuda", ranks) for ranks in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert collective_backend("cpu", 1) == collective_backend("cpu", 8) == "gloo" and device_of_rank("cpu", 5) == CPU


def test_the_profile_of_this_machine_has_its_memory() -> None:
    profile = profile_here(CPU)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert profile.memory_gib == pytest.approx(memory)
    assert profile.model_dump(exclude={"memory_gib"}) == device_profile("cpu").model_dump(exclude={"memory_gib"})


def test_a_person_reads_the_name_and_the_threads() -> None:
    assert describe(CPU).endswith(f", {torch.get_num_threads()} threads")
    synchronize(CPU)


@NEEDS_PEAKS
def test_peak_memory_is_in_bytes() -> None:
    peak = peak_host_bytes()
    assert peak == pytest.approx(status("VmHWM"), rel=0.05)
