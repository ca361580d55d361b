"""The choice of the instruction set by measured rates, the setting that pins it, and the calls that it reaches."""

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Barrier
from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.config.problem import Problem
from moe_mk.config.shipped import load_config
from moe_mk.errors import UnsupportedError
from moe_mk.experts.cpu_native.experts import CpuNativeExperts
from moe_mk.external.device import profile_here
from moe_mk.kernels.native import instruction_set, library
from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding
from moe_mk.kernels.native.instruction_set import (
    FLOATS,
    ITERATIONS,
    MARGIN,
    Choice,
    Rates,
    choice,
    choose,
    described,
    measure,
    measured,
    not_of_processor,
)
from moe_mk.kernels.native.layer import RowsOfExperts, Stack
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix
from moe_mk.kernels.native.prepared import ExpertsCall, ProductCall, experts_rows
from moe_mk.lab.cli.doctor import findings
from moe_mk.quant.plain import BF16
from tests.kernels.native.layers import Layer, Storage, batch

XEON = Rates(vpdpwssd=5.76, vfmadd231ps=5.50, vdpbf16ps=1.35)
ZEN_4 = Rates(3.70, 3.70, 3.69)
COOPER_LAKE = Rates(6.2, 6.2, 3.1)
BOTH = (Isa.SCALAR, Isa.AVX2, Isa.AVX512_VNNI, Isa.AVX512_BF16)
INTEGER_ROWS = (Rounding.INT8, Rounding.INT8_PARTS)


def of_rates(rates: Rates, format: Format, rounding: Rounding = Rounding.NONE) -> Isa:
    return choose(BOTH, format, rounding, lambda: rates).isa


@pytest.mark.parametrize(("format", "rounding"), [*product(Format, Rounding)], ids=lambda each: each.name)
def test_what_known_processors_take(format: Format, rounding: Rounding) -> None:
    vnni, bf16 = Isa.AVX512_VNNI, Isa.AVX512_BF16
    assert of_rates(ZEN_4, format, rounding) is bf16
    assert of_rates(XEON, format, rounding) is (bf16 if rounding in INTEGER_ROWS else vnni)
    # Half the rate, with twice the products of vfmadd231ps and as many as vpdpwssd.
    integers = format not in (Format.BF16, Format.FP8, Format.MXFP8) and rounding not in INTEGER_ROWS
    assert of_rates(COOPER_LAKE, format, rounding) is (vnni if integers else bf16)


@given(st.sampled_from(Format), st.floats(0.1, 20), st.floats(0.1, 20), st.floats(0.1, 20), st.floats(0.25, 4))
def test_only_a_wide_margin_in_products_counts(
    format: Format, integers: float, floats: float, bf16: float, clock: float
) -> None:
    ratio = floats * 16 / (bf16 * 32) if format in FLOATS else integers / bf16
    rates = Rates(integers, floats, bf16)
    if abs(ratio / MARGIN - 1) > 1e-9:
        assert of_rates(rates, format) is (Isa.AVX512_VNNI if ratio > MARGIN else Isa.AVX512_BF16)
        quick = Rates(integers * clock, floats * clock, bf16 * clock)
        assert of_rates(quick, format) is of_rates(rates, format), "the clock frequency decides nothing"


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("around", [0.999, 1.0, 1.001])
def test_the_margin_itself(format: Format, around: float) -> None:
    rates = Rates(MARGIN * 2 * around, MARGIN * 4 * around, 2.0)
    assert of_rates(rates, format) is (Isa.AVX512_BF16 if around < 1 else Isa.AVX512_VNNI)


@pytest.mark.parametrize(("format", "rounding"), [*product(Format, Rounding)], ids=lambda each: each.name)
def test_nothing_is_measured_where_nothing_is_to_decide(format: Format, rounding: Rounding) -> None:
    def rates() -> Rates:
        raise AssertionError("measured for nothing")

    for usable in [BOTH[:1], BOTH[:2], BOTH[:3], (*BOTH, Isa.AMX_BF16), (Isa.SCALAR, Isa.AVX512_BF16)]:
        assert choose(usable, format, rounding, rates).isa is usable[-1]
    if rounding in INTEGER_ROWS:
        assert choose(BOTH, format, rounding, rates).isa is Isa.AVX512_BF16


