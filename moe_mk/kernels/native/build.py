"""Compile the C++ kernels on first use and keep the result in the user's cache directory.

The cache is private to the user (mode 0700, rejected if owned by another user), because files in it are executed. A
library is built in a temporary folder and renamed, with a file that records its SHA-256; a library whose bytes differ
from that record is compiled again. A lock file lets one process build while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import select
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from moe_mk.errors import UnsupportedError, unless_signalled
from moe_mk.kernels.native.toolchain import (
    LINK_FLAGS,
    Compiler,
    Unit,
    compilers_at_once,
    damage,
    digest,
    digest_file,
    load_error,
    object_commands,
    record_digest,
)
from moe_mk.process import Process, WatchedProcess
from moe_mk.trace.clock import now

Progress = Callable[[str], None]
OnUnit = Callable[[int, int], None]
"""Called after each source with the numbers of compiled and of all sources."""

NO_COMPILER = (
    "no C++ compiler was found (looked for c++, g++, clang++); install one (Debian: apt install g++); without one "
    "torch_cpu serves, which decodes FP8 experts block by block at every call, several times slower"
)

LOCK_TIMEOUT_S = 900.0
"""Seconds a process waits for another one that compiles, which may take minutes on a loaded machine."""
QUIET_S = 300.0
"""Seconds in which no compiler ends or writes, after which all are ended; the slowest source takes 20 s alone."""
POLL_S, GONE_POLLS = 0.05, 20
"""Seconds between attempts to take the lock, and attempts that find its holder ended before it is taken over."""
LEFTOVER_S = 86_400.0
"""Age from which temporary files without a lock, of processes that were killed, are removed."""
ROOM_BYTES = 400_000
"""Of a folder, for each source: objects and library of 21 sources take at most 5.4 MB."""
DRAIN_S = 5.0
"""Seconds to wait for a killed compiler, and for programs outside its process group that hold its pipe open."""


@dataclass(frozen=True)
class Recipe:
    """The inputs of a compilation, which determine the bytes of the library."""

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
    """The properties of this processor that affect compilation: architecture and feature flags."""
    cpuinfo = Path("/proc/cpuinfo")
    words = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    flags = [line for line in words.splitlines() if line.lower().startswith(("flags", "features"))]
    return platform.machine(), *flags[:1]


def processor_has(*flags: str) -> bool:
    """Whether this processor reports all of these features, by their names in /proc/cpuinfo."""
    return set(flags) <= set(" ".join(processor()).split())


def default_cache_dir() -> Path:
    """The cache directory of compiled kernels. Raises UnsupportedError if the user has no home directory."""
    try:
        base = Path.home()
    except unless_signalled(RuntimeError) as problem:  # no HOME, and no entry of this user in the list of users
        raise UnsupportedError("there is no home directory for the kernel cache", [f"{problem}; set HOME"]) from problem
    if not base.is_absolute():
        raise UnsupportedError(f"the home directory {str(base)!r} is not an absolute path", ["set HOME"])
    return base / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "moe_mk" / "kernels"


def temporary_cache_dir() -> Path:
    """The private folder of this user in the system's temporary folder, for users whose home cannot hold the cache.

    Raises UnsupportedError if another user could replace it, or there is no temporary folder.
    """
    try:
        base = Path(tempfile.gettempdir()).resolve()
        state = base.stat()
        path = base / f"moe_mk-kernels-{os.getuid()}"
        if state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX:
            raise UnsupportedError(f"the temporary folder {base} lets other users replace files", ["chmod +t it"])
        path.mkdir(mode=0o700, exist_ok=True)
        if path.is_symlink():
            raise UnsupportedError(f"the kernel cache {path} is a symbolic link", ["delete it"])
    except unless_signalled(OSError) as problem:
        raise UnsupportedError("no temporary folder can hold the kernel cache", [str(problem)]) from problem
    return path


@cache
def usable_library(recipe: Recipe, cache_dir: Path | None = None) -> tuple[Path | None, tuple[str, ...]]:
    """The path of the compiled library, which may not exist yet, and the reasons against other folders. Tried once.

    None if no folder can be used, with all reasons.

    cache_dir: the only folder to try; None: the user's cache directory, then the private temporary folder.
    A folder with the undamaged library is used. In another one, an empty source is compiled with the flags of the
    recipe and loaded: this finds a full disk, a folder that must not hold programs, and a compiler that fails.
    """
    places = (default_cache_dir, temporary_cache_dir) if cache_dir is None else (lambda: cache_dir,)
    reasons: list[str] = []
    for place in places:
        try:
            folder = own_directory(place())
            library = folder / f"moe_mk-{recipe.key()}.so"
            if reason_against(library):
                _try_compiling(recipe, folder)
            elif problem := load_error(library):
                raise UnsupportedError(f"the compiled kernels {library} cannot be loaded", [problem])
            return library, tuple(reasons)
        except UnsupportedError as error:
            reasons += [f"{error.what}: {reason}" for reason in error.reasons]
    return None, tuple(reasons)


def _try_compiling(recipe: Recipe, folder: Path) -> None:
    with _writing(folder), tempfile.TemporaryDirectory(dir=folder, prefix="try-", ignore_cleanup_errors=True) as made:
        source, library = Path(made) / "empty.cpp", Path(made) / "empty.so"
        source.write_text('extern "C" int moe_mk_empty() { return 0; }\n')
        with (Path(made) / "room").open("wb") as room:
            os.posix_fallocate(room.fileno(), 0, ROOM_BYTES * len(recipe.units))
        flags = dict.fromkeys(flag for unit in recipe.units for flag in unit.flags)
        _run([[recipe.compiler.path, *flags, *recipe.link_flags, "-o", str(library), str(source)]], Path(made))
        if problem := load_error(library):
            raise UnsupportedError(f"libraries in the kernel cache {folder} cannot be loaded", [problem])


def own_directory(path: Path) -> Path:
    """Create the cache directory and its parents with mode 0700, or check that only this user can write to it.

    Returns its real path. Owner and mode are those of one opened directory. Raises UnsupportedError if it belongs to
    another user or is not a directory.
    """
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        path = Path(os.path.realpath(path))
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except unless_signalled(OSError) as error:
        raise UnsupportedError(
            f"the kernel cache {path} cannot be used", [f"{error}; pass another cache_dir"]
        ) from error
    try:
        state = os.fstat(handle)
        if state.st_uid != os.getuid():
            raise UnsupportedError(
                f"the kernel cache {path} belongs to user {state.st_uid}, not to {os.getuid()}",
                ["code from it would run as you; pass a cache_dir of your own"],
            )
        if stat.S_IMODE(state.st_mode) & 0o077:
            os.fchmod(handle, 0o700)
    except unless_signalled(OSError) as error:
        if state.st_mode & 0o022:
            raise UnsupportedError(
                f"the kernel cache {path} can be written by other users and its mode cannot be changed",
                [f"{error}; code from it would run as you; pass a cache_dir of your own"],
            ) from error
    finally:
        os.close(handle)
    return path


@dataclass(frozen=True)
class _Holder:
    host: str
    process: Process

    @classmethod
    def recorded(cls, handle: int) -> _Holder | None:
        """The holder recorded in a lock file; None if there is none."""
        try:
            found = json.loads(os.pread(handle, 4096, 0))
            return cls(found["host"], Process(**found["process"]))
        except (ValueError, TypeError, KeyError):
            return None

    def is_gone(self) -> bool:
        """Whether it has ended, reaped or not; False if it is not visible from this process."""
        return self.host == platform.node() and WatchedProcess.of(self.process).is_gone()


@contextmanager
def only_one(lock: Path, timeout_s: float = LOCK_TIMEOUT_S, progress: Progress | None = None) -> Iterator[None]:
    """A lock between processes and threads; the system frees it when its holder ends.

    A child that the holder forked keeps the lock although the holder has ended; such a lock is taken over.
    Raises UnsupportedError with the holder if the lock is not free within timeout_s, or if the file cannot be written.
    """
    owner = os.getpid()
    handle = _locked(lock, timeout_s, progress)  # a handler of a signal that raised before `try` would leave it locked
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child that unwinds this frame leaves its parent's lock alone
            os.ftruncate(handle, 0)
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing does not free it while a forked child has it open
        os.close(handle)


def _locked(lock: Path, timeout_s: float, progress: Progress | None) -> int:
    """Take the lock; returns its descriptor. Only the time slept is counted, so it may wait longer."""
    waited, gone_polls, last = 0.0, 0, None
    while True:
        with _writing(lock.parent):
            handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with _writing(lock.parent):
                if _try_lock(lock, handle):
                    return handle
            holder, since = _Holder.recorded(handle), os.fstat(handle).st_mtime
            if progress is not None and not waited:
                progress(f"waiting for the CPU kernels: the lock {lock} is {_held_by(holder, since)}")
            is_gone = holder is not None and holder.is_gone()
            gone_polls = gone_polls + 1 if is_gone and holder == last else 0
            if gone_polls >= GONE_POLLS and _is_at(lock, handle):
                lock.unlink()  # the next holder creates a new file; the old one is freed with its last user
            last = holder
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if waited >= timeout_s:
            raise UnsupportedError(
                f"the lock of the kernel cache was not free within {timeout_s:g} s: {lock}",
                [
                    _held_by(holder, since),
                    "let that process finish its compilation, or end it, and start again; delete the lock file if "
                    "that process is not compiling; or pass another cache_dir",
                ],
            )
        time.sleep(POLL_S)
        waited += POLL_S


def _try_lock(lock: Path, handle: int) -> bool:
    """Lock the file and record this process in it; False if another process holds it or has replaced it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except unless_signalled(BlockingIOError):
        return False
    if not _is_at(lock, handle):
        fcntl.flock(handle, fcntl.LOCK_UN)
        return False
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(asdict(_Holder(platform.node(), Process.this()))).encode(), 0)
    return True


