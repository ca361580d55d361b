"""Load the kernels and check every instruction set on a small layer before it is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.kernels.native.build import NO_COMPILER, Progress, Recipe, reason_against, usable_library
from moe_mk.kernels.native.experts_mode import INT8_PART_FORMATS, ExpertsMode, Rounding
from moe_mk.kernels.native.layout import BlockType, Format, MatrixLayout, PartScales
from moe_mk.kernels.native.library import Isa, Native, compile_and_open
from moe_mk.kernels.native.packed import PackedMatrix, allocate, pack_slot
from moe_mk.kernels.native.prepared import experts_rows
from moe_mk.kernels.native.toolchain import Compiler, find_compiler, prebuilt_here, units

# Two instruction sets may round h and the output to neighbouring bf16.
_TOLERANCE = 8e-3
_SLOTS, _HIDDEN, _INTER = 2, 160, 144
_PARTS = (
    PartScales(32, torch.float16),
    PartScales(64, torch.bfloat16, biases=True),
    PartScales(128, torch.bfloat16, zeros=True),
)


def load(
    cache_dir: Path | None = None,
    which: Callable[[str], str | None] = shutil.which,
    progress: Progress | None = None,
    *,
    emulate_amx: bool = False,
    tiles_only: bool = False,
) -> Native:
    """Find the kernels in the wheel or the cache, or compile them (first use, some seconds), and check them.

    Every instruction set is compared with the scalar one.

    cache_dir: where compiled libraries are kept; None: as in `build.usable_library`. which: how compilers are found.
    emulate_amx, tiles_only: as in `toolchain.units`, for tests.
    An instruction set with other results is rejected, with the difference as the reason, and never used.
    Raises UnsupportedError if there is no compiler, it fails, or the cache belongs to another user.
    """
    native = compile_and_open(cache_dir, which, progress, emulate_amx=emulate_amx, tiles_only=tiles_only)
    return checked(native)


@cache
def loaded(cache_dir: Path | None = None) -> Native:
    """The kernels of this process, loaded once per cache directory and checked once."""
    return load(cache_dir)


def reasons_against(cache_dir: Path | None = None, which: Callable[[str], str | None] = shutil.which) -> list[str]:
    """List reasons why load() would fail; empty if it should succeed.

    The kernels are not compiled for it; where they are in no cache, an empty source is, once per process.
    """
    library, against = _search(cache_dir, which)
    return list(against) if library is None else []


def is_compiled(cache_dir: Path | None = None, which: Callable[[str], str | None] = shutil.which) -> bool:
    """Whether load() would find the library undamaged in the wheel or in the cache instead of compiling it."""
    library, _ = _search(cache_dir, which)
    return library is not None and (library == prebuilt_here() or not reason_against(library))


def _search(cache_dir: Path | None, which: Callable[[str], str | None]) -> tuple[Path | None, tuple[str, ...]]:
    """The library of the wheel, else that of the cache, which may not exist yet; None with reasons without any."""
    if (library := prebuilt_here()) is not None:
        return library, ()
    compiler = find_compiler(which)
    return (None, (NO_COMPILER,)) if compiler is None else usable_library(_recipe_with(compiler), cache_dir)


@cache
def _recipe_with(compiler: Compiler) -> Recipe:
    """The recipe of this machine's library, made once; it is needed for every new exchange window."""
    return Recipe(compiler, units())


def checked(native: Native) -> Native:
    """Keep the instruction sets that agree with the scalar kernels; reject the others with a reason."""
    kept, refused = [Isa.SCALAR], dict(native.refused)
    others = [isa for isa in native.isas if isa is not Isa.SCALAR]
    cases = list(_cases(native)) if others else []
    for isa in others:
        reason = difference(native, isa, cases)
        if reason is None:
            kept.append(isa)
        else:
            refused[isa] = reason
    return replace(native, isas=tuple(kept), refused=refused)


class Case(NamedTuple):
    """A call of the self-check, with what the scalar kernels return."""

    w13: PackedMatrix
    w2: PackedMatrix
    x_RH: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    quantize: Rounding
    wanted_RH: Tensor
    """f32."""


def difference(native: Native, isa: Isa, cases: Iterable[Case] | None = None) -> str | None:
    """Compare one instruction set with the scalar kernels on a small layer; None if they agree.

    cases: what to compare; None: all of them, computed here.
    """
    for case in _cases(native) if cases is None else cases:
        modes = [ExpertsMode(quantize=case.quantize)]
        if case.quantize is Rounding.NONE:
            modes.append(ExpertsMode(batch_invariant=True))
        for mode in modes:
            try:
                got = _run(native, case, mode, isa)
            except (MoEMKError, MemoryError) as failure:
                return f"it failed its self-check: {failure}"
            error = ((got - case.wanted_RH).norm() / case.wanted_RH.norm()).item()
            if not error < _TOLERANCE:
                what = f"{case.w13.layout.format.name}, {len(case.x_RH)} rows"
                return f"it failed its self-check: {what}, error {error:.2e} against scalar"
    return None


def _cases(native: Native) -> Iterator[Case]:
    """All calls. The scalar kernels compute each once: their results depend neither on the batch nor on who asks."""
    for layouts in _layouts():
        w13, w2 = _tiny_weights(native, layouts)
        storage, hidden = layouts[0].format, layouts[0].num_inputs
        for num_rows in (1, 5, 40):
            x_RH = _pattern(num_rows, hidden).to(torch.bfloat16)
            ids_RK = torch.arange(num_rows * 2, dtype=torch.int32, device="cpu").view(num_rows, 2).remainder_(_SLOTS)
            weights_RK = torch.full((num_rows, 2), 0.5, dtype=torch.float32, device="cpu")
            for quantize in _roundings(storage):
                case = Case(w13, w2, x_RH, ids_RK, weights_RK, quantize, x_RH)
                yield case._replace(wanted_RH=_run(native, case, ExpertsMode(quantize=quantize), Isa.SCALAR))