def test_the_formats_of_f32_products_are_those_of_the_kernels() -> None:
    source = (Path(library.__file__).parents[1] / "csrc" / "rows_int16.h").read_text()
    body = source[source.index("void multiply_rows(") :]
    floats = body[: body.rindex("multiply_f32<")]
    named = {each.upper() for each in re.findall(r"case k(\w+):", floats)}
    assert named == {format.name.replace("_", "") for format in FLOATS}


def test_rounds_alternate_and_the_best_counts() -> None:
    order: list[tuple[Isa, bool]] = []
    work = ITERATIONS * 16 / 1e9

    def seconds(isa: Isa, floats: bool) -> float:
        order.append((isa, floats))
        slow = 4.0 if len(order) <= 3 else 1.0  # the first round: the processor is not yet at its speed
        return slow * work / {(Isa.AVX512_VNNI, False): 8.0, (Isa.AVX512_VNNI, True): 4.0}.get(order[-1], 2.0)

    found = measure(seconds)
    assert (found.vpdpwssd, found.vfmadd231ps, found.vdpbf16ps) == pytest.approx((8.0, 4.0, 2.0))
    assert order[0:3] == order[3:6] and len(set(order)) == 3


def test_slow_processors_are_measured_in_little_time() -> None:
    spent: list[float] = []

    def seconds(isa: Isa, floats: bool) -> float:
        spent.append(ITERATIONS * 16 / 0.5e9)
        return spent[-1]

    measure(seconds)
    assert sum(spent) < 0.02


