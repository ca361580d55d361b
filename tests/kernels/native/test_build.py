"""The compile cache: ours alone, built once, honest about failure."""

import ctypes
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.kernels.native import build as build_module
from moe_mk.kernels.native.build import Recipe, build, own_directory, reason_against
from moe_mk.kernels.native.selfcheck import is_compiled
from moe_mk.kernels.native.toolchain import (
    Compiler,
    Unit,
    digest_file,
    find_compiler,
    record_digest,
)
from tests.support.tiers import quick_where


def tiny_recipe(folder: Path, body: str = "int answer() { return 42; }") -> Recipe:
    source = folder / "tiny.cpp"
    source.write_text(f'extern "C" {body}\n')
    compiler = find_compiler(shutil.which)
    assert compiler is not None
    return Recipe(compiler, (Unit(source, ("-O1", "-fPIC")),))


def test_a_library_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    recipe, stated, reported = tiny_recipe(tmp_path), [], []
    first = build(recipe, tmp_path / "cache", stated.append, lambda *done: reported.append(done))
    stamp = first.stat().st_mtime_ns
    assert ctypes.CDLL(str(first)).answer() == 42
    assert build(recipe, tmp_path / "cache", stated.append, lambda *done: reported.append(done)) == first
    assert first.stat().st_mtime_ns == stamp and reported == [(1, 1)], "each compiled source is reported"
    assert [line.split()[0] for line in stated] == ["compiling", "compiled"]


def test_sources_that_change_while_they_are_compiled_leave_no_library(tmp_path: Path) -> None:
    recipe, cache = tiny_recipe(tmp_path), tmp_path / "cache"
    with pytest.raises(UnsupportedError, match="changed while they were compiled"):
        build(recipe, cache, progress=lambda _: tiny_recipe(tmp_path, "int other() { return 1; }") and None)
    assert not [*cache.glob("*.so*"), *cache.glob("build-*")]


def test_the_name_depends_on_source_flags_compiler_and_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path)
    names = {recipe.key()}
    names.add(Recipe(recipe.compiler, (Unit(recipe.units[0].source, ("-O2", "-fPIC")),)).key())
    names.add(Recipe(Compiler(recipe.compiler.path, "another version"), recipe.units).key())
    names.add(tiny_recipe(tmp_path, "int answer() { return 43; }").key())
    monkeypatch.setattr(build_module, "processor", lambda: ("x86_64", "flags: none"))
    assert len(names) == 4 and recipe.key() not in names


def build_in_child(recipe: Recipe, cache: Path, lines: "multiprocessing.Queue[str]") -> None:
    path = build(recipe, cache, lines.put)
    assert ctypes.CDLL(str(path)).answer() == 42


@pytest.mark.parametrize(
    "is_damaged", quick_where(lambda damaged: not damaged, [False, True]), ids=["nothing cached", "damaged"]
)
def test_eight_processes_at_once_compile_once(tmp_path: Path, is_damaged: bool) -> None:
    recipe = tiny_recipe(tmp_path)
    if is_damaged:
        truncate(build(recipe, tmp_path / "cache"))
    context = multiprocessing.get_context("fork")
    lines = context.Queue()
    children = [context.Process(target=build_in_child, args=(recipe, tmp_path / "cache", lines)) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 8
    stated = []
    while not lines.empty():
        stated.append(lines.get())
    assert sum(line.startswith("compiling 1 ") for line in stated) == 1
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".lock", ".sha256", ".so"]