def _roundings(storage: Format) -> tuple[Rounding, ...]:
    if storage is Format.INT8:
        return Rounding.NONE, Rounding.INT8
    return (Rounding.NONE, Rounding.INT8_PARTS) if storage in INT8_PART_FORMATS else (Rounding.NONE,)


def _run(native: Native, case: Case, mode: ExpertsMode, isa: Isa) -> Tensor:
    return experts_rows(
        native, case.x_RH, case.ids_RK, case.weights_RK, case.w13, case.w2, mode=mode, isa=isa, threads=1
    ).float()


def _layouts() -> list[tuple[MatrixLayout, MatrixLayout]]:
    pairs = []
    for storage in Format:
        if storage in (Format.INT4, Format.INT8_GROUPS):
            for parts in _PARTS:
                first = MatrixLayout(_INTER, _HIDDEN, True, storage, parts=parts)
                pairs.append((first, MatrixLayout(_HIDDEN, _INTER, False, storage, parts=parts)))
        elif not storage.has_parts:
            first = MatrixLayout(_INTER, _HIDDEN, True, storage)
            pairs.append((first, MatrixLayout(_HIDDEN, _INTER, False, storage)))
    for kind in (BlockType.Q5_1, BlockType.Q4_K, BlockType.Q5_K, BlockType.Q6_K):
        pairs.append((MatrixLayout.of_blocks(256, 256, True, kind), MatrixLayout.of_blocks(256, 256, False, kind)))
    return pairs


def _tiny_weights(native: Native, layouts: tuple[MatrixLayout, MatrixLayout]) -> tuple[PackedMatrix, PackedMatrix]:
    w13, w2 = (allocate(native, layout, _SLOTS) for layout in layouts)
    for slot in range(_SLOTS):
        for packed, seeds in ((w13, (slot, slot + 7)), (w2, (slot + 3,))):
            layout = packed.layout
            sources = tuple(_codes(layout, seed) for seed in seeds)
            scales = () if layout.format is Format.BF16 else (_scales(layout, slot),) * len(seeds)
            above = (torch.full((1, 1), 0.5, dtype=torch.float32, device="cpu"),) * len(seeds)
            offset = layout.parts is not None and (layout.parts.zeros or layout.parts.biases)
            zeros = (_zeros(layout),) * len(seeds) if offset else ()
            pack_slot(native, packed, slot, sources, scales, above=above, zeros=zeros)
    return w13, w2


def _codes(layout: MatrixLayout, seed: int) -> torch.Tensor:
    wave = _pattern(*layout.source_shape, seed=seed)
    if layout.block_type is not None:
        return _blocks((wave + 1) * 127.5, layout.block_type)
    if layout.format.bits == 4 or layout.format is Format.INT8_GROUPS:
        return ((wave + 1) * 127.5).to(torch.uint8)
    return (wave * 127 if layout.format is Format.INT8 else wave).to(layout.format.dtype)


def _blocks(octets: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Blocks of any codes and scales of groups, whose f16 scales are of a size that keeps a layer's output finite."""
    blocks = octets.to(torch.uint8).view(octets.shape[0], -1, kind.num_bytes)
    small = torch.tensor([2e-4, 3e-4], dtype=torch.float16, device="cpu").view(torch.uint8)
    if kind is BlockType.Q6_K:
        blocks[..., 208:] = small[:2]
    else:
        blocks[..., :4] = small
    return blocks.view(octets.shape)


def _zeros(layout: MatrixLayout) -> torch.Tensor:
    assert layout.parts is not None
    if layout.parts.biases:
        return -_scales(layout, 5) * 2.0 ** (layout.format.bits - 1)
    shape, top = (layout.num_outputs, layout.parts.of_row(layout.num_inputs)), 2**layout.format.bits
    return (
        torch.arange(shape[0] * shape[1], dtype=torch.int32, device="cpu").view(shape).remainder_(top).to(torch.uint8)
    )


def _scales(layout: MatrixLayout, seed: int) -> torch.Tensor:
    if layout.parts is not None:
        wave = _pattern(layout.num_outputs, layout.parts.of_row(layout.num_inputs), seed=seed)
        return ((wave.abs() + 0.1) * 2.0**-layout.format.bits).to(layout.parts.dtype)
    if layout.format.group == 0:
        shrink = 1 / 127 if layout.format is Format.INT8 else 1.0
        return (_pattern(2, 2, seed=seed).abs() + 0.1) * shrink
    wave = _pattern(layout.num_outputs, -(-layout.num_inputs // layout.format.group), seed=seed)
    if layout.format.scale_dtype is torch.float8_e4m3fn:
        return (wave.abs() * 0.3 + 0.02).to(layout.format.scale_dtype)
    return (wave * 2 + 122).to(torch.uint8).view(layout.format.scale_dtype)


def _pattern(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Deterministic numbers between -1 and 1, including small ones (subnormal in e4m3)."""
    wave = torch.arange(rows * columns, dtype=torch.float32, device="cpu").view(rows, columns)
    return torch.sin(wave * 0.73 + wave * wave * 1e-4 + seed) ** 3
