"""No interrupt makes a descriptor be closed twice: by then its number may be that of another file."""

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_mk import files
from moe_mk.comm.symmetric import memory
from moe_mk.lab.checkpoints.safetensors_writer import Planned, SafetensorsWriter
from moe_mk.lab.files import partial_folder
from moe_mk.process import Process, WatchedProcess
from moe_mk.weights import SafetensorsSource
from moe_mk.weights.expert_store import ALIGNMENT, ExpertStore, write_store
from moe_mk.weights.source import in_memory
from tests.layer.interrupted_ranks import Interrupts


def read_a_store(folder: Path) -> None:
    if not (folder / "a.experts").exists():
        write_store(folder / "a.experts", {}, 1, ALIGNMENT, [memoryview(bytes(ALIGNMENT))])
    with ExpertStore(folder / "a.experts") as store:
        assert store.num_experts == 1


def read_tensors(folder: Path) -> None:
    if not (folder / "model.safetensors").exists():
        save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    assert in_memory(SafetensorsSource(folder).open("a")).sum() == 3


def write_tensors(folder: Path) -> None:
    (folder / "new.safetensors").unlink(missing_ok=True)
    with SafetensorsWriter(folder / "new.safetensors", [Planned("a", torch.uint8, (4,))], {}) as file:
        file.write("a", torch.ones(4, dtype=torch.uint8))


def write_a_folder(folder: Path) -> None:
    with partial_folder(folder / "checkpoint", name=".made") as partial:
        (partial / "a").write_text("a")


def share_a_window(folder: Path) -> None:
    name, window = memory.create(4096, folder)
    memory.attach(name, 4096, folder).bytes[0] = 1
    assert window.bytes[0] == 1
    memory.unlink(name, folder)


VERBS: dict[str, Callable[[Path], object]] = {
    "a store is written and read": read_a_store,
    "tensors are read": read_tensors,
    "tensors are written": write_tensors,
    "a folder is written": write_a_folder,
    "a text is written": lambda folder: files.write_text(folder / "a.txt", "a"),
    "a window is created and attached": share_a_window,
    "a process is watched": lambda folder: WatchedProcess(Process.this(), Process.this()),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalisers
@pytest.mark.parametrize("name", VERBS)
def test_no_interrupt_closes_a_descriptor_twice(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, close, twice = VERBS[name], os.close, list[str]()

    def checked(descriptor: int) -> None:
        try:
            close(descriptor)
        except OSError:
            twice.append(interrupts.at)

    def run() -> None:
        verb(tmp_path)

    for _ in range(2):  # the first one prepares what later ones find
        run()
    gc.collect()
    monkeypatch.setattr(os, "close", checked)
    interrupts = Interrupts(within=run.__code__)
    with interrupts.traced():
        run()
    places, raised = interrupts.places, 0
    for place in range(1, places + 1):
        interrupts = Interrupts(place, within=run.__code__)
        with suppress(KeyboardInterrupt), interrupts.traced():
            run()
        raised += interrupts.at != ""
        gc.collect(0)
    assert raised > places / 2 and not twice
