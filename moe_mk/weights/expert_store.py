"""Packed experts of one rank in one file, each read by aligned requests while the others stay on the disk.

    bytes      content
    0          MAGIC
    8          length of the header, little-endian
    16         blake2b of the header, 32 bytes
    48         the header, JSON: format, version, experts, record_bytes, facts of the writer, the blake2b of each record
    first      records, one an expert; `first` and record_bytes are multiples of ALIGNMENT, for O_DIRECT

A store appears whole or not at all; what a killed writer left is removed by the next one there. Nothing in it is
executed. A record is compared with its digest the first time that a process reads it; afterwards the file must have
kept its size and its time of modification.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from moe_mk.errors import StoreError, Suppress, unless_signalled
from moe_mk.files import HEADER_BYTES, abandoned, parse_json, replacing
from moe_mk.text import amount

MAGIC, FORMAT, VERSION = b"MOEMKEXP", "moe_mk experts", 1
ALIGNMENT = 4096
PIECE = 4 << 20
"""Bytes of one request."""
PREFIX, DIGEST = 48, 32
MOST_EXPERTS = 2**16


def digest_of(data: Any) -> str:
    """The digest of a buffer, in hexadecimal."""
    return blake2b(data, digest_size=DIGEST).hexdigest()


def aligned(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def write_store(
    path: Path, facts: Mapping[str, Any], num_experts: int, record_bytes: int, records: Iterable[memoryview]
) -> None:
    """Write `num_experts` records; each buffer is read before the next one is asked for.

    facts: JSON values that `ExpertStore.facts` returns. What writers in the same folder left when they were killed is
    removed first. Raises StoreError where the file cannot be written.
    """
    first = aligned(PREFIX + len(_header(facts, record_bytes, ["0" * 2 * DIGEST] * num_experts)))
    total, is_new = first + num_experts * record_bytes, not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, locked=True) as temporary, temporary.open("r+b") as file:
            _remove_leftovers(path.parent)
            os.posix_fallocate(file.fileno(), 0, total)  # a full disk is found before anything is written
            file.seek(first)
            digests = []
            for record in records:
                digests.append(digest_of(record))
                file.write(record)
            assert len(digests) == num_experts and file.seek(0, os.SEEK_CUR) == total
            header = _header(facts, record_bytes, digests)
            file.seek(0)
            file.write(
                MAGIC + len(header).to_bytes(8, "little") + blake2b(header, digest_size=DIGEST).digest() + header
            )
            file.flush()
            os.fsync(file.fileno())
    except unless_signalled(OSError) as problem:
        with Suppress(OSError):
            path.parent.rmdir() if is_new else None
        what = f"the store {path} of {amount(total)} cannot be written: {problem}; name another folder"
        raise StoreError(what) from problem


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed writers of stores in a folder.

    Of any store: the next placement of a live layer has a store of another name, and the old one is not written again.
    """
    for left in folder.glob(".*.experts*.partial"):
        with abandoned(left) as is_left, Suppress(OSError):  # another process has removed it
            if is_left:
                left.unlink()


def _header(facts: Mapping[str, Any], record_bytes: int, digests: list[str]) -> bytes:
    stated = {"format": FORMAT, "version": VERSION, "experts": len(digests), "record_bytes": record_bytes}
    return json.dumps({**stated, "facts": dict(facts), "digests": digests}, sort_keys=True).encode()


