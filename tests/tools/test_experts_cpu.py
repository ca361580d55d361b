"""Reports of CPU experts compare projects at the same bits, and leave out wrong results."""

import json
import math
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

from experts_cpu_clock import STEP, settle  # noqa: E402
from experts_cpu_peers import LARGEST_ERROR, left_out, without_wrong, wrong_results  # noqa: E402
from experts_cpu_report import GGML, OURS, at_equal_bits, four_bit_goals, goals  # noqa: E402
from experts_cpu_stored_peers import awq, kt_candidates, kt_scales, vllm_candidates  # noqa: E402
from laws import table  # noqa: E402

from moe_mk.quant.kinds import scheme_of_kind  # noqa: E402


@pytest.mark.row(171)
def test_blocks_of_four_to_eight_bits_are_faster_than_the_best_variant_of_ggml() -> None:
    results = json.loads((RESULTS / "experts_cpu_int4.json").read_text(encoding="utf-8"))
    compared = 0
    for case in results["cases"]:
        by_name = {line["candidate"]: line["cpu_ms"] for line in case["lines"]}
        for name, theirs in by_name.items():
            if name.startswith(GGML):
                ratio = theirs / by_name[f"ours {name.removeprefix(GGML).removesuffix(' repacked')}"]
                assert ratio >= (1.05 if case["rows"] == 1 else 1.9 if case["rows"] == 4 else 2.0), (case["rows"], name)
                compared += 1
    assert compared == 9 * 5 and OURS in by_name


def test_every_project_is_compared_with_ours_at_the_same_bits() -> None:
    few = {"ours fp8": 4.0, "ours int4 g32": 2.0, "ours bf16": 8.0, "ggml int4 g32": 5.0, "ggml int4 g32 repacked": 3.0}
    few |= {
        "vllm int4 g32": 2.5,
        "vllm bf16": 9.0,
        "vllm fp8": 6.0,
        "kt-kernel int4 g32": 10.5,
        "kt-kernel int4 row": 1.0,
        "ik_llama.cpp int4 g32": 3.5,
    }
    many = {name: ms for name, ms in few.items() if name != "kt-kernel int4 g32"}  # left out: out of patience
    results = {"cases": [_case(1, few), _case(64, many)]}
    ggml, ik, vllm, kt = at_equal_bits(results).split("With the same blocks")[1:]
    # ggml takes 3 ms at best, ours 2, our FP8 4; kt-kernel 3.5 of wall time, ours 1. Its int4 row has no counterpart.
    assert "variant of ggml / ours" in ggml and ggml.count("| 1.50 / 2.00 |") == 2
    assert "variant of ik_llama.cpp / ours" in ik and ik.count("| 1.75 / 2.00 |") == 2
    assert "variant of vLLM / ours" in vllm and vllm.count("| 1.25 / 2.00 |") == 2 and "bf16" not in vllm
    assert (
        "in wall time: the best variant of kt-kernel / ours" in kt
        and "| 1 | uniform | 3.50 / 2.00 |" in kt
        and "row" not in kt
    )
    assert "| 64 | uniform | too slow |" in kt


def test_goals_leave_out_who_rounds_weights_to_fewer_bits() -> None:
    # 6 of our 4 ms; INT4 at 2.5 ms has other weights.
    results = {"cases": [_case(1, {"ours fp8": 4.0, "vllm fp8": 6.0, "vllm int4 g32": 2.5, "kt-kernel q4 k": 1.0})]}
    assert "the nearest, vllm fp8, takes 1.50 times ours" in goals(results)


def _case(rows: int, times: dict[str, float]) -> dict[str, object]:
    """Processor times; wall times are half of them, and of kt-kernel, whose dispatching thread spins, a third."""
    lines = [
        {"candidate": name, "cpu_ms": ms, "wall_ms": ms / (3 if name.startswith("kt") else 2), "of_read": 1.0}
        for name, ms in times.items()
    ]
    return {"rows": rows, "skew": "uniform", "lines": lines}


def test_int4_codes_lie_in_the_order_of_autoawq() -> None:
    # 8 outputs of one input: nibbles from the lowest are outputs 0 2 4 6 1 3 5 7.
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]], dtype=torch.uint8)
    assert awq(codes).dtype is torch.int32
    assert awq(codes).tolist() == [[0xF642_7531 - 2**32]]
    assert awq(torch.arange(48, dtype=torch.uint8).view(3, 16) % 16).shape == (3, 2)


