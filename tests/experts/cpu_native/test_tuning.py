"""Tuning of the native CPU experts: what is tried, files read back and used, and the same bits whatever is chosen."""

import gc
import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from moe_mk.config import tuned as tuned_files
from moe_mk.config.tuned import Case, Point, Tuned, tuned_path
from moe_mk.errors import ConfigError
from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.experts.cpu_native import experts as cpu_native_experts
from moe_mk.experts.cpu_native import tuning as cpu_native_tuning
from moe_mk.experts.cpu_native.experts import CpuNativeExperts
from moe_mk.experts.cpu_native.tuning import (
    BUILT_IN,
    INTEGER_TILES,
    PANELS,
    STREAMED,
    CutOver,
    Measured,
    candidates,
    cut_over_of,
    load_tuned,
    measured,
    tuning_of,
)
from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding, Tuning
from moe_mk.kernels.native.instruction_set import Rates
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.library import Isa
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.tuning import TuneCase, TunedPoint, TuneResult, save_measured, session, tune
from moe_mk.quant.fp8 import FP8_128x128
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import GroupedTokens, RowTokens
from tests.cli.conftest import printed
from tests.layer.native import NEEDS_COMPILER

SLOTS, HIDDEN, INNER, TOP_K = 4, 256, 128, 2
CONTEXT = ExpertsContext(BF16, BF16, "silu", SLOTS, HIDDEN, INNER, torch.device("cpu"))
CASE = TuneCase("cpu_native", HIDDEN, INNER, SLOTS, TOP_K, BF16, BF16, FP8_128x128)
UNTUNED = Tuned((), BUILT_IN)
NARROW, WIDE = Tuning(panel_rows=1, task_pairs=2), Tuning(prefetch_bytes=640, gather_kib=128)
compiled = NEEDS_COMPILER


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tuned files are read from, empty; a processor called "A B"."""
    monkeypatch.setattr(tuned_files, "config_folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_native_tuning, "processor", lambda: "A B")
    tuned_files._log_missing.cache_clear()
    return tmp_path / "tuned"


def saved(top_k: int, *points: TunedPoint, scheme: QuantScheme = FP8_128x128) -> Path:
    path = tuned_path("A B", "cpu_native", Case(HIDDEN, INNER, SLOTS, scheme.name, BF16.name).name(top_k))
    save_measured(path, points, {})
    return path


def parameters(tuning: Tuning) -> dict[str, int | bool | str]:
    return dict(asdict(tuning))


def rows(count: int) -> RowTokens:
    draw = torch.Generator("cpu").manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=draw).bfloat16()
    ids = torch.rand(count, SLOTS, generator=draw).argsort(1)[:, :TOP_K].to(torch.int32)
    return RowTokens(QuantTensor(x, None, BF16), ids, torch.rand(count, TOP_K, generator=draw), SLOTS)


@pytest.mark.parametrize("amx", [False, True])
def test_what_is_tried_is_legal_different_and_begins_with_the_built_in(
    monkeypatch: pytest.MonkeyPatch, amx: bool
) -> None:
    monkeypatch.setattr(cpu_native_tuning, "_has_amx", lambda: amx)
    for tokens in (1, 2, 4, 16, 4096):
        tried = candidates(CONTEXT, tokens)
        assert tried[0] == {} and len({tuning_of(each) for each in tried}) == len(tried)
    few, many = (
        {name for one in candidates(CONTEXT, tokens) for name in one} for tokens in (1, 4096)
    )  # 4 slots, 4 experts a token: 1 and 4096 rows an expert
    assert few == {"prefetch_bytes", "task_pairs", *([] if amx else ["panel_rows"])}
    assert many == {"gather_kib", "task_pairs", *(["streamed_rows"] if amx else [])}


@pytest.mark.parametrize(
    ("wrong", "stated"),
    [
        ({"panel_rows": 6}, "panel_rows 6 is neither 0 .* nor from 1 to 5"),
        ({"task_pairs": 17, "gather_kib": 127}, "task_pairs 17 is .* from 1 to 16; gather_kib 127 is .* 128 to 4096"),
        ({"prefetch_bytes": -64}, "prefetch_bytes -64 is neither"),
        ({"task_pairs": True}, "task_pairs True is neither"),
        ({"panel_rows": "4"}, "panel_rows '4' is neither"),
        (
            {"colour": 1},
            "not parameters of cpu_native, which has panel_rows, task_pairs, prefetch_bytes, gather_kib, streamed_rows",
        ),
    ],
)
def test_parameters_that_the_kernels_do_not_have_are_refused(wrong: dict[str, int], stated: str) -> None:
    with pytest.raises(ConfigError, match=stated):
        tuning_of(wrong)


def test_a_missing_file_is_one_line_with_a_command_that_writes_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "moe_mk"):
        assert [load_tuned(CONTEXT, FP8_128x128, TOP_K) for _ in range(3)] == [UNTUNED] * 3
    (stated,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in stated
    command = stated.partition("To measure: moe-mk ")[2].split()
    done = printed(*command, "--tuned-dir", folder, "--dry-run")
    assert Path(json.loads(done)["path"]).name in stated


def processor(cut_over: CutOver, crossing: int, gain: float = 0.5) -> Callable[[int, Tuning], float]:
    """A processor on which the second kernel takes 1 - gain of the time from `crossing` rows on, and 1 + gain below."""

    def seconds(rows: int, tuning: Tuning) -> float:
        is_second = tuning == cut_over.at(rows)
        assert is_second or tuning == cut_over.at(rows + 1)
        return 1.0 if not is_second else 1 - gain if rows >= crossing else 1 + gain

    return seconds


def measured_anew(cut_over: CutOver, crossing: int, gain: float = 0.5) -> Measured:
    """On such a processor, in a case of its own."""
    case = f"{cut_over.parameter} {cut_over.built_in} {crossing} {gain}"
    return measured(case, cut_over, processor(cut_over, crossing, gain))


@pytest.mark.parametrize("cut_over", [PANELS, STREAMED, INTEGER_TILES], ids=lambda each: each.parameter)
def test_a_cut_over_is_the_fewest_rows_from_which_the_second_kernel_is_faster(cut_over: CutOver) -> None:
    for crossing in cut_over.rows:
        found = measured_anew(cut_over, crossing)
        assert found.rows == crossing
        assert found.tuning == (Tuning() if crossing == cut_over.built_in else cut_over.at(crossing))
        assert f"from {crossing} rows per expert" in str(found)


@pytest.mark.parametrize("cut_over", [PANELS, STREAMED, INTEGER_TILES], ids=lambda each: each.parameter)
def test_gains_below_the_margin_keep_the_built_in_cut_over(cut_over: CutOver) -> None:
    for crossing in (1, *cut_over.rows, 1000):
        assert measured_anew(cut_over, crossing, gain=0.01).tuning == Tuning(), crossing


def test_a_built_in_cut_over_between_two_measured_numbers_of_rows_is_kept() -> None:
    # Measured at 64, 128 and 200 rows. The second kernel that is faster at 128 becomes so at some number from 65 on.
    between = replace(STREAMED, built_in=100, rows=(64, 128, 200))
    found = {crossing: measured_anew(between, crossing).rows for crossing in (64, 128, 200, 201)}
    assert found == {64: 64, 128: 100, 200: 200, 201: 201}


def test_a_second_kernel_that_is_never_faster_is_not_used_where_it_was_measured() -> None:
    assert measured_anew(PANELS, 1000).tuning == Tuning()  # the built-in cut-over is above all of them
    of_bf16 = cut_over_of(Isa.AVX512_BF16, Format.BF16, ExpertsMode())
    assert of_bf16 is not None and of_bf16.built_in == 1
    assert measured_anew(of_bf16, 1000).tuning == Tuning(panel_rows=5)
    assert measured_anew(STREAMED, 1000).tuning.streamed_rows == 129
    assert measured_anew(INTEGER_TILES, 1000).tuning.tile_rows == 18


def test_a_case_is_measured_once() -> None:
    calls: list[int] = []
    seconds = processor(PANELS, 3, gain=0.4)

    def counted(rows: int, tuning: Tuning) -> float:
        calls.append(rows)
        return seconds(rows, tuning)

    first, clock = measured("once", PANELS, counted), weakref.ref(counted)
    del counted
    gc.collect()
    assert calls and measured("once", PANELS, processor(PANELS, 1)) is first
    assert clock() is None, "a clock holds the weights that it reads"


def test_a_cut_over_never_separates_kernels_with_different_bits() -> None:
    plain, integers, fp8 = ExpertsMode(), ExpertsMode(quantize=Rounding.INT8), ExpertsMode(quantize=Rounding.FP8)
    assert cut_over_of(Isa.AVX512_BF16, Format.FP8, plain) is cut_over_of(Isa.AVX512_BF16, Format.FP8, fp8) is PANELS
    assert cut_over_of(Isa.AVX512_BF16, Format.MXFP4, plain) is None  # scales enter the sum at another point
    assert cut_over_of(Isa.AVX512_BF16, Format.INT8, integers) is None
    assert cut_over_of(Isa.AMX_BF16, Format.MXFP4, fp8) is STREAMED
    assert cut_over_of(Isa.AMX_BF16, Format.INT8, integers) is INTEGER_TILES
    for isa in (Isa.AVX2, Isa.AVX512_VNNI):
        assert all(cut_over_of(isa, format, plain) is PANELS for format in (Format.FP8, Format.BF16, Format.MXFP4))
        assert cut_over_of(isa, Format.Q5_K, plain) is cut_over_of(isa, Format.Q6_K, plain) is None
        assert cut_over_of(isa, Format.INT8, integers) is None
    assert cut_over_of(Isa.SCALAR, Format.FP8, plain) is None


def test_with_amx_the_tiles_of_integers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_native_tuning, "_has_amx", lambda: True)
    integers = replace(CONTEXT, compute=INT8_TOKEN)
    assert all("tile_rows" in {name for one in candidates(integers, count) for name in one} for count in (1, 4096))


@compiled
@pytest.mark.parametrize("bound", [0, 1 << 40])
def test_experts_that_leave_the_caches_are_measured_at_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    stack, built_in = random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, torch.device("cpu")), CpuNativeExperts(CONTEXT)
    wanted = {count: built_in.run(rows(count), built_in.relayout(stack)).y for count in (1, 7, 32)}
    assert built_in.parameters().startswith("built in; ")
    monkeypatch.setattr(cpu_native_experts.tunings, "MEASURED_BYTES", bound)
    experts = CpuNativeExperts(CONTEXT)
    weights = experts.relayout(stack)
    assert experts.choice is not None
    can_move = cut_over_of(experts.choice.isa, Format.FP8, experts.mode) is not None
    assert experts.parameters().startswith("measured at load: from " if can_move and not bound else "built in")
    for count, y in wanted.items():
        assert torch.equal(experts.run(rows(count), weights).y, y)


@compiled
def test_a_cut_over_is_that_of_the_instruction_set_in_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """INT4: registers and panels of AVX512_VNNI have the same bits, those of AVX512_BF16 have not."""
    stack = random_experts(GROUPED["int4_g32"], SLOTS, HIDDEN, INNER, torch.device("cpu"))
    monkeypatch.setattr(cpu_native_experts.tunings, "MEASURED_BYTES", 0)
    cases: list[str] = []
    monkeypatch.setattr(
        cpu_native_experts.tunings, "measured", lambda case, *rest: cases.append(case) or Measured(PANELS, 5, ())
    )
    for rates in (Rates(5.76, 5.50, 1.35), Rates(3.7, 3.7, 3.7)):
        experts = CpuNativeExperts(CONTEXT)
        isas = (Isa.SCALAR, Isa.AVX2, Isa.AVX512_VNNI, Isa.AVX512_BF16)
        experts.native = replace(experts.native, isas=isas, rates=rates)
        experts.relayout(stack)
    assert len(cases) == 1 and " AVX512_VNNI " in cases[0]


@compiled
def test_a_tuned_file_is_used_in_its_range_and_changes_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, used = random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, torch.device("cpu")), []
    built_in = CpuNativeExperts(CONTEXT)
    weights = built_in.relayout(stack)
    wanted = {count: built_in.run(rows(count), weights).y for count in (1, 7, 32, 33)}
    saved(TOP_K, TunedPoint(2, parameters(NARROW), 5.0), TunedPoint(32, parameters(WIDE), 50.0))
    experts, inner = CpuNativeExperts(CONTEXT), CpuNativeExperts._mode
    experts.relayout(stack)
    assert experts.parameters().startswith("as measured by moe-mk tune at 2 numbers of rows; ")
    held, fixed = experts.tuned, experts.tuned_with(parameters(NARROW))
    assert held is experts.tuned != fixed.tuned == Tuned.fixed(NARROW), "a choice is made for a copy"
    monkeypatch.setattr(CpuNativeExperts, "_mode", lambda *a: used.append(inner(*a)) or used[-1])
    for count, y in wanted.items():
        assert torch.equal(experts.run(rows(count), weights).y, y)
    # 2 to 32 tokens are measured; halfway on a logarithmic scale is 8.
    assert [mode.tuning for mode in used] == [Tuning(), NARROW, WIDE, Tuning()]
    grouped = GroupedTokens(
        rows(4).x_RH, torch.tensor([1, 0, 2, 1]), torch.arange(4), torch.ones(4), 4
    )  # one row an expert
    assert experts.run(grouped, weights).y.shape == (4, HIDDEN) and used[-1].tuning == NARROW


def tuned_here(path: Path, stop: int | None = None) -> TuneResult:
    def reported(what: str, done: int, total: int) -> None:
        if done == stop:
            raise KeyboardInterrupt

    return tune(
        CASE, (1, 64), path, budget_s=60.0, cores=1, device=torch.device("cpu"), meta={"by": "a test"},
        stack=lambda case, device: random_experts(case.weights, SLOTS, HIDDEN, INNER, device), on_measured=reported,
    )  # fmt: skip


@compiled
def test_a_killed_session_goes_on_and_its_file_is_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ROUNDS", 1)
    path = tuned_path("A B", "cpu_native", CASE.name)
    with pytest.raises(KeyboardInterrupt):
        tuned_here(path, stop=5)
    tried = sum(len(EXPERTS["cpu_native"].tuning_space(CONTEXT, count)) for count in (1, 64))
    result = tuned_here(path)
    assert (result.complete, result.resumed, result.measured) == (True, 5, tried - 5)
    assert json.loads(path.with_suffix(".meta.json").read_text())["by"] == "a test"
    found = load_tuned(CONTEXT, FP8_128x128, TOP_K).points
    assert found == tuple(
        Point(p.tokens * TOP_K / SLOTS, tuning_of(p.parameters), p.microseconds) for p in result.points
    )
