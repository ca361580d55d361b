"""Compile the C++ kernels on first use and keep the result in the user's cache directory.

The cache belongs to the user alone (mode 0700, refused when somebody else owns it): whoever can write there can run
code here. A library is built beside its place and renamed into it; a lock file lets one process build while the
others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_mk.errors import UnsupportedError
from moe_mk.kernels.native.toolchain import LINK_FLAGS, Compiler, Unit, digest

Progress = Callable[[str], None]
OnUnit = Callable[[int, int], None]
"""Told after each source how many of how many are compiled."""

NO_COMPILER = (
    "no C++ compiler was found (looked for c++, g++, clang++); install one (Debian: apt install g++); without one "
    "torch_cpu serves, which decodes FP8 experts block by block at every call, several times slower"
)


@dataclass(frozen=True)
class Recipe:
    """What is compiled and with what: everything that decides the bytes of the library."""

    compiler: Compiler
    units: tuple[Unit, ...]
    link_flags: tuple[str, ...] = LINK_FLAGS

    def key(self) -> str:
        """Hash sources, headers, flags, compiler and processor into the library's name."""
        hashed = hashlib.sha256(digest(self.units).encode())
        for part in (self.compiler.path, self.compiler.version, *self.link_flags, *processor()):
            hashed.update(b"\0" + part.encode())
        return hashed.hexdigest()[:24]


def processor() -> tuple[str, ...]:
    """Say what makes this processor another one for a compiler: its architecture and feature flags."""
    cpuinfo = Path("/proc/cpuinfo")
    words = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    flags = [line for line in words.splitlines() if line.lower().startswith(("flags", "features"))]
    return platform.machine(), *flags[:1]


def default_cache_dir(home: Path | None = None) -> Path:
    """Say where compiled kernels live unless told otherwise; home: the user's, asked of the system if not given."""
    base = home or Path.home()
    return base / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "moe_mk" / "kernels"


def own_directory(path: Path) -> Path:
    """Create the cache directory with mode 0700, or check that it is ours and nobody else's.

    Raises UnsupportedError when it belongs to another user or is no directory.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
    except OSError as error:
        raise UnsupportedError(
            f"the kernel cache {path} cannot be used", [f"{error}; pass another cache_dir"]
        ) from error
    if state.st_uid != os.getuid():
        raise UnsupportedError(
            f"the kernel cache {path} belongs to user {state.st_uid}, not to {os.getuid()}",
            ["code from it would run as you; pass a cache_dir of your own"],
        )
    if stat.S_IMODE(state.st_mode) & 0o077:
        path.chmod(0o700)
    return path


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Let one process at a time through; the system frees the lock when its holder dies."""
    handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_ours(library: Path) -> bool:
    """Say whether a cached library exists, is a plain file of ours, and is writable by nobody else."""
    try:
        state = library.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022


def build(recipe: Recipe, cache_dir: Path, progress: Progress | None = None, on_unit: OnUnit | None = None) -> Path:
    """Return the compiled library, building it if this recipe is not in the cache yet.

    Safe when any number of processes start at once: one builds, the others wait and find it.
    Raises UnsupportedError with the compiler's own words when it fails.
    """
    library = own_directory(cache_dir) / f"moe_mk-{recipe.key()}.so"
    if is_ours(library):
        return library
    with only_one(library.with_suffix(".lock")):
        if not is_ours(library):
            _compile(recipe, library, progress, on_unit)
    return library


def _compile(recipe: Recipe, library: Path, progress: Progress | None, on_unit: OnUnit | None) -> None:
    if progress is not None:
        progress(f"compiling {len(recipe.units)} CPU kernel sources with {recipe.compiler.version}")
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        objects = [Path(folder) / f"{unit.source.stem}.o" for unit in recipe.units]
        compiler = recipe.compiler.path
        _run(
            [
                [compiler, *u.flags, "-c", str(u.source), "-o", str(o)]
                for u, o in zip(recipe.units, objects, strict=True)
            ],
            on_unit,
        )
        linked = Path(folder) / library.name
        _run([[compiler, *recipe.link_flags, "-o", str(linked), *map(str, objects)]])
        linked.chmod(0o700)
        linked.replace(library)
    if progress is not None:
        progress(f"compiled CPU kernels -> {library}")


def _run(commands: Sequence[Sequence[str]], on_unit: OnUnit | None = None) -> None:
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=pipe, text=True) for command in commands]
    failed = []
    try:
        for done, (command, process) in enumerate(zip(commands, running, strict=True), 1):
            said = process.communicate()[1]
            if on_unit is not None:
                on_unit(done, len(commands))
            if process.returncode != 0:
                failed.append(f"`{' '.join(command)}` ended with {process.returncode}: {said.strip()[-2000:]}")
    finally:  # interrupted: nobody may write into a folder that is about to go
        for process in running:
            process.kill()
            process.wait()
    if failed:
        raise UnsupportedError("the CPU kernels did not compile", failed)
