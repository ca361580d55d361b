"""The compile cache: ours alone, built once, honest about failure."""

import ctypes
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.kernels.native import build as build_module
from moe_mk.kernels.native import load, reasons_against
from moe_mk.kernels.native.build import Recipe, build, default_cache_dir, own_directory
from moe_mk.kernels.native.toolchain import Compiler, Unit, find_compiler, units


def tiny_recipe(folder: Path, body: str = "int answer() { return 42; }") -> Recipe:
    source = folder / "tiny.cpp"
    source.write_text(f'extern "C" {body}\n')
    compiler = find_compiler(shutil.which)
    assert compiler is not None
    return Recipe(compiler, (Unit(source, ("-O1", "-fPIC")),))


def test_a_library_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    recipe, said = tiny_recipe(tmp_path), []
    first = build(recipe, tmp_path / "cache", said.append)
    stamp = first.stat().st_mtime_ns
    assert ctypes.CDLL(str(first)).answer() == 42
    assert build(recipe, tmp_path / "cache", said.append) == first
    assert first.stat().st_mtime_ns == stamp
    assert [line.split()[0] for line in said] == ["compiling", "compiled"]


def test_each_compiled_source_is_told(tmp_path: Path) -> None:
    recipe, told = tiny_recipe(tmp_path), []
    build(recipe, tmp_path / "cache", on_unit=lambda done, total: told.append((done, total)))
    build(recipe, tmp_path / "cache", on_unit=lambda done, total: told.append((done, total)))
    assert told == [(1, 1)]


def test_the_name_depends_on_source_flags_and_compiler(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    names = {recipe.key()}
    names.add(Recipe(recipe.compiler, (Unit(recipe.units[0].source, ("-O2", "-fPIC")),)).key())
    names.add(Recipe(Compiler(recipe.compiler.path, "another version"), recipe.units).key())
    names.add(tiny_recipe(tmp_path, "int answer() { return 43; }").key())
    assert len(names) == 4


def test_the_name_depends_on_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    here = recipe.key()
    monkeypatch.setattr(build_module, "processor", lambda: ("x86_64", "flags: none"))
    assert recipe.key() != here


def build_in_child(recipe: Recipe, cache: Path, lines: "multiprocessing.Queue[str]") -> None:
    path = build(recipe, cache, lines.put)
    assert ctypes.CDLL(str(path)).answer() == 42


def test_eight_processes_at_once_compile_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    lines = context.Queue()
    arguments = tiny_recipe(tmp_path), tmp_path / "cache", lines
    children = [context.Process(target=build_in_child, args=arguments) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 8
    said = []
    while not lines.empty():
        said.append(lines.get())
    assert sum(line.startswith("compiling") for line in said) == 1
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".lock", ".so"]


def test_the_cache_is_made_private(tmp_path: Path) -> None:
    cache = tmp_path / "wide"
    cache.mkdir(mode=0o755)
    own_directory(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert own_directory(tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700


def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UnsupportedError, match=r"belongs to user \d+.*\n.*run as you; pass a cache_dir of your own"):
        build(tiny_recipe(tmp_path), tmp_path, None)


def test_a_library_others_may_write_is_built_again(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    library = build(recipe, tmp_path / "cache")
    library.write_bytes(b"not a library")
    library.chmod(0o722)
    assert ctypes.CDLL(str(build(recipe, tmp_path / "cache"))).answer() == 42


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"did not compile\n.*tiny.cpp.*nonsense"):
        build(tiny_recipe(tmp_path, "nonsense"), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_an_interrupted_build_leaves_no_compiler_and_no_file_behind(tmp_path: Path) -> None:
    # The first source is done as soon as the second is under way; that one would take a minute.
    started, compiler = tmp_path / "started", tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f"*slow.cpp*) echo $$ > {started}; exec sleep 60;;\n"
        f"*) while [ ! -s {started} ]; do sleep 0.01; done;;\nesac\n"
    )
    compiler.chmod(0o700)
    listed = tuple(Unit(tmp_path / name, ()) for name in ("fast.cpp", "slow.cpp"))
    for unit in listed:
        unit.source.touch()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(Recipe(Compiler(str(compiler), "1"), listed), tmp_path / "cache", on_unit=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_no_compiler_is_a_typed_reason_with_the_fix() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot be built\n.*no C\+\+ compiler.*install one.*torch_cpu serves"):
        load(which=lambda name: None)
    assert "apt install g++" in reasons_against(which=lambda name: None)[0]
    assert reasons_against() == []


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


def test_other_processors_compile_the_portable_kernels_only() -> None:
    names = {unit.source.name for unit in units("aarch64")}
    assert "isa_scalar.cpp" in names and "isa_avx2.cpp" not in names
    assert not any(flag.startswith("-m") for unit in units("aarch64") for flag in unit.flags)


def test_the_default_cache_lies_in_the_home_directory(tmp_path: Path) -> None:
    assert default_cache_dir(tmp_path).is_relative_to(tmp_path)
    assert default_cache_dir().is_relative_to(Path.home())
