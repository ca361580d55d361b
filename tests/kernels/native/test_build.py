"""The compile cache: ours alone, built once, honest about failure."""

import ctypes
import multiprocessing
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.kernels.native import build as build_module
from moe_mk.kernels.native.build import Recipe, build, own_directory, reason_against
from moe_mk.kernels.native.selfcheck import is_compiled, load, reasons_against
from moe_mk.kernels.native.toolchain import (
    Compiler,
    Unit,
    compilers_at_once,
    digest_file,
    find_compiler,
    record_digest,
    units,
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


def test_emulated_tiles_and_other_processors_are_compiled_without_these_instructions() -> None:
    def flags(**settings: bool) -> set[str]:
        by_name = {unit.source.name: set(unit.flags) for unit in units("x86_64", **settings)}
        return {flag for flag in by_name["isa_amx.cpp"] if flag.startswith("-m")}

    real, around, portable = flags(), flags(emulate_amx=True, tiles_only=True), flags(emulate_amx=True)
    assert real > around > portable and real - around == {"-mamx-tile", "-mamx-bf16"}
    assert "-mgfni" in around and "-mavx512f" in around - portable
    other = {unit.source.name: unit.flags for unit in units("x86_64", emulate_amx=True)}
    assert "-mavx512f" in other["isa_avx512bf16.cpp"]
    portable = {unit.source.name: unit.flags for unit in units("aarch64")}
    assert "isa_scalar.cpp" in portable and "isa_avx2.cpp" not in portable
    assert not any(flag.startswith("-m") for flags in portable.values() for flag in flags)


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


def test_as_many_compilers_run_at_once_as_there_are_cores(tmp_path: Path) -> None:
    compiler, running = tmp_path / "c++", tmp_path / "running"
    compiler.write_text(
        f"#!/bin/sh\nmkdir -p {running}; touch {running}/$$; ls {running} | wc -l >> {tmp_path}/counts\n"
        f'sleep 0.2; rm {running}/$$; while [ "$1" != -o ]; do shift; done; touch "$2"\n'
    )
    compiler.chmod(0o700)
    listed = tuple(Unit(tmp_path / f"{number}.cpp", ()) for number in range(3 * compilers_at_once()))
    for unit in listed:
        unit.source.touch()
    reported: list[int] = []
    build(
        Recipe(Compiler(str(compiler), "1"), listed, ("linked",)), tmp_path / "cache",
        on_unit=lambda done, total: reported.append(done),
    )  # fmt: skip
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert reported == list(range(1, len(listed) + 1)) and len(counts) == len(listed) + 1  # and the link
    assert 2 <= max(counts) <= compilers_at_once()


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"did not compile\n.*tiny.cpp.*nonsense"):
        build(tiny_recipe(tmp_path, "nonsense"), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_compiler_needs_no_temporary_folder_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The room of the cache was checked; /tmp may be full, or TMPDIR no folder.
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    cache, compiler = tmp_path / "cache", tmp_path / "c++"
    real = f'exec {shutil.which("c++")} "$@"'
    compiler.write_text(f'#!/bin/sh\ncase "$TMPDIR" in {cache}/*) {real};; esac\necho full >&2; exit 1\n')
    compiler.chmod(0o700)
    recipe = Recipe(Compiler(str(compiler), "1"), tiny_recipe(tmp_path).units)
    library, reasons = build_module.usable_library(recipe, cache)
    assert library is not None and not reasons
    assert ctypes.CDLL(str(build(recipe, cache))).answer() == 42


CALLED = "while [ $# -gt 1 ]; do shift; [ $1 = -o ] && "
ON_REAL_SOURCES = f'case "$*" in *empty.cpp*) exec {shutil.which("c++")} "$@";; esac; '
ONE_FUNCTION = f"{shutil.which('c++')} -shared -fPIC -x c++ -o $2 - <<< 'int f() {{ return 0; }}'"
WRONG_COMPILERS = {
    "crashes": (f"{ON_REAL_SOURCES} kill -SEGV $$", "ended with -11"),
    "writes nothing": ("exit 0", "No such file"),
    "writes garbage": (f"{ON_REAL_SOURCES} {CALLED} echo x > $2; done; exit 0", "file too short"),
    "leaves functions out": (f"{ON_REAL_SOURCES} {CALLED} {ONE_FUNCTION}; done; exit 0", "undefined symbol: moe_mk_"),
    "hangs": (f"{ON_REAL_SOURCES} sleep 100", "was ended: it wrote nothing for 2 s"),
}


@pytest.mark.parametrize("does,words", WRONG_COMPILERS.values(), ids=WRONG_COMPILERS)
def test_whatever_a_compiler_does_ends_in_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, words: str
) -> None:
    monkeypatch.setattr(build_module, "QUIET_S", 2.0)
    (compiler := tmp_path / "c++").write_text(f"#!/bin/bash\n[ $1 = --version ] && exec printf 'x\\xff'\n{does}\n")
    compiler.chmod(0o700)
    with pytest.raises(UnsupportedError, match=words):
        load(tmp_path / "cache", which=lambda name: str(compiler))
    assert not [*tmp_path.glob("cache/build-*"), *tmp_path.glob("cache/try-*")]


