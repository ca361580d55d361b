"""Compile kernels ahead of time on a machine without the GPU, into a folder of Triton's cache that can be moved.

Inside `compiling`, a launch binds its arguments and compiles as on the GPU, and then launches nothing. Arguments are
tensors of the meta device: their addresses count as aligned, as those of torch's allocator are. Triton finds a
compiled kernel by its sources, argument types and alignments, options, target, and its own installation: the same
wheel of Triton must be used on the GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moe_mk.errors import UnsupportedError
from moe_mk.files import read_json, write_text
from moe_mk.kernels.triton import launch
from moe_mk.kernels.triton.numerics import INTERPRETED
from moe_mk.kernels.triton.tile import SHARED_MEMORY

NO_DEVICES = count(-1, -1)
"""A device number for each use: Triton keeps kernels by it, and a launch must never find those that are not loaded."""
WARP = 32
MOST_THREADS = 1024


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of the folder."""

    name: str
    key: str
    """The hash under which a launch looks it up; the name of its folder follows from it."""
    seconds: float
    was_there: bool
    """Whether the folder had it already."""
    shared_bytes: int


class CompileOnlyDriver:
    """A driver of Triton for an NVIDIA GPU that is not there; launches do nothing."""

    def __init__(self, arch: int, multiprocessors: int) -> None:
        self.target, self.multiprocessors = GPUTarget("cuda", arch, WARP), multiprocessors
        self.utils, self.device = self, next(NO_DEVICES)

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """A number that no device has."""
        return self.device

    def get_current_stream(self, device: int) -> int:
        """Return the default stream, 0."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Limits that launches check, and the number of persistent programs."""
        return {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": self.multiprocessors}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        """Nothing is loaded: module, function, registers, spills, threads."""
        return None, None, 0, 0, MOST_THREADS

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return a launcher that does nothing."""
        return lambda *given: None


@contextmanager
def compiling(folder: Path, arch: int, multiprocessors: int) -> Iterator[list[CompiledKernel]]:
    """Inside, launches compile for sm_{arch} into a folder and do not run; yields the kernels as they come.

    Raises UnsupportedError under TRITON_INTERPRET. Not thread-safe: Triton has one driver per process.
    """
    if INTERPRETED:
        raise UnsupportedError("kernels cannot be compiled here", ["TRITON_INTERPRET is set; unset it"])
    found: list[CompiledKernel] = []

    def listen(*, metadata: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        seconds = 0.0 if cache_hit else times.total / 1e6
        found.append(CompiledKernel(metadata["name"], metadata["hash"], seconds, cache_hit, metadata["shared"]))

    relocate(folder)
    there = set(folder.glob("*"))
    before = driver._active  # reading `driver.active` would ask for a GPU
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir, knobs.compilation.listener = str(folder), listen
        driver.set_active(CompileOnlyDriver(arch, multiprocessors))
        launch._multiprocessors.cache_clear()
        try:
            yield found
        except BaseException:
            for each in set(folder.glob("*")) - there:  # the kernel that was being compiled
                if not any(each.glob("__grp__*.json")):
                    shutil.rmtree(each, ignore_errors=True)
            raise
        finally:
            driver.set_active(before)
            launch._multiprocessors.cache_clear()


def relocate(folder: Path) -> int:
    """Correct the absolute paths in a cache folder after it was moved; returns the number of kernels.

    Triton 3.6 lists the files of a kernel by absolute paths and compiles it again where they do not exist. A list that
    is damaged is removed, so that its kernel is compiled again.
    """
    found = 0
    for group in folder.glob("*/__grp__*.json"):
        try:
            files = read_json(group)["child_paths"]
            moved = {name: str(group.parent / name) for name in files}
        except (ValueError, KeyError, TypeError):
            group.unlink()
            continue
        if moved != files:
            write_text(group, json.dumps({"child_paths": moved}))
        found += 1
    return found
