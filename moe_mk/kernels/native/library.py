"""The compiled kernels as a Python object: C structures, function signatures, status codes.

Calls go through ctypes, which releases the GIL; the library is re-entrant and can be used after fork.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from moe_mk.errors import ShapeError, UnsupportedError, unless_signalled
from moe_mk.kernels.native.build import NO_COMPILER, OnUnit, Progress, Recipe, build, usable_library
from moe_mk.kernels.native.exchange_abi import SIGNATURES as EXCHANGE_SIGNATURES
from moe_mk.kernels.native.threads import Runtime, engine_runtime
from moe_mk.kernels.native.toolchain import damage, find_compiler, prebuilt, units

if TYPE_CHECKING:
    from moe_mk.kernels.native.instruction_set import Rates

ABI_VERSION = 20


class Isa(IntEnum):
    """The supported instruction sets, slowest first."""

    SCALAR = 0
    AVX2 = 1
    AVX512_VNNI = 2
    AVX512_BF16 = 3
    AMX_BF16 = 4


class Status(IntEnum):
    """The status returned by a kernel."""

    OK = 0
    BAD_ID = 1
    BAD_SHAPE = 2
    NO_MEMORY = 3
    NO_ISA = 4
    LATE = 5
    PEER_FAULT = 6


class CMatrix(ctypes.Structure):
    """C structure `MoeMkMatrix` of csrc/abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("row_of", "data", "scales", "output_scales", "bias")),
        *((name, c_int64) for name in ("slot_bytes", "slot_scales", "slot_output_scales", "slot_bias")),
        *((name, c_int32) for name in ("format", "num_outputs", "num_inputs", "block")),
        ("zeros", c_void_p),
        ("slot_zeros", c_int64),
        *((name, c_int32) for name in ("scale_type", "group", "biased")),
    )


class CExperts(ctypes.Structure):
    """C structure `MoeMkExperts` of csrc/abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "x_scales", "ids", "weights", "out")),
        *((name, c_int64) for name in ("num_rows", "x_stride", "x_scale_stride", "out_stride")),
        *((name, c_int32) for name in ("top_k", "num_slots")),
        *((name, CMatrix) for name in ("w13", "w2")),
        *((name, c_int32) for name in ("gated", "activation")),
        *((name, c_float) for name in ("alpha", "limit")),
        *((name, c_int32) for name in ("quantize", "batch_invariant", "out_f32", "threads", "isa")),
        *((name, CMatrix) for name in ("shared_w13", "shared_w2")),
        *((name, c_int32) for name in ("panel_rows", "task_pairs", "prefetch_bytes", "gather_kib")),
        *((name, c_int32) for name in ("streamed_rows", "tile_rows")),
    )


class CRoute(ctypes.Structure):
    """C structure `MoeMkRoute` of csrc/abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "gate", "bias", "ids", "weights", "logits")),
        *((name, c_int64) for name in ("num_tokens", "x_stride", "gate_stride")),
        *((name, c_int32) for name in ("hidden", "num_experts", "top_k", "num_groups", "top_groups")),
        *((name, c_int32) for name in ("scoring", "renormalize", "gate_f32")),
        ("scale", c_float),
        *((name, c_int32) for name in ("threads", "isa")),
    )


_SIGNATURES: Mapping[str, tuple[type | None, tuple[object, ...]]] = {
    "abi_version": (c_int32, ()),
    "isa_supported": (c_int32, (c_int32,)),
    "pack": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int32, POINTER(c_int64))),
    "unpack": (c_int32, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32)),
    "pack_blocks": (
        c_int32,
        (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_int32, POINTER(c_int64)),
    ),
    "unpack_blocks": (c_int32, (*(c_void_p,) * 4, c_int64, c_int64, c_int64, c_int32, c_int32)),
    "experts": (c_int32, (POINTER(CExperts),)),
    "product": (c_int32, (POINTER(CExperts), c_void_p, c_int64, c_void_p, c_int32)),
    "sum_terms": (c_int32, (*(c_void_p,) * 3, c_int64, c_int32, c_int64, c_int64, c_void_p, *(c_int32,) * 3)),
    "route": (c_int32, (POINTER(CRoute),)),
    "quantize": (
        c_int32,
        (c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_int32, c_int32),
    ),
    "advise_huge": (c_int32, (c_void_p, c_int64)),
    "read_rate": (c_int32, (c_void_p, c_int64, c_int32, c_int32, c_int32, POINTER(c_uint64))),
    "peak_rate": (c_int32, (c_int64, c_int32, c_int32, c_int32, POINTER(c_double))),
    "use_openmp": (None, (c_void_p,) * 5),
    "pool_calls": (c_int64, (c_int32,)),
    "scratch_bytes": (c_int64, ()),
    "release_scratch": (None, ()),
    **EXCHANGE_SIGNATURES,
}


