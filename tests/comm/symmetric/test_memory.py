"""Files of shared memory: whose they are, what is mapped, and what happens when there is no room."""

import os
import random
import stat
from itertools import pairwise
from mmap import PAGESIZE
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from moe_mk.comm.symmetric.flags import words_of
from moe_mk.comm.symmetric.heap import SymmetricHeap, WindowShape
from moe_mk.comm.symmetric.memory import FOLDER, attach, create, unlink
from moe_mk.errors import CommError


def test_a_file_is_its_owners_alone_and_outlives_its_name() -> None:
    name, mine = create(8192)
    found = (FOLDER / name).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_size == 8192 and found.st_blocks == 0
    theirs = attach(name, 8192)
    unlink(name)
    assert not (FOLDER / name).exists()
    mine.reserve(4096, 100)
    mine.bytes[4097] = 5
    assert theirs.bytes[4097] == 5 and theirs.bytes[:4096].sum() == 0


def test_foreign_files_are_not_mapped(tmp_path: Path) -> None:
    name, _ = create(4096, tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / name)
    with pytest.raises(OSError, match="4096 bytes, expected 8192"):
        attach(name, 8192, tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        attach("link", 4096, tmp_path)
    (tmp_path / name).chmod(0o644)
    with pytest.raises(PermissionError, match=r"mode 0o644, expected our own with 0o600"):
        attach(name, 4096, tmp_path)


def test_full_memory_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = WindowShape(2, 2, 1 << 20)
    name, memory = create(shape.total_bytes)
    unlink(name)

    heap = SymmetricHeap(memory, words_of(memory.bytes), shape, 0, lambda phase, epoch, layer: pytest.fail("no wait"))
    heap.put(1, 0, torch.ones((2, 8), dtype=torch.uint8))
    monkeypatch.setattr("os.posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    heap.put(1, 0, torch.ones((3, 8), dtype=torch.uint8))  # of the same page, which is taken
    with pytest.raises(CommError, match=r"no room for 4104 bytes more, \d+ are free: No space.*kernel.max_num_tokens"):
        heap.put(1, 0, torch.ones((513, 8), dtype=torch.uint8))


def test_reserved_ranges_merge_and_do_not_grow_with_the_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, draw, calls = 500, random.Random(0), [0]
    name, memory = create(pages * PAGESIZE + 10)
    unlink(name)
    take = os.posix_fallocate

    def counted(descriptor: int, start: int, count: int) -> None:
        calls[0] += 1
        take(descriptor, start, count)

    monkeypatch.setattr("os.posix_fallocate", counted)
    taken: set[int] = set()
    for _ in range(20_000):  # a ring of rows on their way out begins at another byte in every call
        start, size = draw.randrange(pages * PAGESIZE), draw.choice((0, 1, 100, 5000))
        size = min(size, memory.num_bytes - start)
        memory.reserve(start, size)
        taken |= set(range(start // PAGESIZE, -(-(start + size) // PAGESIZE))) if size else set()
        ranges = list(zip(memory._taken.firsts, memory._taken.ends, strict=True))
        assert all(one[1] < other[0] for one, other in pairwise(ranges)), "ranges overlap or touch"
    assert {page for first, end in ranges for page in range(first, end)} == taken == set(range(pages + 1))
    assert ranges == [(0, pages + 1)] and calls[0] <= pages + 1
    assert os.fstat(memory._descriptor).st_size == memory.num_bytes, "the last page ends behind the file"
