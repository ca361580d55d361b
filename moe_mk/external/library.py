"""Optional libraries: which are there, and the one place that imports them.

Another distribution describes the libraries of its backends by entry points of the group `moe_mk.libraries`: the name
is the library's module, the value a `Library`.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from moe_mk.config.problem import Installed
from moe_mk.errors import LibraryMissing
from moe_mk.kernels import native
from moe_mk.registry import Records, did_you_mean


@dataclass(frozen=True)
class Library:
    """One optional library: what to import, what it is for, and how a user gets it."""

    module: str
    purpose: str
    install: str
    distributions: tuple[str, ...] = ()
    """Names under which it may be installed, for its version."""
    part: str = ""
    """The subpackage that must be there too, where several distributions share the module's name."""
    modules: tuple[str, ...] = ()
    """Names under which its module may be installed, the preferred one first; empty: `module` alone."""
    emulation: str = ""
    """The module that imitates it over the ranks' own group, if `kernel.allow_emulated` is set; empty: none."""

    @property
    def found_as(self) -> str:
        """The first of its modules that is installed with its part; empty if none is."""
        names = self.modules or (self.module,)
        part, spec = self.part and f".{self.part}", importlib.util.find_spec
        return next((name for name in names if spec(name) is not None and spec(name + part) is not None), "")


COMPILER = "c++"
"""Not a module: whatever compiles the native CPU kernels, under any of its names."""

RDMA = "rdma"
"""Not a module: an RDMA device of this host."""

EMULATIONS = "moe_mk.lab.testing.emulated"
"""The package of this package's emulations, imported only where `kernel.allow_emulated` permits one."""

BUILT_IN: Mapping[str, Library] = {
    library.module: library
    for library in (
        Library(COMPILER, "native CPU kernels", "install a C++ compiler (Debian: apt install g++)"),
        Library(RDMA, "network links by RDMA", "needs an InfiniBand, RoCE or EFA device of the host"),
        Library("triton", "GPU kernels", "pip install 'moe-mk[cuda]'", ("triton",)),
        Library(
            "deep_ep",
            "DeepEP transports",
            "pip install sgl-deep-ep, or build it",
            ("sgl-deep-ep", "deep_ep"),
            emulation=f"{EMULATIONS}.deep_ep",
        ),
        Library(
            "deep_gemm",
            "DeepGEMM experts",
            "pip install sgl-deep-gemm",
            ("sgl-deep-gemm", "deep_gemm"),
            emulation=f"{EMULATIONS}.deep_gemm",
        ),
        Library(
            "flashinfer",
            "NVLink transports, CUTLASS experts",
            "pip install 'moe-mk[flashinfer]'",
            ("flashinfer-python",),
            emulation=f"{EMULATIONS}.flashinfer",
        ),
        Library(
            "nixl",
            "RDMA between hosts",
            "pip install 'moe-mk[nixl]'",
            ("nixl-cu12", "nixl-cu13", "nixl"),
            modules=("nixl", "nixl_cu13", "nixl_cu12"),
        ),
        Library(
            "uccl",
            "UCCL-EP transports",
            "pip install uccl, and its deep_ep_wrapper",
            ("uccl",),
            emulation=f"{EMULATIONS}.uccl",
        ),
        Library("transformers", "Hugging Face models", "pip install 'moe-mk[hf]'", ("transformers",)),
        Library("gguf", "GGUF files", "pip install 'moe-mk[gguf]'", ("gguf",)),
        Library("matplotlib", "pictures", "pip install 'moe-mk[lab]'", ("matplotlib",)),
    )
}


LIBRARIES: Mapping[str, Library] = Records(Library, "moe_mk.libraries", BUILT_IN)


def emulated() -> frozenset[str]:
    """Libraries whose API can be imitated, for tests."""
    return frozenset(name for name, library in LIBRARIES.items() if library.emulation)


def installed(cache_dir: Path | None = None) -> Installed:
    """Optional libraries that could be used; none is imported or compiled to find out. cache_dir: of `KernelConfig`."""
    against = native.reasons_against(cache_dir)
    found = (name for name in LIBRARIES if (not against if name == COMPILER else _is_there(name)))
    return Installed(found, {COMPILER: "; ".join(against)})


def _is_there(name: str) -> bool:
    if name == RDMA:
        from moe_mk.comm.network.nixl import has_rdma_device  # with the network engine, which few layers use

        return has_rdma_device()
    return not native.reasons_against() if name == COMPILER else bool(LIBRARIES[name].found_as)


def installed_version(name: str) -> str | None:
    """The version of an optional library, or None if it is not installed."""
    for distribution in LIBRARIES[name].distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    if name == COMPILER:
        compiler = native.find_compiler(shutil.which)
        return None if compiler is None else compiler.version
    return "unknown" if _is_there(name) else None


def find(module: str) -> ModuleType:
    """Import an optional library, or a module of one ("matplotlib.figure").

    Raises LibraryMissing with the install line, or with the error of its import.
    """
    name = module.partition(".")[0]
    if name not in LIBRARIES:
        raise LibraryMissing(f"no optional library is called {name!r}{did_you_mean(name, list(LIBRARIES))}")
    try:
        return importlib.import_module((LIBRARIES[name].found_as or name) + module.removeprefix(name))
    except Exception as problem:  # a library built for another machine fails in its own ways
        what = f"{module} ({LIBRARIES[name].purpose}) cannot be imported"
        reason = str(problem) if isinstance(problem, ImportError) else f"{type(problem).__name__}: {problem}"
        raise LibraryMissing(what, [reason, LIBRARIES[name].install]) from problem


def load(name: str, *, allow_emulated: bool, emulation: str = "") -> ModuleType:
    """The library a backend is written for: the real one where it is installed, else its emulation if that is allowed.

    name: a library, or a module of one ("flashinfer.comm"). emulation: the module that imitates it; by default the
    module of the same name in the library's emulation.
    Raises LibraryMissing with the install line, and with the setting that allows the emulation where there is one.
    """
    root = name.partition(".")[0]
    if (library := LIBRARIES.get(root)) and library.emulation and not _is_there(root):
        if allow_emulated:
            return importlib.import_module(emulation or library.emulation + name.removeprefix(root))
        hint = f"{library.install}, or kernel.allow_emulated = true"
        raise LibraryMissing(f"{root} ({library.purpose}) is not installed", [hint])
    return find(name)
