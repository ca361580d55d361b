"""Bounded readers of files that come from outside, and writers that leave a file whole or as it was.

Text is bounded in bytes and in nesting, YAML also in values, where every use of an alias counts all values behind it.
Sizes are compared before anything is read or parsed. What is refused is a ValueError with the size and the limit, or an
OSError; the caller wraps both in an error of its kind that names the file.

    what                       bytes      files
    settings, YAML             1 MiB      configurations, link and device profiles; 100 levels, 100,000 values
    settings, JSON             64 MiB     the same, config.json, tuned files, certificates
    indices and counts, JSON   512 MiB    model.safetensors.index.json, recorded loads
    a line of JSON             16 MiB     traces of Megatron-LM, trials of a tuning session
    header of safetensors      100 MB     checkpoints, traces, loads, rows: the limit of the safetensors library

An index of 896 experts in 92 layers with four tensors a matrix has 96 MB, and a list of their modules in config.json
25 MB. Limits are a multiple of what models have, and keep a file from taking the memory of the machine.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import yaml

from moe_mk.errors import unless_signalled

MIB = 1 << 20
YAML_BYTES, JSON_BYTES, INDEX_BYTES, LINE_BYTES, HEADER_BYTES = 1 * MIB, 64 * MIB, 512 * MIB, 16 * MIB, 100_000_000
NO_HEADER = 1 << 40
"""First eight bytes of a file that are a larger number than this are not the size of a header."""
MOST_LEVELS, MOST_VALUES = 100, 100_000


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """All bytes of a regular file. Raises OSError, and ValueError for one of more than `most_bytes` bytes."""
    size = size_of(path)
    if size > most_bytes:
        raise ValueError(f"it has {size} bytes, the limit is {most_bytes}")
    with path.open("rb") as file:
        return file.read(most_bytes)  # no more than that, even if it grows meanwhile


def read_json(path: Path, most_bytes: int = JSON_BYTES) -> Any:
    """Return the contents of a JSON file. Raises OSError or ValueError."""
    return parse_json(read_bytes(path, most_bytes))


def read_yaml(path: Path) -> Any:
    """Return the contents of a YAML file; plain values only. Raises OSError or ValueError."""
    text = read_bytes(path, YAML_BYTES).decode("utf-8")
    try:
        return yaml.load(text, _BoundedLoader)  # a SafeLoader
    except yaml.YAMLError as problem:
        raise ValueError(str(problem)) from problem


def parse_json(text: str | bytes) -> Any:
    """A value of JSON, in UTF-8 where it is bytes; raises ValueError, also for deep values and for double keys."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), object_pairs_hook=_each_once)
    except RecursionError as problem:
        raise ValueError("its values are nested too deep") from problem


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of these keys. Raises ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:100]!r} appears twice in one mapping")
    return found


def resolved(path: Path) -> Path:
    """Where a file is after symbolic links; raises OSError for links in a circle, and for what no path can be."""
    try:
        real = os.path.realpath(path)
        number = errno.ELOOP if os.path.islink(real) else 0  # realpath returns a link in a circle as it is
    except unless_signalled(ValueError):
        number = errno.EINVAL
    if number:
        raise OSError(number, os.strerror(number), str(path))
    return Path(real)


@contextmanager
def replacing(path: Path, *, locked: bool = False) -> Iterator[Path]:
    """A new file in the folder of `path`, which becomes `path` when the context ends without an exception.

    Until then `path` keeps its content, and after an exception the new file is removed. Its name is random: writers in
    other processes, containers and hosts have names of their own. locked: its lock is held from its creation on, see
    `abandoned`. A symbolic link goes on to point to the same file; what exists and is no regular file (a pipe, a
    terminal) is written directly. Raises OSError; on a full disk its text has the bytes that were written and those
    that are free.
    """
    target = resolved(path)
    if path.exists() and not path.is_file():
        try:
            yield path
        except unless_signalled(OSError) as problem:
            raise naming(path, problem, path) from problem
        return
    temporary, handle = target, -1
    try:
        temporary, handle = new_file(target, locked=locked)
        yield temporary
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except unless_signalled(OSError) as problem:
        raise naming(path, problem, temporary) from problem
    finally:
        if handle >= 0:
            temporary.unlink(missing_ok=True)
            os.close(handle)


def new_file(target: Path, *, locked: bool = False) -> tuple[Path, int]:
    """A new file next to `target` and its descriptor, which keeps the lock if there is one. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        path = target.with_name(f".{target.name}.{token_hex(8)}.partial")
        handle = os.open(path, flags, 0o666)
        try:
            if locked:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:
                return path, handle
        except unless_signalled(BlockingIOError):
            pass  # between its creation and its lock another process has taken it for abandoned
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Whether a file or a folder of this user has no lock: what its writer left when it ended, on any host.

    The lock is held in the context. A symbolic link is not followed.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except unless_signalled(OSError):
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.lstat(path), found := os.fstat(handle)) and found.st_uid == os.geteuid()
        except unless_signalled(OSError):
            is_there = False
        yield is_there
    finally:
        os.close(handle)


def naming(path: Path, problem: OSError, temporary: Path) -> OSError:
    """An error of writing to the temporary file or folder, as one of `path`."""
    text = problem.strerror or str(problem)
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        found = [file.stat() for file in (temporary, *temporary.rglob("*")) if file.is_file()]
        written = sum(min(each.st_size, 512 * each.st_blocks) for each in found)  # a sparse file is larger
        free = shutil.disk_usage(next(folder for folder in resolved(path).parents if folder.is_dir())).free
        text = f"the disk is full: {written} bytes were written, {free} are free"
    return OSError(problem.errno or errno.EIO, text, str(path))  # numpy states no number


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole or not at all; see `replacing`. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def named_in_utf8(path: Path) -> Iterator[str]:
    """A name of a file for libraries that accept UTF-8 only: its own, or else that of an open descriptor."""
    try:
        name = str(path).encode().decode()
    except UnicodeEncodeError:
        with path.open("rb", buffering=0) as file:
            yield f"/dev/fd/{file.fileno()}"
    else:
        yield name


def size_of(path: Path) -> int:
    """Raises ValueError for what is no regular file: a pipe keeps its reader waiting, a device never ends."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    return found.st_size


class _BoundedLoader(yaml.SafeLoader):
    """Counts levels and values while they are composed. The values behind an alias count at every use.

    Aliases cost nothing as long as values are shared, but merge keys (<<) copy what they name: a few lines that name
    each other can stand for billions of pairs.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._levels = self._values = 0
        self._values_of: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """One value with all that it holds."""
        is_alias, before = self.check_event(yaml.AliasEvent), self._values
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise yaml.composer.ComposerError(None, None, f"values are nested above {MOST_LEVELS} levels", mark)
        node = super().compose_node(parent, index)
        self._levels -= 1
        if isinstance(node, yaml.MappingNode) and not is_alias:
            _each_once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        if not is_alias:
            self._values += 1
            self._values_of[id(node)] = self._values - before
        elif id(node) not in self._values_of:
            raise yaml.composer.ComposerError(None, None, "an alias stands inside the value that it names", mark)
        else:
            self._values += self._values_of[id(node)]
        if self._values > MOST_VALUES:
            text = f"there are more than {MOST_VALUES} values, each alias counted as the values it stands for"
            raise yaml.composer.ComposerError(None, None, text, mark)
        return node