class ExpertStore:
    """An open store. Reads may run concurrently."""

    def __init__(self, path: Path) -> None:
        """Open and check everything but the records. Raises StoreError."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
        except unless_signalled(OSError) as problem:
            raise StoreError(f"the store {path} cannot be opened: {problem.strerror}") from problem
        try:
            self._state = self._look()
            header = self._read_header()
            self.facts: dict[str, Any] = header["facts"]
            self.record_bytes: int = header["record_bytes"]
            self._digests: list[str] = header["digests"]
            self._verified = bytearray(len(self._digests))
            self._first = aligned(PREFIX + self._header_bytes)
            expected = self._first + self.num_experts * self.record_bytes
            if self._state[0] != expected:
                raise StoreError(
                    f"the store {path} is truncated: it has {self._state[0]} bytes, its header states "
                    f"{expected}; delete it, and load the layer to write it again"
                )
            self._reopen_direct()
        except BaseException:
            self.close()
            raise

    @property
    def num_experts(self) -> int:
        return len(self._digests)

    def close(self) -> None:
        """Close the file. Reading raises StoreError from now on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def pieces(self) -> range:
        """Where the pieces of a record start."""
        return range(0, self.record_bytes, PIECE)

    def read_piece(self, expert: int, start: int, record: memoryview) -> None:
        """Read one piece of a record into its place in `record`, whose address is a multiple of ALIGNMENT.

        Raises StoreError for a failed or short read.
        """
        end = min(start + PIECE, self.record_bytes)
        while start < end:
            try:
                count = os.preadv(self._fd, [record[start:end]], self._first + expert * self.record_bytes + start)
            except unless_signalled(OSError) as problem:
                raise StoreError(f"expert {expert} of {self.path} cannot be read: {problem}") from problem
            if count == 0:
                raise StoreError(f"the store {self.path} was truncated while in use: expert {expert} is incomplete")
            start += count

    def check(self, expert: int, record: memoryview) -> None:
        """Compare a record with its digest, once, and the file with what was opened. Raises StoreError."""
        if not self._verified[expert]:
            if digest_of(record) != self._digests[expert]:
                raise StoreError(
                    f"expert {expert} of {self.path} is damaged: it does not have the digest it was written with; "
                    "delete it, and load the layer to write it again"
                )
            self._verified[expert] = 1
        if self._look() != self._state:
            raise StoreError(f"the store {self.path} was changed while it was in use; load the layer again")

    def read(self, expert: int, record: memoryview) -> None:
        """Read a whole record and check it."""
        for start in self.pieces():
            self.read_piece(expert, start, record)
        self.check(expert, record)

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"the store {self.path} is no regular file")
        if found.st_uid != os.geteuid():
            raise StoreError(
                f"the store {self.path} belongs to user {found.st_uid}, not to {os.geteuid()}; name another folder"
            )
        return found.st_size, found.st_mtime_ns

    def _read_header(self) -> dict[str, Any]:
        """The header, complete and of the right types."""
        start = os.pread(self._fd, PREFIX, 0)
        if start[:8] != MAGIC or len(start) < PREFIX:
            raise StoreError(f"{self.path} is no store of experts: it does not begin with {MAGIC.decode()}")
        self._header_bytes = int.from_bytes(start[8:16], "little")
        if self._header_bytes > HEADER_BYTES:
            raise StoreError(f"the header of {self.path} has {self._header_bytes} bytes, the limit is {HEADER_BYTES}")
        text = os.pread(self._fd, self._header_bytes, PREFIX)
        if blake2b(text, digest_size=DIGEST).digest() != start[16:PREFIX]:
            raise StoreError(f"the header of the store {self.path} is damaged; delete it, and load the layer again")
        try:
            header = parse_json(text)
        except ValueError as problem:
            raise StoreError(f"the header of the store {self.path} is no JSON: {problem}") from problem
        wrong = _problem_of(header)
        if wrong:
            raise StoreError(f"the store {self.path} cannot be used: {wrong}")
        found: dict[str, Any] = header
        return found

    def _reopen_direct(self) -> None:
        """Read past the page cache where the file system can: the slots are the cache."""
        try:
            direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as problem:
            if problem.errno not in (errno.EINVAL, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP):
                raise StoreError(f"the store {self.path} cannot be opened: {problem.strerror}") from problem
            return
        former, self._fd = self._fd, direct  # in this order: `close` after an interrupt between them
        os.close(former)


def _problem_of(header: object) -> str:
    """Why a header cannot be of a store; "" if it can."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        return f"its format is not {FORMAT!r}"
    if header.get("version") != VERSION:
        return f"it has version {header.get('version')!r}, this library reads {VERSION}; update it or delete the store"
    size, digests, facts = header.get("record_bytes"), header.get("digests"), header.get("facts")
    if type(size) is not int or size < ALIGNMENT or size % ALIGNMENT or size > 2**40:
        return f"record_bytes is {size!r}, expected a multiple of {ALIGNMENT}"
    if not isinstance(digests, list) or not 0 < len(digests) <= MOST_EXPERTS or header.get("experts") != len(digests):
        return "it does not have one digest for each expert"
    if not all(isinstance(each, str) and len(each) == 2 * DIGEST for each in digests) or not isinstance(facts, dict):
        return "its digests or facts are of other types"
    return ""
