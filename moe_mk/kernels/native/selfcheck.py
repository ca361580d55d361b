"""Load the kernels and check every instruction set on a small layer before it is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from moe_mk.errors import MoEMKError
from moe_mk.kernels.native.build import NO_COMPILER, Progress, Recipe, default_cache_dir, reason_against
from moe_mk.kernels.native.experts import experts_rows
from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding
from moe_mk.kernels.native.layout import Format, MatrixLayout
from moe_mk.kernels.native.library import Isa, Native, compile_and_open
from moe_mk.kernels.native.packed import PackedMatrix, allocate, pack_slot
from moe_mk.kernels.native.toolchain import Compiler, find_compiler, prebuilt_here, units

# Two instruction sets may round h and the output to neighbouring bf16; AMX also rounds code * scale to bf16.
_TOLERANCE = 8e-3
_SLOTS, _HIDDEN, _INTER = 2, 160, 144


def load(
    cache_dir: Path | None = None,
    which: Callable[[str], str | None] = shutil.which,
    progress: Progress | None = None,
    *,
    emulate_amx: bool = False,
) -> Native:
    """Find the kernels in the wheel or the cache, or compile them (first use, some seconds), and check them.

    Every instruction set is compared with the scalar one.

    cache_dir: where compiled libraries are kept, default_cache_dir() if not given. which: how compilers are found.
    An instruction set with other results is rejected, with the difference as the reason, and never used.
    Raises UnsupportedError if there is no compiler, it fails, or the cache belongs to another user.
    """
    native = compile_and_open(cache_dir, which, progress, emulate_amx=emulate_amx)
    return checked(native)


@cache
def loaded(cache_dir: Path | None = None) -> Native:
    """The kernels of this process, loaded once per cache directory and checked once."""
    return load(cache_dir)


def reasons_against(cache_dir: Path | None = None, which: Callable[[str], str | None] = shutil.which) -> list[str]:
    """List reasons why load() would fail, without compiling; empty if it should succeed."""
    if prebuilt_here() is not None or find_compiler(which) is not None:
        return []
    return [NO_COMPILER]


def is_compiled(cache_dir: Path | None = None, which: Callable[[str], str | None] = shutil.which) -> bool:
    """Whether load() would find the library undamaged in the wheel or in the cache instead of compiling it."""
    if prebuilt_here() is not None:
        return True
    compiler = find_compiler(which)
    if compiler is None:
        return False
    return not reason_against((cache_dir or default_cache_dir()) / f"moe_mk-{_key_with(compiler)}.so")


@cache
def _key_with(compiler: Compiler) -> str:
    """The key of this machine's library, computed once; it is needed for every new exchange window."""
    return Recipe(compiler, units()).key()


def checked(native: Native) -> Native:
    """Keep the instruction sets that agree with the scalar kernels; reject the others with a reason."""
    kept, refused = [Isa.SCALAR], dict(native.refused)
    for isa in native.isas:
        if isa is Isa.SCALAR:
            continue
        reason = difference(native, isa)
        if reason is None:
            kept.append(isa)
        else:
            refused[isa] = reason
    return replace(native, isas=tuple(kept), refused=refused)


def difference(native: Native, isa: Isa) -> str | None:
    """Compare one instruction set with the scalar kernels on a small layer; None if they agree."""
    for storage in Format:
        w13, w2 = _tiny_weights(native, storage)
        for num_rows in (1, 5, 40):
            x_RH = _pattern(num_rows, _HIDDEN).to(torch.bfloat16)
            ids_RK = torch.arange(num_rows * 2, dtype=torch.int32, device="cpu").view(num_rows, 2).remainder_(_SLOTS)
            weights_RK = torch.full((num_rows, 2), 0.5, dtype=torch.float32, device="cpu")
            modes = [ExpertsMode(), ExpertsMode(batch_invariant=True)]
            if storage is Format.INT8:
                modes.append(ExpertsMode(quantize=Rounding.INT8))
            for mode in modes:
                try:
                    wanted, got = (
                        experts_rows(native, x_RH, ids_RK, weights_RK, w13, w2, mode=mode, isa=which, threads=2).float()
                        for which in (Isa.SCALAR, isa)
                    )
                except (MoEMKError, MemoryError) as failure:
                    return f"it failed its self-check: {failure}"
                error = ((got - wanted).norm() / wanted.norm()).item()
                if not error < _TOLERANCE:
                    return (
                        f"it failed its self-check: {storage.name}, {num_rows} rows, error {error:.2e} against scalar"
                    )
    return None


def _tiny_weights(native: Native, storage: Format) -> tuple[PackedMatrix, PackedMatrix]:
    w13 = allocate(native, MatrixLayout(_INTER, _HIDDEN, True, storage), _SLOTS)
    w2 = allocate(native, MatrixLayout(_HIDDEN, _INTER, False, storage), _SLOTS)
    for slot in range(_SLOTS):
        for packed, seeds in ((w13, (slot, slot + 7)), (w2, (slot + 3,))):
            sources = tuple(_codes(packed.layout, seed) for seed in seeds)
            scales = () if storage is Format.BF16 else (_scales(packed.layout, slot),) * len(seeds)
            above = (torch.full((1, 1), 0.5, dtype=torch.float32, device="cpu"),) * len(seeds)
            pack_slot(native, packed, slot, sources, scales, above=above)
    return w13, w2


def _codes(layout: MatrixLayout, seed: int) -> torch.Tensor:
    """Codes of all magnitudes of a format."""
    wave = _pattern(*layout.source_shape, seed=seed)
    if layout.format.bits == 4:
        return ((wave + 1) * 127.5).to(torch.uint8)
    return (wave * 127 if layout.format is Format.INT8 else wave).to(layout.format.dtype)


def _scales(layout: MatrixLayout, seed: int) -> torch.Tensor:
    if layout.format.group == 0:
        shrink = 1 / 127 if layout.format is Format.INT8 else 1.0
        return (_pattern(2, 2, seed=seed).abs() + 0.1) * shrink
    wave = _pattern(layout.num_outputs, -(-layout.num_inputs // layout.format.group), seed=seed)
    if layout.format is Format.NVFP4:
        return (wave.abs() * 0.3 + 0.02).to(layout.format.scale_dtype)
    return (wave * 2 + 122).to(torch.uint8).view(layout.format.scale_dtype)


def _pattern(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Deterministic numbers between -1 and 1, including small ones (subnormal in e4m3)."""
    wave = torch.arange(rows * columns, dtype=torch.float32, device="cpu").view(rows, columns)
    return torch.sin(wave * 0.73 + wave * wave * 1e-4 + seed) ** 3
