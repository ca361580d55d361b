"""The folder that compiled kernels are kept in: that of the user, of the system, or of the settings."""

import ctypes
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_mk import MoEConfig, MoELayer, oracle
from moe_mk.config.problem import Problem
from moe_mk.config.shipped import device_profile, load_config
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.external.library import installed
from moe_mk.kernel import FusedMoEKernel
from moe_mk.kernels.native import build as build_module
from moe_mk.kernels.native.build import Recipe, build, own_directory
from moe_mk.kernels.native.selfcheck import loaded
from moe_mk.kernels.native.toolchain import Compiler, digest_file
from moe_mk.lab.cli.doctor import findings
from moe_mk.quant.plain import BF16
from tests.kernels.native.test_build import tiny_recipe
from tests.layer.native import NEEDS_COMPILER


def user_folders(folder: Path) -> dict[str, Path | None]:
    """A directory of the user for each way in which it can hold the cache or not; None: there is none."""
    (folder / "file").write_text("mine")
    (folder / "wrong" / ".cache" / "moe_mk").mkdir(parents=True)
    (folder / "wrong" / ".cache" / "moe_mk" / "kernels").write_text("mine")
    (folder / "loop").symlink_to("loop")
    (folder / "lost" / ".cache" / "moe_mk").mkdir(parents=True)
    (folder / "lost" / ".cache" / "moe_mk" / "kernels").symlink_to(folder / "nowhere")
    (folder / "real").mkdir()
    (folder / "link").symlink_to(folder / "real")
    return {
        **{name: folder / name for name in ("new", "file", "wrong", "loop", "lost", "link")},
        "none": None, "relative": Path("relative"), "no writes": Path("/proc/1/user"), "no programs": folder / "noexec",
    }  # fmt: skip


HOME = Path.home.__name__
GOOD = {"new", "link"}


@pytest.mark.parametrize("compiles", [True, False])
def test_the_kernels_lie_in_the_cache_of_the_user_else_in_a_private_temporary_folder_else_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    recipe = tiny_recipe(tmp_path)
    made, compiler = build(recipe, tmp_path / "made"), tmp_path / "c++"
    copies = f'while [ "$1" != -o ]; do shift; done; cp {made} "$2"'  # fast, so that all combinations can be tried
    compiler.write_text(f"#!/bin/sh\n{copies if compiles else 'echo no space left >&2; exit 1'}\n")
    compiler.chmod(0o700)
    recipe = Recipe(Compiler(str(compiler), "1"), recipe.units)
    load_error = build_module.load_error
    monkeypatch.setattr(
        build_module, "load_error", lambda path: "no programs here" if "noexec" in str(path) else load_error(path)
    )
    for name, given in user_folders(tmp_path).items():

        def user_folder(given: Path | None = given) -> Path:
            if given is None:
                raise RuntimeError("Could not determine it")
            return given

        monkeypatch.setattr(Path, HOME, user_folder)
        for temporary in ("private", "wide", "planted", "missing"):
            base = tmp_path / f"{name} {temporary}"
            if temporary != "missing":
                base.mkdir(mode=0o700)
            base.exists() and base.chmod(0o777 if temporary == "wide" else 0o700)
            planted = base / f"moe_mk-kernels-{os.getuid()}"
            if temporary == "planted":
                (tmp_path / "target").mkdir(exist_ok=True)
                planted.symlink_to(tmp_path / "target")
            monkeypatch.setattr(tempfile, "tempdir", str(base))
            build_module.usable_library.cache_clear()
            library, reasons = build_module.usable_library(recipe)
            if compiles and (name in GOOD or temporary == "private"):
                assert library is not None and bool(reasons) == (name not in GOOD), (name, temporary, reasons)
                assert ctypes.CDLL(str(build(recipe, library.parent))).answer() == 42
                assert library.parent.stat().st_mode & 0o777 == 0o700
                assert library.is_relative_to(planted if name not in GOOD else tmp_path)
                assert not list(library.parent.glob("try-*"))
            else:
                assert library is None and len(reasons) >= 2, (name, temporary)
                assert not any((tmp_path / "target").glob("*"))
    build_module.usable_library.cache_clear()


def test_a_temporary_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = build_module.temporary_cache_dir()
    monkeypatch.setattr(Path, HOME, lambda: Path("/proc/1/user"))
    owner = planted.stat().st_uid
    if owner == 0:
        os.chown(planted, 65534, 65534)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        planted.rename(tmp_path / f"moe_mk-kernels-{owner + 1}")
    build_module.usable_library.cache_clear()
    library, reasons = build_module.usable_library(tiny_recipe(tmp_path))
    assert library is None and "pass a cache_dir of your own" in reasons[-1]


@pytest.mark.parametrize("folder", ["file", "file/below", "loop"])
def test_kernels_that_cannot_be_kept_leave_auto_to_other_experts(tmp_path: Path, folder: str) -> None:
    """The reason is in the decision and in the error of a pin, and `moe-mk doctor` prints it."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    config = load_config("deepseek_v3").with_(cache_dir=str(tmp_path / folder))
    problem = Problem(config, device_profile("cpu"), BF16, 8, installed(config.kernel.cache_dir))
    decision, reason = oracle.select(problem), f"the kernel cache {tmp_path / folder} cannot be used"
    assert decision.chosen.experts == "torch_cpu"
    assert any(reason in str(each) for verdict in decision.verdicts for each in verdict.reasons)
    with pytest.raises(UnsupportedError, match="cannot be used"):
        oracle.select(replace(problem, config=config.with_(experts="cpu_native")))
    rows = {row["name"]: row["reasons"] for row in findings({"cache_dir": str(tmp_path / folder)})["backends"]}
    assert any(reason in why for why in rows["cpu_native"]) and not rows["torch_cpu"]


@pytest.mark.parametrize("folder", ["", "kernels", "~/kernels"])
def test_a_folder_that_depends_on_where_a_process_runs_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"kernel\.cache_dir: must be an absolute path, got "):
        load_config("deepseek_v3").with_(cache_dir=folder)


@NEEDS_COMPILER
def test_a_layer_loads_its_kernels_from_the_folder_of_its_settings(tmp_path: Path) -> None:
    library = loaded().path
    for file in (library, digest_file(library)):
        shutil.copy2(file, own_directory(tmp_path / "kernels") / file.name)
    model = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4}
    config = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "here").with_(
        experts="cpu_native", cache_dir=str(tmp_path / "kernels")
    )
    layer = MoELayer(config, dtype=torch.bfloat16)
    assert isinstance(layer.kernel, FusedMoEKernel)
    assert vars(layer.kernel.experts)["native"].path == tmp_path / "kernels" / library.name
