"""The threads of the native kernels: those of torch's OpenMP runtime, or the kernels' own.

OpenMP workers spin for a while after every parallel operator of torch. A second pool of threads would wait for the
processors that they spin on, so kernels that run between operators of torch use the same workers.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Literal

import torch

from moe_mk.errors import unless_signalled

Threads = Literal["auto", "engine", "own"]
"""engine: torch's OpenMP workers. own: threads of the kernels. auto: engine where torch has such workers, else own."""

SYMBOLS = ("GOMP_parallel_start", "GOMP_parallel_end", "omp_get_thread_num", "omp_in_parallel", "omp_get_max_threads")
_FIRST_PROCESS = os.getpid()


class _LoadedObject(ctypes.Structure):
    """The first fields of `dl_phdr_info`."""

    _fields_ = (("base", c_void_p), ("path", c_char_p))


class _Symbol(ctypes.Structure):
    """C structure `Dl_info` of dlfcn.h."""

    _fields_ = (("path", c_char_p), ("base", c_void_p), ("name", c_char_p), ("address", c_void_p))


@dataclass(frozen=True)
class Runtime:
    """The OpenMP runtime that torch calls. `functions` are the addresses of SYMBOLS."""

    path: str
    functions: tuple[int, ...]


def engine_runtime() -> Runtime | str:
    """Find the runtime of torch's operators, or return the reason why the kernels cannot use one."""
    if os.getpid() != _FIRST_PROCESS:
        return "an OpenMP runtime does not survive the fork of its process"
    return _runtime()


def described(setting: Threads = "auto") -> str:
    """The threads that calls use with this value of kernel.threads, for a person."""
    found = engine_runtime()
    if setting == "own":
        return "threads of their own, kernel.threads = own"
    if isinstance(found, str):
        return f"threads of their own: {found}"
    return f"torch's OpenMP threads, {PurePath(found.path).name}"


@cache
def _runtime() -> Runtime | str:
    """Search as the dynamic linker did for libtorch_cpu.

    The linker prefers global symbols, so a preloaded runtime precedes the one that libtorch_cpu depends on. Copies that
    other packages load later do not count, even with global symbols: those of libtorch_cpu are bound by then.
    """
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return "torch is built without OpenMP"
    process = ctypes.CDLL(None)
    try:
        objects = _loaded_objects(process)
        names = [PurePath(path).name for _, path in objects]
        at = next(index for index, name in enumerate(names) if name.startswith("libtorch_cpu."))
        earlier = {base for base, _ in objects[:at]}
        for library in (process, ctypes.CDLL(objects[at][1], mode=os.RTLD_NOLOAD | os.RTLD_NOW)):
            found = _runtime_in(process, library)
            if found is not None and (library is not process or found[0] in earlier):
                return found[1]
    except unless_signalled(AttributeError, OSError, StopIteration):
        pass
    return f"libtorch_cpu uses no library with {', '.join(SYMBOLS)}"


def _loaded_objects(process: ctypes.CDLL) -> list[tuple[int | None, str]]:
    """Base addresses and paths of the libraries of this process in the order of loading."""
    objects: list[tuple[int | None, str]] = []

    def note(entry: ctypes._Pointer[_LoadedObject], size: int, data: int) -> int:
        objects.append((entry.contents.base, os.fsdecode(entry.contents.path or b"")))
        return 0

    visitor = ctypes.CFUNCTYPE(c_int, ctypes.POINTER(_LoadedObject), c_size_t, c_void_p)
    process.dl_iterate_phdr(visitor(note), None)
    return objects


def _runtime_in(process: ctypes.CDLL, library: ctypes.CDLL) -> tuple[int | None, Runtime] | None:
    """The runtime that a library's scope resolves SYMBOLS to, with its base address; None if it is not one library."""
    if not all(hasattr(library, name) for name in SYMBOLS):
        return None
    addresses = [ctypes.cast(getattr(library, name), c_void_p) for name in SYMBOLS]
    places = [_Symbol() for _ in addresses]
    known = [process.dladdr(address, ctypes.byref(place)) for address, place in zip(addresses, places, strict=True)]
    if not all(known) or len({place.base for place in places}) != 1:
        return None
    return places[0].base, Runtime(os.fsdecode(places[0].path), tuple(address.value or 0 for address in addresses))