def test_scales_are_those_that_kt_kernel_reads() -> None:
    exponents = torch.tensor([[127, 130, 100]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert kt_scales("mxfp8", exponents).tolist() == [[127, 130, 100]]
    assert kt_scales("mxfp4", exponents).tolist() == [[1.0, 8.0, 2.0**-27]]
    assert kt_scales("mxfp4", exponents).dtype is torch.bfloat16


def test_formats_that_a_project_lacks_are_left_out() -> None:
    class Library:
        def has(self, name: str) -> bool:
            return False

    scheme = scheme_of_kind("mxfp4")
    slots = [tuple(scheme.quantize(torch.randn(64, 64)) for _ in range(3))]
    for kind in ("nvfp4", "q4_k", "int4_row", "int8_g32", "fp8_channel"):
        assert vllm_candidates(kind, slots, amx=True) == {}
    for kind in ("int4_g32", "mxfp4"):
        assert vllm_candidates(kind, slots, amx=False) == {}
    for kind in ("int4_g32", "int4_g128", "int4_row", "int8", "mxfp4", "mxfp8", "q4_k", "nvfp4"):
        assert kt_candidates(Library(), kind, slots) == {}  # type: ignore[arg-type]


def test_wrong_results_of_peers_are_left_out_by_name_and_those_of_ours_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = {"ours int4 g32": 3e-3, "vllm int4 g32": 2e-2, "kt-kernel q4 0": math.nan, "vllm int4 row": 0.25}
    candidates = dict.fromkeys(errors, torch.add)
    assert list(without_wrong(candidates, errors)) == ["ours int4 g32", "vllm int4 g32"]
    assert "kt-kernel q4 0 is left out: L2 error nan" in capsys.readouterr().out
    cases = [{"rows": 1, "wrong": wrong_results(errors)}, {"rows": 4}, {"rows": 16, "wrong": {"vllm int4 row": "0.3"}}]
    assert left_out(cases).endswith(
        "kt-kernel q4 0 (1 tokens: nan); vllm int4 row (1 tokens: 2.5e-01, 16 tokens: 0.3)."
    )
    assert not left_out([{"rows": 4}])
    for wrong in (math.nan, LARGEST_ERROR):
        with pytest.raises(ValueError, match=f"at most, got ours {wrong:.1e}"):
            without_wrong(candidates, errors | {"ours": wrong})


def test_the_next_turn_waits_for_threads_that_spin() -> None:
    stop = time.monotonic() + 0.05
    thread = threading.Thread(target=lambda: [None for _ in iter(lambda: time.monotonic() < stop, False)])
    thread.start()
    settle(0.0)
    assert time.monotonic() >= stop - STEP
    thread.join()


@pytest.mark.row(171)
def test_goals_of_four_bit_formats_are_met_or_not_at_equal_bits() -> None:
    # INT4 with groups of 32 is compared with Q4_0, of the same bits; tokens in INT8 with the same peers.
    one = {"ours fp8": 8.0, "ours int4 g32": 5.0, "ours int4 g32 w4a8": 4.0, "ours q8 0": 9.0, "ours q4 k": 4.0}
    one |= {"ggml q4 0": 6.0, "ggml q4 0 repacked": 5.0, "ggml q8 0": 1.0}
    results = {"cases": [_case(1, one), _case(4, one), _case(16, one)]}
    for case in results["cases"]:
        for line in case["lines"]:
            line["of_read"] = 1.6
    lines = four_bit_goals(results).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "- 1 token, uniform, ours int4 g32",
        "- 1 token, uniform, ours int4 g32 w4a8",
        "- 16 tokens, uniform, ours int4 g32",
        "- 16 tokens, uniform, ours int4 g32 w4a8",
    ]
    assert "ggml takes 1.00 times ours (goal 1.05, not met), our FP8 1.60 times (goal 1.75, not met)" in lines[0]
    assert "ggml takes 1.25 times ours (goal 1.05, met), our FP8 2.00 times (goal 1.75, met), 0.90 of pure" in lines[1]
    assert "our FP8 1.60 times (goal 1.20, met)" in lines[2] and "pure read" not in lines[2]
    table = at_equal_bits(results)
    assert "| tokens | routing | int4 g32 w4a8 |" not in table and "q8 0" in table


@pytest.mark.row(176)
def test_the_page_of_laws_shows_the_results_that_are_here_and_ours_keep_all() -> None:
    results = json.loads((RESULTS / "laws.json").read_text(encoding="utf-8"))
    assert table(results) in (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")
    ours = {each["status"] for name, peer in results["peers"].items() if name.startswith("moe_mk") for each in peer}
    assert ours == {"kept"}
