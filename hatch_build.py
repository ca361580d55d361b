"""Compiles the native CPU kernels into the wheel where the machine that builds it has a C++ compiler.

The wheel is then tagged for that platform and needs no compiler where it is installed; without one the wheel is pure
and the kernels are compiled on first use. Editable installs compile on first use as well: their sources change.
`HATCH_BUILD_NO_HOOKS=true` builds a pure wheel in any case. `MOE_MK_WHEEL_MACHINE=x86_64` or `aarch64` builds one that
is tagged manylinux_2_28, with the compiler of the `ziglang` package; `tools/wheel.py` builds and checks both.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("moe_mk") / "kernels" / "native"
MACHINE = "MOE_MK_WHEEL_MACHINE"
STATIC = ("-static-libstdc++", "-static-libgcc")
"""The C++ runtime comes along: the target may have another one, or none."""


class KernelsHook(BuildHookInterface[Any]):
    """Adds `moe_mk/kernels/native/prebuilt/<name>.so`, named after the digest of its sources and flags.

    Its SHA-256 is recorded beside it: a library that is damaged later is not loaded.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; leave the wheel pure when there is no compiler."""
        if version == "editable":
            return
        toolchain = load_toolchain(Path(self.root))
        machine = os.environ.get(MACHINE)
        self.folder = tempfile.TemporaryDirectory(prefix="moe_mk-wheel-")
        folder = Path(self.folder.name)
        static: tuple[str, ...] = ("-s",) if machine else STATIC
        if machine:
            compiler = toolchain.zig_compiler(folder, f"{machine}-linux-gnu.2.28")
            platform = f"manylinux_2_28_{machine}"
        else:
            compiler = toolchain.find_compiler(shutil.which)
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if compiler is None:
            self.app.display_warning("no C++ compiler: the CPU kernels will be compiled where the wheel is installed")
            return
        units = toolchain.units(machine)
        library = folder / toolchain.prebuilt_name(units, machine)
        self.app.display_info(f"compiling {len(units)} CPU kernel sources with {compiler.version}")
        objects = toolchain.compile_objects(compiler.path, units, folder)
        flags = (*toolchain.LINK_FLAGS, *static)
        subprocess.run([compiler.path, *flags, "-o", str(library), *map(str, objects)], check=True)
        for file in (library, toolchain.record_digest(library)):
            build_data["force_include"][str(file)] = (NATIVE / "prebuilt" / file.name).as_posix()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "folder"):
            self.folder.cleanup()


def load_toolchain(root: Path) -> ModuleType:
    """`moe_mk.kernels.native.toolchain` without its package, whose dependencies a build environment lacks."""
    spec = importlib.util.spec_from_file_location("moe_mk_toolchain", root / NATIVE / "toolchain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module
