"""Devices that are here, and those that are not."""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from moe_mk.config import device_profile
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.external.device import (
    Queues,
    collective_backend,
    describe,
    device_of_rank,
    has_kernels,
    identity,
    is_here,
    pinned,
    profile_here,
    stream_of,
    synchronize,
    usable_device,
    wanted_device,
)
from moe_mk.lab.cli.run import peak_host_bytes
from tests.support.alone import NEEDS_PEAKS, status

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_the_cpu_is_always_usable(no_gpu: None) -> None:
    assert usable_device("cpu") == usable_device(CPU) == CPU and is_here(CPU) and not is_here(CUDA)
    assert wanted_device("cuda:1") == CUDA and wanted_device(None) == CPU
    with torch.device("meta"):
        assert wanted_device(None).type == "meta"


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
    assert device_of_rank("cuda:1", 2) == usable_device(CUDA) == CUDA and is_here(CUDA)
    assert [collective_backend("cuda", ranks) for ranks in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert collective_backend("cpu", 1) == collective_backend("cpu", 8) == "gloo" and device_of_rank("cpu", 5) == CPU


def test_the_profile_of_this_machine_has_its_memory() -> None:
    profile = profile_here(CPU)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert profile.memory_gib == pytest.approx(memory)
    assert profile.model_dump(exclude={"memory_gib"}) == device_profile("cpu").model_dump(exclude={"memory_gib"})


GPUS = [
    # The driver's name, its architecture, the nearest profile, the name of the profile, and whether kernels run there.
    ("NVIDIA H100 80GB HBM3", (9, 0), "h100", "h100", True), ("NVIDIA H200", (9, 0), "h200", "h200", True),
    ("NVIDIA GB200", (10, 0), "b200", "b200", True), ("NVIDIA B300 SXM6", (10, 3), "b200", "nvidia_b300_sxm6", True),
    ("NVIDIA X", (10, 0), "b200", "nvidia_x", True), ("NVIDIA L40S", (8, 9), "h100", "nvidia_l40s", False),
    ("AMD Instinct MI355X", None, "mi300x", "mi300x", False),
]  # fmt: skip


@pytest.mark.parametrize("called,arch,nearest,name,kernels", GPUS)
def test_a_gpu_has_the_nearest_profile_with_its_own_memory_and_architecture(
    monkeypatch: pytest.MonkeyPatch, called: str, arch: tuple[int, int] | None, nearest: str, name: str, kernels: bool
) -> None:
    major, minor = arch or (9, 5)
    found = SimpleNamespace(name=called, major=major, minor=minor, total_memory=77 * 2**30, uuid="GPU-1",
                            gcnArchName="gfx950:sramecc+:xnack-")  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", None if arch else "7.0")
    monkeypatch.setattr("moe_mk.external.device.find_spec", lambda library: library == "triton" or None)
    own = {"arch": arch, "name": name} if arch else {"gfx": "gfx950"}
    assert profile_here(CUDA) == device_profile(nearest).model_copy(update={"memory_gib": 77.0} | own)
    assert has_kernels.__wrapped__(CUDA) is kernels and not has_kernels.__wrapped__(CPU)
    assert (identity(CUDA), identity(CPU)) == ("GPU-1", "cpu")
    monkeypatch.setattr("moe_mk.external.device.find_spec", lambda library: None)
    assert not has_kernels.__wrapped__(CUDA)


def test_memory_is_locked_for_a_gpu_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, error = list[tuple[object, ...]](), 0
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *given: calls.append(given) or error, cudaHostUnregister=lambda at: calls.append((at,))
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = torch.zeros(6, dtype=torch.int16)
    at = memory.data_ptr()
    assert pinned(memory, CPU) is memory and pinned(torch.empty(0), CUDA).numel() == 0 and not calls
    assert pinned(memory, CUDA) is memory and calls == [(at, 12, 0)]
    del memory
    assert calls[1:] == [(at,)]
    error = 2
    with pytest.raises(MemoryError, match="12 bytes of host memory cannot be locked for cuda:1: CUDA error 2"):
        pinned(torch.zeros(6, dtype=torch.int16), CUDA)


def test_a_worker_queues_on_its_own_stream_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[MagicMock]()
    current = [MagicMock(cuda_stream=0)]
    stream = lambda device: made.append(MagicMock(cuda_stream=len(made) + 1)) or made[-1]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: current.append(stream) or nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    queues, marks = Queues(CUDA), list[object]()
    for name in ("comm", "onward", "comm"):
        with queues.on_stream(name):
            marks.append(queues.mark())
    queues.after(marks[1])
    assert len(made) == 2 and [each.cuda_stream for each in current] == [0, 1, 2, 1] and stream_of(CUDA) == 1
    assert marks == [made[at].record_event() for at in (0, 1, 0)]
    made[0].wait_event.assert_called_once_with(marks[1])


def test_a_person_reads_the_name_and_the_threads() -> None:
    assert describe(CPU).endswith(f", {torch.get_num_threads()} threads")
    synchronize(CPU)


@NEEDS_PEAKS
def test_peak_memory_is_in_bytes() -> None:
    peak = peak_host_bytes()
    assert peak == pytest.approx(status("VmHWM"), rel=0.05)
