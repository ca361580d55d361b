"""A store of packed experts appears whole, and no damaged record leaves it."""

import errno
import fcntl
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from moe_mk.errors import StoreError, WeightError
from moe_mk.weights import expert_store
from moe_mk.weights.expert_store import ALIGNMENT, ExpertStore, write_store

EXPERTS, SIZE = 5, 3 * ALIGNMENT


def contents(seed: int = 0) -> list[bytes]:
    draw = torch.Generator().manual_seed(seed)
    return [bytes(torch.randint(256, (SIZE,), generator=draw, dtype=torch.uint8).tolist()) for _ in range(EXPERTS)]


def written(path: Path, seed: int = 0) -> Path:
    write_store(path, {"of": "a test"}, EXPERTS, SIZE, map(memoryview, contents(seed)))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "a.experts")


def record() -> memoryview:
    """Memory on a page, for direct reads."""
    whole = torch.empty(SIZE + ALIGNMENT, dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGNMENT
    return memoryview(whole[start : start + SIZE].numpy())


def test_records_come_back_in_pieces_of_any_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece in (ALIGNMENT, 2 * ALIGNMENT, 4 << 20):
        monkeypatch.setattr(expert_store, "PIECE", piece)
        with ExpertStore(path) as store:
            assert (store.num_experts, store.record_bytes, store.facts) == (EXPERTS, SIZE, {"of": "a test"})
            for expert in (3, 0, 4, 3):
                store.read(expert, into := record())
                assert bytes(into) == contents()[expert]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.row(172)
def test_any_flipped_bit_is_found_by_the_first_read_or_before(path: Path) -> None:
    size, draw = path.stat().st_size, torch.Generator().manual_seed(1)
    first = size - EXPERTS * SIZE
    header = [0, 9, 17, 48, *torch.randint(48, 48 + 100, (6,), generator=draw).tolist()]
    for at in (*header, *torch.randint(first, size, (12,), generator=draw).tolist()):
        whole = bytearray(path.read_bytes())
        whole[at] ^= 1 << at % 8
        damaged = path.with_name("damaged")
        damaged.write_bytes(whole)
        if at < first:
            with pytest.raises(StoreError):
                ExpertStore(damaged)
            continue
        with ExpertStore(damaged) as store:
            store.read(((at - first) // SIZE + 1) % EXPERTS, record())
            with pytest.raises(StoreError, match="damaged") as raised:
                store.read((at - first) // SIZE, record())
        assert isinstance(raised.value, WeightError) and f"expert {(at - first) // SIZE} of" in str(raised.value)


@pytest.mark.row(172)
def test_a_truncated_store_is_refused_at_any_length(path: Path) -> None:
    whole = path.read_bytes()
    for length in (0, 7, 47, 60, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError):
            ExpertStore(path)


@pytest.mark.row(172)
def test_a_store_that_changes_while_it_is_in_use_is_an_error(path: Path) -> None:
    store = ExpertStore(path)
    store.read(1, record())
    os.utime(path, ns=(1, 1))
    with pytest.raises(StoreError, match="was changed while it was in use"):
        store.read(1, record())
    os.truncate(path, path.stat().st_size - SIZE)
    with pytest.raises(StoreError, match="truncated while in use"):
        store.read(EXPERTS - 1, record())
    # Another store under the same name leaves the open one as it was.
    written(path)
    again = ExpertStore(path)
    written(path, seed=7)
    again.read(2, into := record())
    assert bytes(into) == contents()[2]
    again.close()
    with pytest.raises(StoreError, match="cannot be read"):
        again.read(3, into)


@pytest.mark.row(172)
def test_a_full_disk_leaves_the_old_store_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    old = written(tmp_path / "old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        for file in (old, tmp_path / "a folder" / "new"):
            with pytest.raises(StoreError, match="the disk is full"):
                written(file, seed=1)
    assert [each.name for each in tmp_path.iterdir()] == ["old"]
    ExpertStore(old).read(0, into := record())
    assert bytes(into) == contents()[0]


@pytest.mark.row(172)
def test_a_process_that_is_killed_while_it_writes_leaves_no_store(tmp_path: Path) -> None:
    def killed() -> Iterator[memoryview]:
        yield from map(memoryview, contents()[:3])
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        write_store(tmp_path / "a.experts", {}, EXPERTS, SIZE, killed())
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with pytest.raises(StoreError, match="cannot be opened"):
        ExpertStore(tmp_path / "a.experts")
    assert len(list(tmp_path.glob(".a.experts.*.partial"))) == len(list(tmp_path.iterdir())) == 1
    ExpertStore(written(tmp_path / "a.experts")).read(0, record())
    assert [each.name for each in tmp_path.iterdir()] == ["a.experts"]


def test_threads_that_write_the_same_store_do_not_disturb_each_other(path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        stores = [ExpertStore(each) for each in threads.map(written, [path] * 12)]
    for expert, store in enumerate(stores[-EXPERTS:]):
        store.read(expert, into := record())
        assert bytes(into) == contents()[expert]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.row(172)
def test_only_what_killed_writers_of_stores_left_is_removed(tmp_path: Path) -> None:
    kept, outside = [".b.other.1.partial", ".a.experts.1", ".c.experts.1.partial"], tmp_path / "outside"
    left = [".a.experts.0f.partial", ".b.experts-1f2e.1.partial"]
    (folder := tmp_path / "stores").mkdir()
    for name in (*kept[:2], *left):
        (folder / name).write_bytes(b"half")
    outside.write_bytes(b"another's")
    (folder / kept[2]).symlink_to(outside)
    with (folder / left[0]).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as by a writer in another container or on another host
        written(folder / "a.experts")
        assert (folder / left[0]).exists() and not (folder / left[1]).exists()
    written(folder / "a.experts")
    assert {each.name for each in folder.iterdir()} == {"a.experts", *kept} and outside.read_bytes() == b"another's"


def test_what_is_no_store_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_bytes(b"MOEMKEXP" + (2**40).to_bytes(8, "little") + bytes(64))
    for name, problem in (("pipe", "no regular file"), ("text", "the limit is"), ("none", "cannot be opened")):
        with pytest.raises(StoreError, match=problem):
            ExpertStore(tmp_path / name)
    with pytest.raises(StoreError, match="no regular file|no store|cannot be opened"):
        ExpertStore(tmp_path)


@pytest.mark.parametrize(("change", "problem"), [
    ({"format": "experts"}, "its format is not"), ({"version": 0}, "it has version 0"), ({"version": 2}, "version 2"),
    ({"record_bytes": SIZE + 1}, "record_bytes is"), ({"record_bytes": 0}, "record_bytes is 0"),
    ({"experts": EXPERTS - 1}, "one digest for each"), ({"digests": [], "experts": 0}, "one digest for each"),
    ({"digests": ["00"] * EXPERTS}, "of other types"), ({"facts": []}, "of other types"),
])  # fmt: skip
def test_a_header_that_is_whole_and_states_something_else_is_refused(
    path: Path, change: dict[str, object], problem: str
) -> None:
    data = path.read_bytes()
    text = json.dumps(json.loads(data[48 : 48 + int.from_bytes(data[8:16], "little")]) | change).encode()
    path.write_bytes(data[:8] + len(text).to_bytes(8, "little") + blake2b(text, digest_size=32).digest() + text)
    with pytest.raises(StoreError, match=problem):
        ExpertStore(path)


def test_a_store_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, user = written(tmp_path / "a.experts"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(StoreError, match=f"belongs to user {user}, not to {user + 1}"):
        ExpertStore(path)


def test_a_damaged_record_is_refused_at_every_read_and_a_longer_file_before_any(path: Path) -> None:
    written(path)
    data, first = bytearray(path.read_bytes()), ExpertStore(path)._first
    data[first] ^= 1
    path.write_bytes(data)
    store = ExpertStore(path)
    for _ in range(3):
        with pytest.raises(StoreError, match="expert 0 of .* is damaged"):
            store.read(0, record())
    path.write_bytes(bytes(data) + b"\0")
    with pytest.raises(StoreError, match="its header states"):
        ExpertStore(path)
