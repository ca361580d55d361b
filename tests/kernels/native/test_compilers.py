"""Compilers: which one is found, with which flags it is called, and what becomes of it when it or the build fails."""

import ctypes
import multiprocessing
import os
import select
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.kernels.native import build as build_module
from moe_mk.kernels.native.build import Recipe, build
from moe_mk.kernels.native.selfcheck import load, reasons_against
from moe_mk.kernels.native.toolchain import Compiler, Unit, compilers_at_once, find_compiler, units
from tests.kernels.native.test_build import tiny_recipe


def compiler_in(folder: Path, script: str) -> Compiler:
    """A program c++ of a folder, in its first version."""
    program = folder / "c++"
    program.write_text(script)
    program.chmod(0o700)
    return Compiler(str(program), "first")


def sources_in(folder: Path, *names: str) -> tuple[Unit, ...]:
    """Empty sources, compiled without flags."""
    for name in names:
        (folder / name).touch()
    return tuple(Unit(folder / name, ()) for name in names)


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


def test_as_many_compilers_run_at_once_as_there_are_cores(tmp_path: Path) -> None:
    running = tmp_path / "running"
    compiler = compiler_in(
        tmp_path,
        f"#!/bin/sh\nmkdir -p {running}; touch {running}/$$; ls {running} | wc -l >> {tmp_path}/counts\n"
        f'sleep 0.2; rm {running}/$$; while [ "$1" != -o ]; do shift; done; touch "$2"\n',
    )
    listed = sources_in(tmp_path, *(f"{number}.cpp" for number in range(3 * compilers_at_once())))
    reported: list[int] = []
    recipe = Recipe(compiler, listed, ("linked",))
    build(recipe, tmp_path / "cache", on_unit=lambda done, total: reported.append(done))
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
    cache, real = tmp_path / "cache", f'exec {shutil.which("c++")} "$@"'
    script = f'#!/bin/sh\ncase "$TMPDIR" in {cache}/*) {real};; esac\necho full >&2; exit 1\n'
    recipe = Recipe(compiler_in(tmp_path, script), tiny_recipe(tmp_path).units)
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
    compiler = compiler_in(tmp_path, f"#!/bin/bash\n[ $1 = --version ] && exec printf 'x\\xff'\n{does}\n")
    with pytest.raises(UnsupportedError, match=words):
        load(tmp_path / "cache", which=lambda name: compiler.path)
    assert not [*tmp_path.glob("cache/build-*"), *tmp_path.glob("cache/try-*")]


@dataclass
class SlowCompiler:
    """A driver that starts another program, as compilers do, which would take a minute for slow.cpp."""

    recipe: Recipe
    alive: int
    """Read end of a FIFO that only those programs write to: its end is theirs."""

    def ends_within(self, seconds: float) -> bool:
        """Whether all programs end by then; True at once where they have ended."""
        while select.select([self.alive], [], [], seconds)[0]:
            if not os.read(self.alive, 4096):
                return True
        return False


@pytest.fixture
def slow_compiler(tmp_path: Path) -> Iterator[SlowCompiler]:
    fifo, started = tmp_path / "fifo", tmp_path / "started"
    os.mkfifo(fifo)
    compiler = compiler_in(
        tmp_path,
        '#!/bin/sh\ncase "$*" in\n'
        f"*slow.cpp*) exec 9>{fifo}; echo . >&9; (touch {started}; sleep 60; true); true;;\n"
        f"*) while [ ! -e {started} ]; do sleep 0.01; done;;\nesac\n",
    )
    alive = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    yield SlowCompiler(Recipe(compiler, sources_in(tmp_path, "fast.cpp", "slow.cpp")), alive)
    os.close(alive)


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


def test_a_broken_compiler_is_passed_over() -> None:
    answers = {"c++": "/bin/false", "g++": shutil.which("g++") or shutil.which("c++")}
    found = find_compiler(answers.get)
    assert found is not None and found.path == answers["g++"]


def test_a_compiler_is_asked_once_until_its_file_is_another(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    compiler = compiler_in(tmp_path, f"#!/bin/sh\necho x >> {asked}\necho first\n")
    seen = [find_compiler(lambda name: compiler.path) for _ in range(3)]
    assert seen == [compiler] * 3 and asked.read_text() == "x\n"
    compiler_in(tmp_path, "#!/bin/sh\necho the second\n")
    assert find_compiler(lambda name: compiler.path) == Compiler(compiler.path, "the second")