def _is_at(lock: Path, handle: int) -> bool:
    try:
        return os.path.samestat(lock.lstat(), os.fstat(handle))
    except unless_signalled(FileNotFoundError):
        return False


def _held_by(holder: _Holder | None, since: float) -> str:
    taken = datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds")
    if holder is None:
        return f"held by a process that it does not name, since {taken} (`fuser` lists it)"
    return f"held by process {holder.process.number} on host {holder.host} since {taken}"


def reason_against(library: Path) -> str:
    """Why a cached library must not be loaded; empty if only this user can write it and its bytes are unchanged."""
    with ExitStack() as opened:
        handles = []
        for path in (library, digest_file(library)):
            try:
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                handles.append(opened.enter_context(os.fdopen(handle, "rb")))
                state = os.fstat(handle)
            except unless_signalled(OSError) as problem:
                return f"{path.name}: {problem.strerror or problem}"
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
                mode = f"mode {stat.filemode(state.st_mode)}"
                return f"{path.name} is no file that this user alone can write: user {state.st_uid}, {mode}"
        return damage(library, *handles)


def build(
    recipe: Recipe,
    cache_dir: Path,
    progress: Progress | None = None,
    on_unit: OnUnit | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Path:
    """Return the compiled library, building it if this recipe is not in the cache yet, or damaged there.

    Safe for concurrent processes: one builds, the others wait for at most lock_timeout_s. Raises UnsupportedError with
    the output of a failed compiler, with the holder of a lock that is not freed, or if the cache belongs to another
    user or cannot be written.
    """
    library = own_directory(cache_dir) / f"moe_mk-{recipe.key()}.so"
    if not reason_against(library):
        return library
    with only_one(library.with_suffix(".lock"), lock_timeout_s, progress):
        if reason := reason_against(library):
            if progress is not None and library.exists():
                progress(f"compiling again, because the cached CPU kernels cannot be used: {reason}")
            _compile(recipe, library, progress, on_unit)
    return library


@contextmanager
def _writing(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except unless_signalled(OSError) as error:
        raise UnsupportedError(
            f"the kernel cache {cache_dir} cannot be written", [f"{error}; pass another cache_dir"]
        ) from error


def _compile(recipe: Recipe, library: Path, progress: Progress | None, on_unit: OnUnit | None) -> None:
    if progress is not None:
        progress(f"compiling {len(recipe.units)} CPU kernel sources with {recipe.compiler.version}")
    with _writing(library.parent):
        made = tempfile.TemporaryDirectory(dir=library.parent, prefix=f"build-{library.stem}-")
    with made as folder:
        _remove_leftovers(Path(folder), library)
        compiler, linked = recipe.compiler.path, Path(folder) / library.name
        commands = object_commands(compiler, recipe.units, Path(folder))
        _run([*commands.values()], Path(folder), on_unit)
        _run([[compiler, *recipe.link_flags, "-o", str(linked), *map(str, commands)]], Path(folder))
        if not library.stem.endswith(recipe.key()):
            raise UnsupportedError("the sources of the CPU kernels changed while they were compiled", ["start again"])
        with _writing(library.parent):
            linked.chmod(0o700)
            recorded = record_digest(linked)
            linked.replace(library)
            recorded.replace(digest_file(library))
            _write_through(library.parent)
    if progress is not None:
        progress(f"compiled CPU kernels -> {library}")


def _remove_leftovers(built: Path, library: Path) -> None:
    """Remove what killed processes left next to the folder `built`, whose builder holds the lock of `library`.

    A folder is named after its library, and its builder holds the library's lock: a folder whose lock is free has no
    builder, on any host. Others are removed when they are LEFTOVER_S old by the clock of the file system.
    """
    for folder in (*built.parent.glob("build-*"), *built.parent.glob("try-*")):
        key = folder.name.removeprefix("build-").rpartition("-")[0]
        lock = built.parent / f"{key}.lock"
        try:
            if folder == built:
                continue
            if lock == library.with_suffix(".lock"):
                shutil.rmtree(folder, ignore_errors=True)
            elif lock.is_file():
                with only_one(lock, timeout_s=0.0):
                    shutil.rmtree(folder, ignore_errors=True)
            elif built.stat().st_mtime - folder.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(folder, ignore_errors=True)
        except unless_signalled(OSError, UnsupportedError):
            continue  # it is being built, or another process has removed it


def _write_through(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _run(commands: Sequence[Sequence[str]], folder: Path, on_unit: OnUnit | None = None) -> None:
    """Begin commands in their order, as many at a time as there are cores; their temporary files are in `folder`.

    They and their children end when this returns, raises, or the process ends.
    Raises UnsupportedError with the output of each failed command, and if none ends or writes for QUIET_S.
    """
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    inside = ("/bin/sh", "-c", 'export TMPDIR="$0"; exec "$@"', str(folder))
    running: list[subprocess.Popen[bytes]] = []
    done, failed, most = 0, [], compilers_at_once()
    with _process_group() as group, selectors.DefaultSelector() as outputs:
        try:
            while done < len(commands):
                while len(running) < min(done + most, len(commands)):
                    command = [*inside, *commands[len(running)]]
                    running.append(subprocess.Popen(command, stdin=null, stdout=null, stderr=pipe, process_group=group))
                    errors = running[-1].stderr
                    assert errors is not None
                    outputs.register(errors, selectors.EVENT_READ, (running[-1], bytearray()))
                if not (ready := outputs.select(QUIET_S)):
                    hangs = next((at for at, each in enumerate(running) if each.poll() is None), 0)
                    failed.append(f"`{' '.join(commands[hangs])}` was ended: it wrote nothing for {QUIET_S:g} s")
                    break
                for key, _ in ready:
                    process, written = key.data
                    if part := os.read(key.fd, 1 << 16):
                        written += part
                        continue
                    outputs.unregister(key.fileobj)
                    done += 1
                    with suppress(subprocess.TimeoutExpired):  # it has closed its output and goes on
                        process.wait(QUIET_S)
                    if process.returncode != 0:
                        words = written.decode(errors="replace").strip()[-2000:]
                        ended = f"ended with {process.returncode}" if process.returncode else "did not end"
                        failed.append(f"`{' '.join(process.args[len(inside) :])}` {ended}: {words}")
                    if on_unit is not None:
                        on_unit(done, len(commands))
        finally:
            # A compiler driver starts further programs; all of them are in the group.
            os.killpg(group, signal.SIGKILL)
            for process in running:
                _drain(process)
    if failed:
        raise UnsupportedError("the CPU kernels did not compile", failed)


@contextmanager
def _process_group() -> Iterator[int]:
    """A process group that ends with this process, whatever the cause; yields its id.

    The first member waits for the end of a pipe that only this process holds open, and kills the group then.
    """
    read_end, write_end = os.pipe()
    try:
        with os.fdopen(read_end, "rb") as waits_for:
            script, null = ["/bin/sh", "-c", "read _; kill -s KILL 0"], subprocess.DEVNULL
            first = subprocess.Popen(script, stdin=waits_for, stdout=null, stderr=null, process_group=0)
        try:
            yield first.pid
        finally:
            first.kill()
            _drain(first)  # until here its id is not reused
    finally:
        os.close(write_end)


def _drain(process: subprocess.Popen[bytes]) -> None:
    """Wait until a killed process and its children have ended, i.e. have closed its pipe.

    A program outside the group that has inherited the pipe delays this by at most DRAIN_S.
    """
    until = now() + DRAIN_S
    with suppress(subprocess.TimeoutExpired):
        process.wait(DRAIN_S)
    if process.stderr is not None:
        with process.stderr as pipe:
            while select.select([pipe], [], [], max(until - now(), 0.0))[0] and os.read(pipe.fileno(), 1 << 16):
                continue
