"""Memory that several ranks write: a file in /dev/shm between processes of one host, plain pages within one process.

The file is created exclusively, readable by its owner only, under a random name, and is unlinked as soon as every
rank has mapped it: what is left disappears with the last process, however that one ends. Pages are taken when they are
first written, so a window may be planned for the largest call and costs what the calls need.

A process that is killed before its file has lost the name leaves the file behind. Its maker therefore holds a lock
(`flock`) on it, which the kernel releases when the process ends, and `create` removes the files of its own user that
no process holds. A lock needs no process numbers: it holds across pid namespaces, and a reused number does not matter.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from moe_mk.errors import Suppress, unless_signalled
from moe_mk.process import in_child

FOLDER = Path("/dev/shm")
OURS_ALONE = 0o600
PREFIX = "moe-mk-window-"
"""Every file of such a name has been locked by its maker from the start."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
"""Of Linux, which the module mmap does not name."""
_mmap = ctypes.CDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Memory:
    """Zeroed bytes of this process alone."""

    is_shared = False
    """Whether other processes map it too."""

    def __init__(self, num_bytes: int, there: Tensor | None = None) -> None:
        """there: bytes that other ranks of this process have too."""
        self.bytes = _view(mmap.mmap(-1, num_bytes, flags=PRIVATE)) if there is None else there

    @property
    def num_bytes(self) -> int:
        return self.bytes.numel()

    def reserve(self, start: int, num_bytes: int) -> None:
        """Take the pages of a range before it is written; nothing to do here."""


@dataclass(frozen=True)
class PageRanges:
    """Disjoint ranges of pages, ascending, none adjacent to the next: their number depends on gaps, not on calls."""

    firsts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def covers(self, first: int, end: int) -> bool:
        """Whether all pages from `first` to before `end` are among them."""
        place = bisect_right(self.firsts, first) - 1
        return place >= 0 and end <= self.ends[place]

    def with_range(self, first: int, end: int) -> PageRanges:
        """These and one more, merged with every range that it overlaps or touches."""
        low, high = bisect_left(self.ends, first), bisect_right(self.firsts, end)
        if low < high:
            first, end = min(first, self.firsts[low]), max(end, self.ends[high - 1])
        firsts = (*self.firsts[:low], first, *self.firsts[high:])
        return PageRanges(firsts, (*self.ends[:low], end, *self.ends[high:]))


class SharedMemory(Memory):
    """Bytes of a file in memory that other processes map too.

    A forked child sees zeros of its own there: it can neither disturb the peers of its parent nor keep the memory.
    """

    is_shared = True
    _descriptor = -1

    def __init__(self, held: list[int], num_bytes: int) -> None:
        """held: a descriptor, taken out of the list once it is no longer the caller's to close."""
        self.bytes = _view(mmap.mmap(held[0], num_bytes, flags=mmap.MAP_SHARED))
        self._taken, self._taking = PageRanges(), Lock()
        in_child(self, SharedMemory._leave_to_parent)
        self._descriptor = held.pop()

    def reserve(self, start: int, num_bytes: int) -> None:
        """Take pages, or raise OSError where /dev/shm is full: writing there would end the process by a signal.

        From any thread. A range whose pages were taken before costs a lookup and no system call.
        """
        first, end = start // mmap.PAGESIZE, -(-(start + num_bytes) // mmap.PAGESIZE)
        if num_bytes < 1 or self._taken.covers(first, end):
            return
        with self._taking:
            begin = first * mmap.PAGESIZE
            os.posix_fallocate(self._descriptor, begin, min(end * mmap.PAGESIZE, self.num_bytes) - begin)
            self._taken = self._taken.with_range(first, end)

    def _leave_to_parent(self) -> None:
        """In a forked child: give up the file, and put private pages in the place of the shared ones."""
        ours, nothing = os.fstat(self._descriptor), os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with Suppress(OSError):  # the one of the folder that was listed
                # The mapping has a descriptor of its own, which it closes at its end: its number must stay taken.
                if os.path.samestat(os.fstat(descriptor), ours):
                    os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        self._close()
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, PRIVATE | MAP_FIXED | MAP_NORESERVE
        _mmap(self.bytes.data_ptr(), self.num_bytes, protection, flags, -1, 0)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self._close()


def create(num_bytes: int, folder: Path = FOLDER) -> tuple[str, SharedMemory]:
    """Make a new file of zeros; returns its name. Removes files of processes that were killed. Raises OSError."""
    remove_abandoned(folder)
    name, descriptor = _locked_file(folder)
    held = [descriptor]
    try:
        os.fchmod(descriptor, OURS_ALONE)  # whatever the umask
        os.ftruncate(descriptor, num_bytes)
        return name, SharedMemory(held, num_bytes)
    except BaseException:
        for each in held:
            os.close(each)
        unlink(name, folder)
        raise


def _locked_file(folder: Path) -> tuple[str, int]:
    """A new file that this process holds; another one where somebody swept between its making and its lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        name = f"{PREFIX}{secrets.token_hex(16)}"
        descriptor = os.open(folder / name, flags, OURS_ALONE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return name, descriptor
        except unless_signalled(BlockingIOError):
            pass
        except BaseException:
            os.close(descriptor)
            unlink(name, folder)
            raise
        os.close(descriptor)


def remove_abandoned(folder: Path = FOLDER) -> list[str]:
    """Remove the files of this user whose makers have ended; returns their names. What cannot be opened stays."""
    removed = []
    for name in filter(lambda name: name.startswith(PREFIX), os.listdir(folder)):
        with Suppress(OSError):  # BlockingIOError: its maker holds it; FileNotFoundError: somebody was faster
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(folder / name)
                    removed.append(name)
            finally:
                os.close(descriptor)
    return removed


def attach(name: str, num_bytes: int, folder: Path = FOLDER) -> SharedMemory:
    """Map a file that another rank has made. Raises OSError if it is not there, not ours alone, or of another size."""
    descriptor = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    held = [descriptor]
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != OURS_ALONE:
            mode = oct(stat.S_IMODE(found.st_mode))
            raise PermissionError(
                f"{name} belongs to user {found.st_uid} with mode {mode}, expected our own with 0o600"
            )
        if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
            raise OSError(f"{name} has {found.st_size} bytes, expected {num_bytes}")
        return SharedMemory(held, num_bytes)
    except BaseException:
        for each in held:
            os.close(each)
        raise


def unlink(name: str, folder: Path = FOLDER) -> None:
    """Take the name away; mappings stay. Of another name than `create` gives nothing is removed."""
    if name.startswith(PREFIX) and "/" not in name:
        (folder / name).unlink(missing_ok=True)


def free_bytes() -> int:
    """Bytes of shared memory that are still free."""
    there = os.statvfs(FOLDER)
    return there.f_bavail * there.f_frsize


def _view(mapped: mmap.mmap) -> Tensor:
    return torch.frombuffer(mapped, dtype=torch.uint8)