def truncate(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def flip_a_bit(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "one bit flipped": flip_a_bit,
    "empty": lambda library: library.write_bytes(b""),
    "digest missing": lambda library: digest_file(library).unlink(),
    "digest empty": lambda library: digest_file(library).write_text(""),
    "digest of other bytes": lambda library: digest_file(library).write_text(f"{'0' * 64}  {library.name}\n"),
    "writable by others": lambda library: library.chmod(0o722),
    "digest writable by others": lambda library: digest_file(library).chmod(0o666),
    "a link": lambda library: library.symlink_to(library.rename(library.with_suffix(".moved"))),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_compiled_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    recipe, lines = tiny_recipe(tmp_path), []
    library = build(recipe, tmp_path / "cache")
    linked, inode = library.read_bytes(), library.stat().st_ino
    damage(library)
    assert reason_against(library)
    assert build(recipe, tmp_path / "cache", lines.append) == library
    # Compared before it is loaded: a truncated library would end this process.
    assert library.read_bytes() == linked and library.lstat().st_ino != inode
    assert ctypes.CDLL(str(library)).answer() == 42
    assert lines[0].startswith("compiling again, because the cached CPU kernels cannot be used: ")
    assert not reason_against(library)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user")
@pytest.mark.parametrize("given_away", [lambda library: library, digest_file], ids=["library", "digest"])
def test_a_file_of_another_user_is_not_loaded(tmp_path: Path, given_away: Callable[[Path], Path]) -> None:
    library = build(tiny_recipe(tmp_path), tmp_path / "cache")
    os.chown(given_away(library), 65534, 65534)
    assert "that this user alone can write: user 65534" in reason_against(library)
    assert given_away(build(tiny_recipe(tmp_path), tmp_path / "cache")).stat().st_uid == 0


def test_the_recorded_digest_is_what_sha256sum_checks(tmp_path: Path) -> None:
    library = build(tiny_recipe(tmp_path), tmp_path / "cache")
    check = ["sha256sum", "--check", digest_file(library).name]
    stated = subprocess.run(check, cwd=library.parent, capture_output=True, check=True, text=True).stdout
    assert stated.endswith(": OK\n")


HOLD = """
import os, signal, sys
from pathlib import Path
from moe_mk.kernels.native.build import only_one
with only_one(Path(sys.argv[1])):
    child = os.fork() if sys.argv[2] != "alone" else 1
    if child == 0:
        signal.pause()
    print(child, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
print("released", flush=True)
sys.stdin.readline()
"""


@contextmanager
def held(lock: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock: "alone", with a forked child, or "killed" while such a child lives."""
    lock.parent.mkdir(mode=0o700, exist_ok=True)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, str(lock), how]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            yield holder
        finally:
            if how != "alone":
                os.kill(child, signal.SIGKILL)
            holder.kill()


def lock_of(recipe: Recipe, cache: Path) -> Path:
    return cache / f"moe_mk-{recipe.key()}.lock"


def test_a_lock_that_is_not_freed_ends_in_an_error_that_names_its_holder(tmp_path: Path) -> None:
    recipe, cache, lines = tiny_recipe(tmp_path), tmp_path / "cache", []
    lock = lock_of(recipe, cache)
    with held(lock, "alone") as holder:
        with pytest.raises(UnsupportedError) as caught:
            build(recipe, cache, lines.append, lock_timeout_s=0.2)
        text = str(caught.value)
        assert f"not free within 0.2 s: {lock}\n" in text
        assert f"held by process {holder.pid} on host {platform.node()} since 20" in text
        assert "or end it, and start again; delete the lock file if" in text
        assert len(lines) == 1 and f"{lock} is held by process {holder.pid}" in lines[0]
        lock.unlink()  # the way out that the message names
        assert ctypes.CDLL(str(build(recipe, cache, lock_timeout_s=0.2))).answer() == 42


@pytest.mark.slow
def test_a_lock_without_a_name_in_it_is_reported_as_such(tmp_path: Path) -> None:
    recipe, cache = tiny_recipe(tmp_path), tmp_path / "cache"
    with held(lock_of(recipe, cache), "alone"):
        os.truncate(lock_of(recipe, cache), 0)
        with pytest.raises(UnsupportedError, match=r"held by a process that it does not name, since 20.*`fuser`"):
            build(recipe, cache, lock_timeout_s=0.0)


def test_the_lock_of_a_killed_holder_is_taken_over_although_its_child_lives(tmp_path: Path) -> None:
    recipe, cache = tiny_recipe(tmp_path), tmp_path / "cache"
    with held(lock_of(recipe, cache), "killed") as holder:
        # Not reaped: it has ended all the same.
        assert os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT) is not None
        assert ctypes.CDLL(str(build(recipe, cache, lock_timeout_s=60.0))).answer() == 42


@pytest.mark.slow
def test_a_lock_is_free_after_its_holder_although_a_child_was_forked_meanwhile(tmp_path: Path) -> None:
    recipe, cache = tiny_recipe(tmp_path), tmp_path / "cache"
    with held(lock_of(recipe, cache), "with a child") as holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "released\n"
        assert build(recipe, cache, lock_timeout_s=0.0).exists()


def build_as_owner(recipe: Recipe, cache: Path, answers: "multiprocessing.Queue[str]") -> None:
    """Without the rights of root, whom no mode keeps from writing."""
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        answers.put(str(build(recipe, cache)))
    except UnsupportedError as error:
        answers.put(str(error))


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_cache_that_cannot_be_written_serves_what_it_has_and_states_so_otherwise(is_cached: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix="moe-mk-read-only-"))  # not under tmp_path, which only its owner may enter
    try:
        recipe, cache = tiny_recipe(folder), own_directory(folder / "cache")
        library = build(recipe, cache) if is_cached else cache / "none"
        if os.getuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, 65534, 65534)
        cache.chmod(0o500)
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=build_as_owner, args=(recipe, cache, answers))
        child.start()
        answer = answers.get(timeout=60)
        child.join(60)
        if is_cached:
            assert answer == str(library)
        else:
            assert answer.startswith(f"the kernel cache {cache} cannot be written\n"), answer
            assert "Permission denied" in answer and "pass another cache_dir" in answer
    finally:
        cache.chmod(0o700)
        shutil.rmtree(folder)


def test_the_cache_is_made_private(tmp_path: Path) -> None:
    cache = tmp_path / "wide"
    cache.mkdir(mode=0o755)
    own_directory(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert own_directory(tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700
    before = os.umask(0)
    try:
        made = own_directory(tmp_path / "b" / "c" / "new")
    finally:
        os.umask(before)
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (made, *made.parents[:2])), "parents too"
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert own_directory(tmp_path / "link" / "c" / "new") == made, "links are followed once, and not by the library"


def test_a_link_or_a_pipe_in_place_of_a_library_is_not_read(tmp_path: Path) -> None:
    library, other = tmp_path / "moe_mk-0.so", tmp_path / "other.so"
    other.write_bytes(b"code")
    other.chmod(0o700)
    record_digest(other).rename(tmp_path / "moe_mk-0.so.sha256")
    assert reason_against(library) == "moe_mk-0.so: No such file or directory"
    library.symlink_to(other)
    assert "symbolic links" in reason_against(library)
    library.unlink()
    os.mkfifo(library, 0o700)
    assert "is no file that this user alone can write" in reason_against(library)
    library.unlink()
    other.rename(library)
    assert not reason_against(library)


def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UnsupportedError, match=r"belongs to user \d+.*\n.*run as you; pass a cache_dir of your own"):
        build(tiny_recipe(tmp_path), tmp_path, None)


def test_an_empty_cache_holds_nothing_compiled(tmp_path: Path) -> None:
    assert not is_compiled(tmp_path / "empty") and not is_compiled(tmp_path / "empty", which=lambda name: None)


def test_what_killed_builds_left_is_removed_and_what_lives_stays(tmp_path: Path) -> None:
    recipe, cache = tiny_recipe(tmp_path), own_directory(tmp_path / "cache")
    other = f"moe_mk-{'0' * 24}"
    names = {
        "dead": f"build-moe_mk-{recipe.key()}-abcd", "other": f"build-{other}-abcd", "live": "build-moe_mk-live-abcd",
        "young": "build-abcd", "old": "build-efgh", "young try": "try-abcd", "old try": "try-efgh",
    }  # fmt: skip
    for name in names.values():
        (cache / name).mkdir()
        (cache / name / "half.o").write_text("x")
    for name in ("old", "old try"):
        os.utime(cache / names[name], (1, 1))
    (cache / f"{other}.lock").touch()
    with build_module.only_one(cache / "moe_mk-live.lock"):
        build(recipe, cache)
        left = {path.name for path in (*cache.glob("build-*"), *cache.glob("try-*"))}
    assert left == {names[name] for name in ("live", "young", "young try")}


def test_a_disk_without_room_for_what_is_compiled_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "ROOM_BYTES", 1 << 60)
    library, (reason,) = build_module.usable_library(tiny_recipe(tmp_path), tmp_path / "cache")
    assert library is None and not any((tmp_path / "cache").iterdir())
    assert f"the kernel cache {tmp_path / 'cache'} cannot be written: " in reason and "pass another" in reason
