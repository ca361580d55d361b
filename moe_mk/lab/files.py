"""Bounded readers of the files that only commands read, limits as of `moe_mk.files`, and folders that are written."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex

from moe_mk.errors import Suppress, unless_signalled
from moe_mk.files import HEADER_BYTES, LINE_BYTES, NO_HEADER, abandoned, naming, size_of


@contextmanager
def errors_named(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """An error of the system in the context names `path`, unless it names a file elsewhere.

    temporary: the file or folder that is written instead.
    """
    inside = temporary or path
    try:
        yield
    except unless_signalled(OSError) as problem:
        name = None if problem.filename is None else Path(os.fsdecode(problem.filename))
        if name is not None and inside not in (name, *name.parents):
            raise
        raise naming(path, problem, inside) from problem


@contextmanager
def new_folders(folder: Path) -> Iterator[None]:
    """On failure, a folder and those above it that did not exist before are removed where they are empty."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        for each in new:
            with Suppress(OSError):
                each.rmdir()
        raise


@contextmanager
def partial_folder(root: Path, *, last: Sequence[str] = (), name: str | None = None) -> Iterator[Path]:
    """A temporary folder that is moved to `root` on success; on failure it and the parent folders created are removed.

    It is renamed to `root`. Where that exists (it may be the root of another file system), or with `name`, it is inside
    of it, and its files are moved, those of `last` after all others. Errors of the system name `root`. name: the start
    of that of the folder; those that killed processes left are removed.
    """
    target = Path(os.path.realpath(root))  # resolves "." and keeps symbolic links
    renamed = name is None and not target.is_dir()
    within = target.parent if renamed else target
    with new_folders(within), ExitStack() as at_the_end:
        with errors_named(root):
            within.mkdir(parents=True, exist_ok=True)
        is_locked = False
        while not is_locked:  # another writer may remove it as an abandoned one, until it is locked
            partial = within / f"{name or target.name}.{token_hex(8)}.partial"
            with errors_named(root, partial):
                partial.mkdir()
            at_the_end.callback(shutil.rmtree, partial, ignore_errors=True)
            with errors_named(root, partial):
                is_locked = _lock(partial, at_the_end)
        with errors_named(root, partial):  # before the files are removed that it counts
            for left in target.glob(f"{name}.*.partial") if name else ():
                with abandoned(left) as is_left:
                    if is_left:
                        shutil.rmtree(left, ignore_errors=True)
            yield partial
            if renamed:
                os.replace(partial, target)
                return
            for file in sorted(partial.iterdir(), key=lambda each: (each.name in last, each.name)):
                os.replace(file, target / file.name)


def _lock(folder: Path, until: ExitStack) -> bool:
    """Lock a folder until the end of a context; False if another process has removed it or is about to."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        until.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.lstat(folder), os.fstat(handle))
    except (FileNotFoundError, BlockingIOError):
        return False


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file one by one, `LINE_BYTES` each at most. Raises OSError or ValueError."""
    size_of(path)
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise ValueError(f"it has a line of more than {LINE_BYTES} bytes, the limit")
            yield line


def expect_small_header(path: Path) -> None:
    """Refuse a safetensors file whose header is above `HEADER_BYTES`, before a library reads it.

    Raises OSError, and ValueError with the size and the limit. Source: the format description of
    github.com/huggingface/safetensors (8 bytes of length, JSON, data).
    """
    size_of(path)
    with path.open("rb") as file:
        announced = int.from_bytes(file.read(8), "little")
    if announced > NO_HEADER:
        raise ValueError("it is not a safetensors file: it does not begin with the size of a header")
    if announced > HEADER_BYTES:
        raise ValueError(f"its header has {announced} bytes, the limit is {HEADER_BYTES}")