@dataclass(frozen=True)
class Native:
    """The loaded kernels: usable instruction sets, and reasons against the others."""

    path: Path
    functions: Mapping[str, Callable[..., int]]
    isas: tuple[Isa, ...]
    refused: Mapping[Isa, str]
    own_threads: bool = False
    """Whether calls use threads of the kernels where they could use those of torch."""
    pinned: Isa | None = None
    """The instruction set of all calls; None: chosen by `instruction_set`."""
    rates: Rates | None = None
    """The rates that the choice depends on; None: measured once per process."""

    def threads(self, count: int) -> int:
        """A number of threads as the kernels read it."""
        return -count if self.own_threads else count

    def configured(self, *, own_threads: bool, instruction_set: str = "auto") -> Native:
        """These kernels with settings of `KernelConfig`; UnsupportedError for an instruction set that is not usable."""
        pinned = None if instruction_set == "auto" else self.isa_or_best(Isa[instruction_set.upper()])
        return replace(self, own_threads=own_threads, pinned=pinned)

    @property
    def best(self) -> Isa:
        """The pinned instruction set, or the last that passed its self-check. That of experts: `instruction_set`."""
        return self.isas[-1] if self.pinned is None else self.pinned

    def isa_or_best(self, isa: Isa | None) -> Isa:
        """Return the given instruction set, or the best one; UnsupportedError if it cannot be used on this machine."""
        isa = self.best if isa is None else isa
        if isa not in self.isas:
            usable = ", ".join(i.name for i in self.isas)
            raise UnsupportedError(
                f"the CPU kernels cannot use {isa.name} here", [self.refused.get(isa, "unknown"), f"usable: {usable}"]
            )
        return isa

    def call(self, name: str, *arguments: object) -> None:
        """Call one kernel and turn its status into a typed error."""
        status = self.functions[name](*arguments)
        if status != Status.OK:
            self.check(name, status)

    def check(self, name: str, status: int) -> None:
        """Raise the typed error of a status that is not OK."""
        if status == Status.NO_MEMORY:
            raise MemoryError(f"{name}: no memory for the kernel's scratch; fewer rows at a time need less")
        if status == Status.BAD_ID:
            raise ShapeError(f"{name}: an id is neither -1 nor a local slot; map global ids to local ones first")
        if status == Status.NO_ISA:
            raise UnsupportedError(f"{name}: this instruction set is not on this machine")
        raise ShapeError(f"{name}: sizes do not fit together (status {status})")


def open_library(path: Path) -> dict[str, Callable[..., int]]:
    """Load a compiled library and give its functions their signatures.

    Raises UnsupportedError if the file has another interface version.
    """
    functions: dict[str, Callable[..., int]] = {}
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"moe_mk_{name}")
            function.restype, function.argtypes = result, arguments
            functions[name] = function
    except unless_signalled(OSError, AttributeError) as error:  # no library, or one without a function
        raise UnsupportedError(
            f"the compiled kernels {path} cannot be loaded", [str(error), "delete the file"]
        ) from error
    version = functions["abi_version"]()
    if version != ABI_VERSION:
        raise UnsupportedError(f"the compiled kernels {path} speak interface {version}, not {ABI_VERSION}")
    if isinstance(runtime := engine_runtime(), Runtime):
        functions["use_openmp"](*runtime.functions)
    return functions


def compile_and_open(
    cache_dir: Path | None = None,
    which: Callable[[str], str | None] = shutil.which,
    progress: Progress | None = None,
    *,
    on_unit: OnUnit | None = None,
    emulate_amx: bool = False,
    tiles_only: bool = False,
) -> Native:
    """Open the kernels of the wheel or the cache, or compile them; the instruction sets are not self-checked.

    on_unit: called after each source with the numbers of compiled and of all sources. emulate_amx, tiles_only: as in
    `units`. Raises UnsupportedError if there is no compiler, it fails, or the cache belongs to another user.
    """
    listed = units(emulate_amx=emulate_amx, tiles_only=tiles_only)
    functions, path, refused = _open_prebuilt(prebuilt(listed), progress)
    if functions is None:
        compiler = find_compiler(which)
        if compiler is None:
            raise UnsupportedError("the native CPU kernels cannot be built", [NO_COMPILER, *refused])
        recipe = Recipe(compiler, listed)
        library, against = usable_library(recipe, cache_dir)
        if library is None:
            raise UnsupportedError("the native CPU kernels cannot be built", [*against, *refused])
        path = build(recipe, library.parent, progress, on_unit)
        functions = open_library(path)
    isas = tuple(isa for isa in Isa if functions["isa_supported"](int(isa)))
    absent = {isa: "this processor or its operating system does not offer it" for isa in Isa if isa not in isas}
    return Native(path, functions, isas, absent)


def _open_prebuilt(
    path: Path | None, progress: Progress | None
) -> tuple[dict[str, Callable[..., int]] | None, Path, list[str]]:
    """The wheel's library and its path; None and reasons if it is damaged or cannot be loaded."""
    if path is None:
        return None, Path(), []
    if problem := damage(path):
        refused = f"the compiled kernels {path} of the wheel are damaged: {problem}; reinstall moe-mk"
    else:
        try:
            return open_library(path), path, []
        except UnsupportedError as error:
            refused = f"the kernels of the wheel do not load here: {'; '.join(error.reasons) or error.what}"
    if progress is not None:
        progress(f"compiling, because {refused}")
    return None, Path(), [refused]


def release(native: Native) -> None:
    """Free the scratch memory of all idle thread pools, which is kept for later calls."""
    native.functions["release_scratch"]()
