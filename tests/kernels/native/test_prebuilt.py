"""Kernels that come with the wheel: used when they were compiled from exactly these sources, else compiled here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.kernels.native import library, toolchain
from moe_mk.kernels.native.library import Native, compile_and_open, open_library
from moe_mk.kernels.native.toolchain import prebuilt, prebuilt_here, prebuilt_name, record_digest, units

ROOT = Path(__file__).resolve().parents[3]


def test_only_a_library_of_exactly_these_sources_is_taken(tmp_path: Path) -> None:
    listed = units()
    assert prebuilt(listed, tmp_path) is None
    (tmp_path / prebuilt_name(listed)).write_bytes(b"")
    assert prebuilt(listed, tmp_path) == tmp_path / prebuilt_name(listed)
    assert prebuilt(units(extra=("-O1",)), tmp_path) is None


def test_a_library_for_another_processor_has_a_name_of_its_own_and_portable_kernels_only() -> None:
    """And a processor with fused multiply-adds in its baseline must not use them: bits would differ."""
    names = {machine: prebuilt_name(units(machine), machine) for machine in ("x86_64", "aarch64")}
    assert all(f"-{machine}-" in name for machine, name in names.items()) and len(set(names.values())) == 2
    portable = {unit.source.name: unit.flags for unit in units("aarch64")}
    assert not portable.keys() & toolchain.X86_UNITS.keys() and portable.keys() < {
        u.source.name for u in units("x86_64")
    }
    assert all(
        "-ffp-contract=off" in flags and not any(f.startswith("-m") for f in flags) for flags in portable.values()
    )


def test_the_library_of_the_wheel_is_opened_without_a_compiler(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "prebuilt", lambda listed: native.path)
    opened = compile_and_open(Path("/nonexistent"), which=lambda name: None)
    assert opened.path == native.path and set(opened.isas) >= set(native.isas)


def test_a_library_that_does_not_load_here_is_passed_over_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, stated = tmp_path / "broken.so", []
    broken.write_bytes(b"for another system")
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        open_library(broken)
    record_digest(broken)
    monkeypatch.setattr(library, "prebuilt", lambda listed: broken)
    with pytest.raises(UnsupportedError, match=r"no C\+\+ compiler was found(.|\n)*do not load here: .*broken.so"):
        compile_and_open(which=lambda name: None, progress=stated.append)
    assert stated[0].startswith("compiling, because the kernels of the wheel do not load here: ")


def test_a_damaged_library_of_the_wheel_is_not_opened(
    native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, of_wheel = native.path.read_bytes(), tmp_path / "of_the_wheel.so"
    of_wheel.write_bytes(content)
    record_digest(of_wheel)
    for module in (library, toolchain):
        monkeypatch.setattr(module, "prebuilt", lambda listed: of_wheel)
    looked_for_anew = prebuilt_here.__wrapped__
    assert looked_for_anew() == of_wheel == compile_and_open(which=lambda name: None).path
    of_wheel.unlink()  # this process has mapped the old file
    of_wheel.write_bytes(content[: len(content) // 2])
    assert looked_for_anew() is None
    with pytest.raises(UnsupportedError, match=r"no C\+\+ compiler(.|\n)*wheel are damaged: its SHA-256.*reinstall"):
        compile_and_open(which=lambda name: None)


AFTER_INSTALL = """
from moe_mk.kernels.native import selfcheck
from moe_mk.external.library import COMPILER, installed
found = selfcheck.load(which=lambda name: None)
assert "prebuilt" in found.path.parts, found.path
assert selfcheck.is_compiled(which=lambda name: None) and COMPILER in installed()
print(found.best.name, found.path.name)
"""


@pytest.mark.stress
@pytest.mark.timeout(600)  # every source is compiled
def test_a_wheel_brings_its_kernels_and_nothing_is_compiled_after_its_installation(
    native: Native, tmp_path: Path
) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling [pip install moe-mk[dev]]")
    python = [sys.executable, "-m"]
    subprocess.run(
        [*python, "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True, timeout=300
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("moe_mk-") and not wheel.name.endswith("-any.whl")
    target, home = tmp_path / "site", tmp_path / "home"
    home.mkdir()
    install = ["pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel)]
    subprocess.run([*python, *install], check=True, timeout=120)
    # Neither a compiler on the path nor a cache of this user: what loads came with the wheel.
    environment = os.environ | {"PYTHONPATH": str(target), "PATH": "", "HOME": str(home)}
    ended = subprocess.run(
        [sys.executable, "-c", AFTER_INSTALL], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[0] == native.best.name
    assert not (home / ".cache").exists()
    shutil.rmtree(target)
