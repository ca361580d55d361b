"""The instruction set of calls on experts and on one matrix, by the format of the weights and the rounding of rows.

The last usable one is used, except where both AVX-512 ones are: AVX512_BF16 multiplies by `vdpbf16ps`, which some
processors run at a quarter of the rate of the instructions of AVX512_VNNI. Their rates are measured once per process.

    | weights                  | AVX512_VNNI                | AVX512_BF16                |
    |--------------------------|----------------------------|----------------------------|
    | bf16, FP8, MXFP8         | `vfmadd231ps`, 16 products | `vdpbf16ps`, 32 products   |
    | integers, 4-bit floats   | `vpdpwssd`, 32 products    | `vdpbf16ps`, 32 products   |
    | any, rows in INT8        | `vpdpbusd`, the same kernels in both                    |

Instruction sets differ in bits of results, so the choice depends on nothing that differs between calls. Packed weights
are the same for all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from threading import Lock

from moe_mk.kernels.native.build import processor_has
from moe_mk.kernels.native.experts_mode import INT8_PART_FORMATS, Rounding
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.trace.clock import now

MARGIN = 1.3
"""How many times as many products AVX512_VNNI must do a second as AVX512_BF16 to be chosen: so many that the choice is
the same at every start. Rates of processors differ by factors of 1, 2 and 4."""
ITERATIONS, CHAINS = 50_000, 16
"""Of a round of a measurement: 0.14 ms at 5.8 * 10^9 instructions a second."""
ROUNDS, SECONDS = 8, 0.012
"""The most rounds, and the seconds after which no further one begins."""
FLOATS = frozenset({Format.BF16, Format.FP8, Format.MXFP8})
"""Weights that AVX512_VNNI multiplies in f32."""
PROCESSOR_FLAGS: dict[Isa, tuple[str, ...]] = {
    Isa.SCALAR: (),
    Isa.AVX2: ("avx2", "fma", "f16c"),
    Isa.AVX512_VNNI: ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"),
    Isa.AVX512_BF16: ("avx512vbmi", "avx512_bf16"),
    Isa.AMX_BF16: ("amx_tile", "amx_bf16", "gfni"),
}
"""What csrc/dispatch.cpp requires in addition to those before, by the names in /proc/cpuinfo."""


@dataclass(frozen=True)
class Rates:
    """10^9 instructions of 512 bits a second on one core."""

    vpdpwssd: float
    vfmadd231ps: float
    vdpbf16ps: float


@dataclass(frozen=True)
class Choice:
    """An instruction set and why, such as "AVX512_VNNI: vpdpwssd 5.76 G/s, vdpbf16ps 1.35 G/s"."""

    isa: Isa
    because: str

    def __str__(self) -> str:
        return f"{self.isa.name}: {self.because}"


def choose(usable: Sequence[Isa], format: Format, rounding: Rounding, rates: Callable[[], Rates]) -> Choice:
    """Choose for weights of a format (w13's) and the rounding of rows.

    usable: slowest first. rates: called only where they decide.
    """
    best = usable[-1]
    if best is not Isa.AVX512_BF16 or Isa.AVX512_VNNI not in usable:
        return Choice(best, "the widest that is usable")
    if rounding in (Rounding.INT8, Rounding.INT8_PARTS):
        return Choice(best, "INT8 rows have the same kernels in AVX512_VNNI")
    found = rates()
    name, rate, products = ("vfmadd231ps", found.vfmadd231ps, 16)
    if format not in FLOATS:
        name, rate, products = "vpdpwssd", found.vpdpwssd, 32
    faster = rate * products >= MARGIN * found.vdpbf16ps * 32
    because = f"{name} {rate:.2f} G/s, vdpbf16ps {found.vdpbf16ps:.2f} G/s"
    return Choice(Isa.AVX512_VNNI if faster else best, because)


def choice(native: Native, format: Format, rounding: Rounding = Rounding.NONE) -> Choice:
    """The choice of loaded kernels; the pinned instruction set if there is one.

    Raises UnsupportedError for a pinned one that cannot be used here.
    """
    if native.pinned is not None:
        return Choice(native.isa_or_best(native.pinned), "pinned by kernel.instruction_set")
    return choose(native.isas, format, rounding, lambda: native.rates or measured(native))


def isa_of(native: Native, format: Format, rounding: Rounding, isa: Isa | None) -> Isa:
    """The given instruction set, checked, or the chosen one."""
    return choice(native, format, rounding).isa if isa is None else native.isa_or_best(isa)


def described(native: Native) -> str:
    """The choice for every format and rounding, each reason once, for a person."""
    cases = [(each.name, choice(native, each)) for each in Format]
    cases += [("INT8 rows", choice(native, each, Rounding.INT8_PARTS)) for each in sorted(INT8_PART_FORMATS)[:1]]
    by_choice: dict[str, list[str]] = {}
    for name, made in cases:
        by_choice.setdefault(str(made), []).append(name)
    if len(by_choice) == 1:
        return next(iter(by_choice))
    return "; ".join(f"{', '.join(names)}: {made}" for made, names in by_choice.items())


def not_of_processor(isa: Isa) -> list[str]:
    """The flags of this processor that an instruction set lacks; empty if it can be used. Loads no kernels."""
    return [flag for each in Isa if each <= isa for flag in PROCESSOR_FLAGS[each] if not processor_has(flag)]


_FOUND: list[Rates] = []
_MEASURING = Lock()


def measured(native: Native) -> Rates:
    """The rates of this process, measured at the first call; both AVX-512 instruction sets must be usable."""

    def seconds(isa: Isa, floats: bool) -> float:
        start = now()
        native.call("peak_rate", ITERATIONS, 1, int(isa), int(floats), ctypes.byref(ctypes.c_double(0)))
        return now() - start

    with _MEASURING:  # threads that measure at the same time would disturb each other
        if not _FOUND:
            _FOUND.append(measure(seconds))
        return _FOUND[0]


def measure(seconds: Callable[[Isa, bool], float]) -> Rates:
    """The best of short rounds that alternate between the instructions.

    seconds: of ITERATIONS times CHAINS instructions that an instruction set multiplies with, floats or integers.
    """
    loops = ((Isa.AVX512_VNNI, False), (Isa.AVX512_VNNI, True), (Isa.AVX512_BF16, True))
    least, spent = [float("inf")] * len(loops), 0.0
    for _ in range(ROUNDS):
        taken = [seconds(isa, floats) for isa, floats in loops]
        least, spent = [min(pair) for pair in zip(least, taken, strict=True)], spent + sum(taken)
        if spent > SECONDS:
            break
    assert len(least) == len(fields(Rates))
    return Rates(*(ITERATIONS * CHAINS / 1e9 / each for each in least))
