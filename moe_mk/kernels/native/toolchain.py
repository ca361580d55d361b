"""The system compiler: its path and version, and the flags of each C++ source.

Only the standard library is imported here: `hatch_build.py` loads this file by itself when it builds a wheel.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "csrc"
PREBUILT = Path(__file__).resolve().parent / "prebuilt"
"""The folder of compiled kernels in a wheel."""
COMPILE_S = 1800.0
"""Seconds that one source may take; the slowest takes 20 s alone, emulated or with a sanitizer minutes."""
LINK_FLAGS = ("-shared", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
COMMON_FLAGS = ("-O3", "-fPIC", "-std=c++17", "-pthread", "-fvisibility=hidden", "-fno-math-errno")
QUIET_FLAGS = (
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",  # clang has no -Wno-maybe-uninitialized
    "-Wno-psabi",
    "-Wno-unused-function",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
SAME_BITS = ("-ffp-contract=off",)
"""Of the portable kernels: a processor whose baseline has fused multiply-adds gives the bits of one without."""
EMULATION_FLAGS = ("-DMOE_MK_EMULATE_AMX", "-O1")
"""Emulated tiles are for tests, which take less time than -O3 takes to compile."""
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512_VNNI = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
AVX512 = (*AVX512_VNNI, "-mavx512vbmi", "-mavx512bf16")
X86_UNITS = {
    "isa_amx.cpp": (*AVX512, "-mgfni", "-mamx-tile", "-mamx-bf16"),
    "isa_avx2.cpp": AVX2,
    "exchange_avx2.cpp": AVX2,
    "isa_avx512vnni.cpp": AVX512_VNNI,
    "isa_avx512parts.cpp": AVX512,
    "isa_avx512int8.cpp": AVX512_VNNI,
    "isa_avx512few.cpp": AVX512,
    "isa_avx512bf16.cpp": AVX512,
    "exchange_avx512.cpp": AVX512,
    "isa_amxint8parts.cpp": (*AVX512, "-mamx-tile", "-mamx-int8"),
    "isa_amxint8.cpp": (*AVX512, "-mamx-tile", "-mamx-int8"),
}
PLAIN_UNITS = (
    "exchange.cpp",
    "isa_scalar.cpp",
    "experts.cpp",
    "dispatch.cpp",
    "forward.cpp",
    "memory.cpp",
    "pack.cpp",
    "quantize.cpp",
    "route.cpp",
    "thread_pool.cpp",
)
"""These and X86_UNITS begin with what takes longest to compile, so that all cores end at the same time."""


@dataclass(frozen=True)
class Compiler:
    """One C++ compiler of this machine; `version` is the first line of its --version."""

    path: str
    version: str


@dataclass(frozen=True)
class Unit:
    """One C++ source and the flags it is compiled with."""

    source: Path
    flags: tuple[str, ...]


def find_compiler(which: Callable[[str], str | None]) -> Compiler | None:
    """Search for a C++ compiler. which: shutil.which or a compatible function."""
    for name in COMPILERS:
        path = which(name)
        if path is None:
            continue
        try:
            state = Path(path).stat()
            return _asked(path, (state.st_ino, state.st_size, state.st_mtime_ns))
        except (OSError, subprocess.SubprocessError):
            continue  # not a working compiler; try the next name
    return None


@cache
def _asked(path: str, state: tuple[int, ...]) -> Compiler:
    asked = [path, "--version"]
    answer = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=30, check=True)
    return Compiler(path, answer.stdout.splitlines()[0] if answer.stdout else path)


def units(
    machine: str | None = None, *, emulate_amx: bool = False, tiles_only: bool = False, extra: Sequence[str] = ()
) -> tuple[Unit, ...]:
    """List the sources for one kind of processor with their flags.

    machine: as platform.machine() states; only x86-64 has vector units of its own, others run the portable kernels.
    emulate_amx: emulates AMX tile instructions in C++, to test the AMX kernels on any x86-64 (slow). tiles_only: the
    kernels around the tiles use AVX-512 and GFNI as they do with AMX; otherwise these are emulated too.
    """
    common = (*COMMON_FLAGS, *QUIET_FLAGS, *extra)
    listed = []
    if (machine or platform.machine()).lower() in ("x86_64", "amd64"):
        for name, flags in X86_UNITS.items():
            own = flags
            if emulate_amx and name.startswith("isa_amx"):
                own = tuple(flag for flag in flags if not flag.startswith("-mamx")) if tiles_only else ()
            listed.append(Unit(SOURCES / name, (*common, *own)))
    listed += [Unit(SOURCES / name, (*common, *SAME_BITS)) for name in PLAIN_UNITS]
    if emulate_amx:
        listed = [Unit(unit.source, (*unit.flags, *EMULATION_FLAGS)) for unit in listed]
    return tuple(listed)


def compilers_at_once() -> int:
    """How many compilers run at a time: one for each core of this process; each takes up to 0.4 GB of memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores)


