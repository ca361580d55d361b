"""An instruction set is offered only after its answers agreed with the scalar kernels."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest

from moe_mk.kernels.native.library import CExperts, Isa, Native
from moe_mk.kernels.native.selfcheck import checked, is_compiled


def struct_of(reference: object) -> CExperts:
    """What a ctypes.byref() refers to."""
    held = reference._obj  # type: ignore[attr-defined]
    assert isinstance(held, CExperts)
    return held


def test_scalar_is_always_there_and_best_is_last(native: Native) -> None:
    assert native.isas[0] is Isa.SCALAR
    assert native.best is max(native.isas)
    assert set(native.isas) | set(native.refused) == set(Isa)


NEEDS = {
    Isa.SCALAR: (),
    Isa.AVX2: ("avx2", "fma"),
    Isa.AVX512_VNNI: ("avx2", "fma", "f16c", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    Isa.AVX512_BF16: ("avx2", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16", "avx512_vnni"),
    Isa.AMX_BF16: ("avx512vbmi", "avx512_bf16", "avx512_vnni", "gfni", "amx_tile", "amx_bf16"),
}
"""What Linux lists of a processor that has an instruction set."""


def tiles_refused() -> int:
    """0, or the error with which Linux refuses tiles: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(158, 0x1023, 18) else 0


@pytest.mark.parametrize("isa", list(Isa), ids=lambda isa: isa.name)
def test_every_instruction_set_of_the_processor_is_tested(native: Native, isa: Isa) -> None:
    # The tests of this folder skip an instruction set that the kernels do not offer: none that is here may be missing.
    info = Path("/proc/cpuinfo")
    flags = {word for line in info.read_text().splitlines() if line.startswith("flags") for word in line.split()}
    if missing := [name for name in NEEDS[isa] if name not in flags]:
        pytest.skip(f"{isa.name}: this processor has no {', '.join(missing)}")
    if isa is Isa.AMX_BF16 and (error := tiles_refused()):
        pytest.skip(f"{isa.name}: the system does not permit tiles, error {error}")
    assert isa in native.isas, native.refused[isa]


def test_amx_in_software_passes_the_same_check(emulated: Native) -> None:
    assert Isa.AMX_BF16 in emulated.isas


def test_an_instruction_set_with_wrong_answers_is_refused_with_the_figure(emulated: Native) -> None:
    honest = emulated.functions["experts"]

    def liar(call: object) -> int:
        status = honest(call)
        inner = struct_of(call)
        if inner.isa == Isa.AMX_BF16:  # one wrong value in one row
            first = ctypes.cast(inner.out, ctypes.POINTER(ctypes.c_uint16))
            first[0] = 0x4120  # 10.0
        return status

    found = checked(replace(emulated, functions={**emulated.functions, "experts": liar}))
    assert Isa.AMX_BF16 not in found.isas
    assert found.best is not Isa.AMX_BF16
    assert "failed its self-check: FP8, 1 rows, error" in found.refused[Isa.AMX_BF16]


def test_an_instruction_set_that_fails_outright_is_refused(emulated: Native) -> None:
    honest = emulated.functions["experts"]

    def broken(call: object) -> int:
        return 3 if struct_of(call).isa == Isa.AMX_BF16 else honest(call)

    found = checked(replace(emulated, functions={**emulated.functions, "experts": broken}))
    assert "no memory" in found.refused[Isa.AMX_BF16]


def test_what_was_loaded_is_in_the_cache(native: Native) -> None:
    assert is_compiled()
    assert not is_compiled(which=lambda name: None)