def test_a_process_measures_once_however_many_threads_ask(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ready = Barrier(8)

    def peak_rate(iterations: int, threads: int, isa: int, floats: int, done: Any) -> int:
        asked.append(isa)
        sleep(1e-3)
        return 0

    def ask(_: int) -> Rates:
        ready.wait()
        return measured(replace(native, isas=BOTH, functions={"peak_rate": peak_rate}))

    monkeypatch.setattr(instruction_set, "_FOUND", [])
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len(set(map(id, found))) == 1 and len(asked) <= 3 * instruction_set.ROUNDS


@pytest.mark.parametrize("isa", [Isa.SCALAR, Isa.AVX2, Isa.AVX512_VNNI, Isa.AVX512_BF16, Isa.AMX_BF16])
def test_every_instruction_set_has_rates_of_both_products(native: Native, isa: Isa) -> None:
    if isa not in native.isas:
        pytest.skip(native.refused[isa])
    for floats in (0, 1):
        done = ctypes.c_double(0)
        native.call("peak_rate", 1000, 1, int(isa), floats, ctypes.byref(done))
        halved = isa is Isa.AVX512_VNNI and floats
        assert done.value > 0
        assert not halved or done.value == 1000 * 16 * 32


def test_flags_of_the_processor_say_what_the_kernels_find(native: Native) -> None:
    supported = {isa for isa in Isa if native.functions["isa_supported"](int(isa))}
    assert {isa for isa in Isa if not not_of_processor(isa)} == supported


def calls_of(native: Native, w13: PackedMatrix, w2: PackedMatrix, mode: ExpertsMode) -> dict[str, Isa]:
    """The instruction set in the arguments of every kind of call."""
    rows = RowsOfExperts(native, Stack(w13, w2), lambda _: mode, False, True)
    single = replace(w13, layout=replace(w13.layout, gated=False)) if w13.num_slots == 1 else None
    return {
        "experts": Isa(ExpertsCall(native, w13, w2, None, mode)._block.isa),
        "layer": Isa(rows.block(mode).isa),
        **({} if single is None else {"product": Isa(ProductCall(native, single)._block.isa)}),
    }


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("rates", [XEON, ZEN_4, COOPER_LAKE])
def test_the_choice_is_in_the_arguments_of_every_call(native: Native, storage: Storage, rates: Rates) -> None:
    packed, here = Layer(1, 64, 64, storage).pack(native), replace(native, isas=BOTH, rates=rates)
    wanted = of_rates(rates, storage.format)
    assert set(calls_of(here, *packed, ExpertsMode()).values()) == {wanted}
    assert "product" in calls_of(here, *packed, ExpertsMode())


def test_the_format_of_w13_decides_for_the_whole_call(native: Native) -> None:
    here = replace(native, isas=BOTH, rates=COOPER_LAKE)
    floats, integers = Layer(2, 64, 64, Storage.BF16).pack(native), Layer(2, 64, 64, Storage.MXFP4).pack(native)
    shared = Layer(1, 64, 64, Storage.BF16).pack(native)
    for (w13, _), (_, w2) in product((floats, integers), repeat=2):
        wanted = Isa.AVX512_BF16 if w13 is floats[0] else Isa.AVX512_VNNI
        for extra in (None, shared):
            assert ExpertsCall(here, w13, w2, extra, ExpertsMode())._block.isa == wanted


@pytest.mark.parametrize("storage", Storage)
def test_a_pin_changes_the_kernels_that_run(native: Native, storage: Storage) -> None:
    packed, rows = Layer(2, 64, 96, storage).pack(native), batch(9, 64, 2, 2)
    made = {}
    for isa in native.isas:
        pinned = native.configured(own_threads=False, instruction_set=isa.name.lower())
        assert set(calls_of(pinned, *packed, ExpertsMode()).values()) == {isa}
        made[isa] = experts_rows(pinned, *rows, *packed)
        assert torch.equal(made[isa], experts_rows(native, *rows, *packed, isa=isa))
        assert choice(pinned, storage.format) == Choice(isa, "pinned by kernel.instruction_set")
        assert pinned.best is isa, "the router is pinned as well"


def test_an_instruction_set_that_is_not_usable_cannot_be_pinned(native: Native) -> None:
    few = replace(native, isas=(Isa.SCALAR,), refused={Isa.AVX2: "it failed its self-check"})
    with pytest.raises(UnsupportedError, match=r"AVX2 here\n.*failed its self-check\n.*usable: SCALAR"):
        few.configured(own_threads=False, instruction_set="avx2")


@pytest.mark.parametrize("name", ["scalar", "avx2", "avx512_vnni", "avx512_bf16", "amx_bf16", "auto"])
def test_the_oracle_refuses_a_pin_that_the_processor_lacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_set, "processor_has", lambda flag: flag in {"avx2", "fma", "f16c", "avx512_bf16"})
    config = load_config("deepseek_v3").with_(instruction_set=name)
    problem = Problem(config, profile_here(torch.device("cpu")), BF16, 1, frozenset({"c++"}), frozenset())
    reasons = [str(each) for each in CpuNativeExperts.reasons_against(problem)]
    if name in ("scalar", "avx2", "auto"):
        assert not reasons
    else:
        (text,) = reasons
        assert f"kernel.instruction_set = {name}" in text and "lacks avx512f" in text
        assert "usable: scalar, avx2" in text and "kernel.instruction_set = auto" in text


def test_the_rates_that_decided_are_named(native: Native) -> None:
    here = replace(native, isas=BOTH, rates=XEON)
    assert str(choice(here, Format.INT4)) == "AVX512_VNNI: vpdpwssd 5.76 G/s, vdpbf16ps 1.35 G/s"
    text = described(replace(here, rates=COOPER_LAKE))
    assert "BF16, MXFP8: AVX512_BF16: vfmadd231ps 6.20 G/s, vdpbf16ps 3.10 G/s" in text
    assert "AVX512_VNNI: vpdpwssd 6.20 G/s" in text and "INT8 rows: AVX512_BF16: " in text
    assert described(replace(native, isas=BOTH[:2])) == "AVX2: the widest that is usable"


def test_the_doctor_names_the_instruction_set(native: Native) -> None:
    text = findings()["devices"]["cpu kernels"]
    assert f"; {described(native)}" in text
    assert all(isa.name in text and why in text for isa, why in native.refused.items())
    pinned = findings({"instruction_set": "scalar"})["devices"]["cpu kernels"]
    assert "; SCALAR: pinned by kernel.instruction_set" in pinned
