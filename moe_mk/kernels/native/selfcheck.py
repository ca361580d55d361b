"""Load the kernels and let every instruction set prove itself on a tiny layer before it is offered."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from moe_mk.errors import MoEMKError
from moe_mk.kernels.native.build import NO_COMPILER, Progress, Recipe, default_cache_dir, is_ours
from moe_mk.kernels.native.experts import ExpertsMode, experts_rows
from moe_mk.kernels.native.library import Isa, Native, compile_and_open
from moe_mk.kernels.native.packed import Format, MatrixLayout, PackedMatrix, allocate, pack_slot
from moe_mk.kernels.native.toolchain import find_compiler, prebuilt, units

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
    An instruction set whose answers differ is refused with the difference as reason and never used.
    Raises UnsupportedError when there is no compiler, it fails, or the cache belongs to somebody else.
    """
    native = compile_and_open(cache_dir, which, progress, emulate_amx=emulate_amx)
    return checked(native)


@cache
def loaded(cache_dir: Path | None = None) -> Native:
    """The kernels of this process, loaded once per cache directory and checked once."""
    return load(cache_dir)


def reasons_against(cache_dir: Path | None = None, which: Callable[[str], str | None] = shutil.which) -> list[str]:
    """List why load() would fail here, without compiling; empty: it should not."""
    if prebuilt(units()) is not None or find_compiler(which) is not None:
        return []
    return [NO_COMPILER]


def is_compiled(cache_dir: Path | None = None, which: Callable[[str], str | None] = shutil.which) -> bool:
    """Say whether load() would find the library in the wheel or in the cache instead of compiling it."""
    if prebuilt(units()) is not None:
        return True
    compiler = find_compiler(which)
    if compiler is None:
        return False
    recipe = Recipe(compiler, units())
    return is_ours((cache_dir or default_cache_dir()) / f"moe_mk-{recipe.key()}.so")


def checked(native: Native) -> Native:
    """Keep the instruction sets that agree with the scalar kernels; say of the others why not."""
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
    """Compare one instruction set with the scalar kernels on a small layer; None: they agree."""
    for storage in Format:
        w13, w2 = _tiny_weights(native, storage)
        for num_rows in (1, 5, 40):
            x_RH = _pattern(num_rows, _HIDDEN).to(torch.bfloat16)
            ids_RK = torch.arange(num_rows * 2, dtype=torch.int32, device="cpu").view(num_rows, 2).remainder_(_SLOTS)
            weights_RK = torch.full((num_rows, 2), 0.5, dtype=torch.float32, device="cpu")
            for mode in (ExpertsMode(), ExpertsMode(batch_invariant=True)):
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
    dtype = torch.float8_e4m3fn if storage is Format.FP8 else torch.bfloat16
    for slot in range(_SLOTS):
        gate, up = (_pattern(_INTER, _HIDDEN, seed=slot + i).to(dtype) for i in (0, 7))
        down = _pattern(_HIDDEN, _INTER, seed=slot + 3).to(dtype)
        scales = (_pattern(2, 2, seed=slot).abs() + 0.1,) if storage is Format.FP8 else ()
        pack_slot(native, w13, slot, (gate, up), scales * 2)
        pack_slot(native, w2, slot, (down,), scales)
    return w13, w2


def _pattern(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Numbers between -1 and 1 that no generator has to be asked for, small ones (subnormal in e4m3) included."""
    wave = torch.arange(rows * columns, dtype=torch.float32, device="cpu").view(rows, columns)
    return torch.sin(wave * 0.73 + wave * wave * 1e-4 + seed) ** 3