def compile_objects(compiler: str, units: Sequence[Unit], folder: Path) -> list[Path]:
    """Compile sources into `folder`, `compilers_at_once()` at a time, and return the object files in their order.

    Raises SubprocessError for the first source that fails or takes COMPILE_S; what compilers print goes to the screen.
    """
    commands = object_commands(compiler, units, folder)
    with ThreadPoolExecutor(compilers_at_once()) as pool:
        list(pool.map(lambda each: subprocess.run(each, check=True, timeout=COMPILE_S), commands.values()))
    return list(commands)


def object_commands(compiler: str, units: Sequence[Unit], folder: Path) -> dict[Path, list[str]]:
    """The object file of each source in `folder`, with the command that compiles it; assembly goes through a pipe."""
    made = {folder / f"{unit.source.stem}.o": (*unit.flags, "-c", str(unit.source)) for unit in units}
    return {target: [compiler, "-pipe", *arguments, "-o", str(target)] for target, arguments in made.items()}


def digest(units: Sequence[Unit]) -> str:
    """Hash names, flags and contents of the sources, headers included."""
    hashed = hashlib.sha256()
    for unit in units:
        hashed.update("\0".join((unit.source.name, *unit.flags)).encode() + b"\0" + unit.source.read_bytes())
    for header in sorted(SOURCES.glob("*.h")):
        hashed.update(header.name.encode() + b"\0" + header.read_bytes())
    return hashed.hexdigest()[:24]


def digest_file(library: Path) -> Path:
    """The file with the SHA-256 of a compiled library, in the format of `sha256sum --check`."""
    return library.with_name(f"{library.name}.sha256")


def record_digest(library: Path) -> Path:
    """Record the SHA-256 of a library that was just linked, and write both files through to the disk."""
    with library.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
        os.fsync(handle.fileno())
    recorded = digest_file(library)
    with recorded.open("w") as handle:
        handle.write(f"{found}  {library.name}\n")
        handle.flush()
        os.fsync(handle.fileno())
    return recorded


def damage(library: Path, octets: BufferedReader | None = None, recorded_in: BufferedReader | None = None) -> str:
    """Why a library must not be loaded (its bytes differ from the linked ones); empty if they agree.

    octets, recorded_in: the open library and its `digest_file`; None: they are opened by name.

    The file is read and not mapped: touching a mapped page beyond the end of a truncated file ends the process.
    Costs 1 to 5 ms for the 1.2 MB of all kernels.
    """
    try:
        with recorded_in or digest_file(library).open("rb") as handle:
            recorded = handle.read(64).decode("ascii", "replace")
        with octets or library.open("rb") as handle:
            found = hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as problem:
        return f"{problem.strerror or problem}: {problem.filename}"
    return "" if found == recorded else f"its SHA-256 is {found}, {digest_file(library).name} records {recorded!r}"


def prebuilt(units: Sequence[Unit], folder: Path = PREBUILT) -> Path | None:
    """The library of the wheel, if it was compiled from exactly these sources and flags."""
    library = folder / prebuilt_name(units)
    return library if library.is_file() else None


@cache
def prebuilt_here() -> Path | None:
    """The library of the wheel that loads on this machine, looked for once: a wheel does not change under a process."""
    library = prebuilt(units())
    return None if library is None or damage(library) or load_error(library) else library


def load_error(library: Path) -> str:
    """Why the system does not load an undamaged library, as from a file system without programs; empty if it does."""
    try:
        ctypes.CDLL(str(library))
    except OSError as problem:
        return str(problem)
    return ""


def prebuilt_name(units: Sequence[Unit], machine: str | None = None) -> str:
    """The file name in a wheel of the kernels compiled from these sources; machine: as for `units`."""
    return f"moe_mk-{(machine or platform.machine()).lower()}-{digest(units)}.so"


def zig_compiler(folder: Path, target: str) -> Compiler:
    """A compiler for another processor or system, from the `ziglang` package of this Python, as a script in `folder`.

    target: as Zig names it, for example aarch64-linux-gnu.2.28. The C++ runtime is linked statically.
    Raises PackageNotFoundError without the package.
    """
    version = importlib.metadata.version("ziglang")
    script = folder / f"c++-{target}"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang c++ -target {target} "$@"\n')
    script.chmod(0o700)
    return Compiler(str(script), f"zig {version} for {target}")