@dataclass
class SlowCompiler:
    """A driver that starts another program, as compilers do, which would take a minute for slow.cpp."""

    recipe: Recipe
    alive: int
    """Read end of a FIFO that only those programs write to: its end is theirs."""

    @classmethod
    def at(cls, folder: Path) -> "SlowCompiler":
        fifo, started, compiler = folder / "fifo", folder / "started", folder / "c++"
        os.mkfifo(fifo)
        compiler.write_text(
            '#!/bin/sh\ncase "$*" in\n'
            f"*slow.cpp*) exec 9>{fifo}; echo . >&9; (touch {started}; sleep 60; true); true;;\n"
            f"*) while [ ! -e {started} ]; do sleep 0.01; done;;\nesac\n"
        )
        compiler.chmod(0o700)
        listed = tuple(Unit(folder / name, ()) for name in ("fast.cpp", "slow.cpp"))
        for unit in listed:
            unit.source.touch()
        return cls(Recipe(Compiler(str(compiler), "1"), listed), os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))

    def ends_within(self, seconds: float) -> bool:
        """Whether all programs end by then; True at once where they have ended."""
        while select.select([self.alive], [], [], seconds)[0]:
            if not os.read(self.alive, 4096):
                return True
        return False


@pytest.fixture
def slow_compiler(tmp_path: Path) -> Iterator[SlowCompiler]:
    made = SlowCompiler.at(tmp_path)
    yield made
    os.close(made.alive)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_build_leaves_no_compiler_and_no_file_behind(
    tmp_path: Path, slow_compiler: SlowCompiler, error: type[BaseException]
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise error

    with pytest.raises(error):
        build(slow_compiler.recipe, tmp_path / "cache", on_unit=interrupt)
    assert slow_compiler.ends_within(0.0)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_at_the_keyboard_ends_the_compilers(tmp_path: Path, slow_compiler: SlowCompiler) -> None:
    """SIGINT while the build waits for a compiler, not between two of them."""

    main = threading.get_ident()

    def interrupt() -> None:
        select.select([slow_compiler.alive], [], [])
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    recipe = Recipe(slow_compiler.recipe.compiler, slow_compiler.recipe.units[1:])
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        build(recipe, tmp_path / "cache")
    thread.join()
    assert slow_compiler.ends_within(5.0)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_compilers_end_with_the_process_that_builds(
    tmp_path: Path, slow_compiler: SlowCompiler, number: signal.Signals
) -> None:
    context = multiprocessing.get_context("fork")
    child = context.Process(target=build, args=(slow_compiler.recipe, tmp_path / "cache"))
    child.start()
    assert select.select([slow_compiler.alive], [], [], 60.0)[0]
    assert child.pid is not None
    os.kill(child.pid, number)
    child.join(60)
    assert child.exitcode == -number
    assert slow_compiler.ends_within(30.0)


def test_no_compiler_is_a_typed_reason_with_the_fix() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot be built\n.*no C\+\+ compiler.*install one.*torch_cpu serves"):
        load(which=lambda name: None)
    assert "apt install g++" in reasons_against(which=lambda name: None)[0] and not reasons_against()


def test_an_empty_cache_holds_nothing_compiled(tmp_path: Path) -> None:
    assert not is_compiled(tmp_path / "empty") and not is_compiled(tmp_path / "empty", which=lambda name: None)


def test_a_broken_compiler_is_passed_over() -> None:
    answers = {"c++": "/bin/false", "g++": shutil.which("g++") or shutil.which("c++")}
    found = find_compiler(answers.get)
    assert found is not None and found.path == answers["g++"]


def test_a_compiler_is_asked_once_until_its_file_is_another(tmp_path: Path) -> None:
    compiler, asked = tmp_path / "c++", tmp_path / "asked"
    compiler.write_text(f"#!/bin/sh\necho x >> {asked}\necho first\n")
    compiler.chmod(0o700)
    seen = [find_compiler(lambda name: str(compiler)) for _ in range(3)]
    assert seen == [Compiler(str(compiler), "first")] * 3 and asked.read_text() == "x\n"
    compiler.write_text("#!/bin/sh\necho the second\n")
    assert find_compiler(lambda name: str(compiler)) == Compiler(str(compiler), "the second")


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
