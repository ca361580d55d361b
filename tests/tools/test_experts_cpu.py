"""Figures of CPU experts: every project at the same bits, without wrong results."""

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

from experts_cpu_candidates import LARGEST_ERROR, without_wrong  # noqa: E402
from experts_cpu_clock import STEP, settle  # noqa: E402
from experts_cpu_peers import awq, kt_candidates, kt_scales, vllm_candidates  # noqa: E402

from moe_mk.quant.kinds import scheme_of_kind  # noqa: E402
from tools.results import laws_table  # noqa: E402


@pytest.mark.row(171)
def test_blocks_of_four_to_eight_bits_are_faster_than_the_best_variant_of_ggml() -> None:
    results = json.loads((RESULTS / "experts_cpu_int4.json").read_text(encoding="utf-8"))
    compared = 0
    for case in results["cases"]:
        by_name = {line["candidate"]: line["cpu_ms"] for line in case["lines"]}
        for name, theirs in by_name.items():
            if name.startswith("ggml "):
                ratio = theirs / by_name[f"ours {name.removeprefix('ggml ').removesuffix(' repacked')}"]
                assert ratio >= (1.05 if case["rows"] == 1 else 1.9 if case["rows"] == 4 else 2.0), (case["rows"], name)
                compared += 1
    assert compared == 9 * 5 and "ours fp8" in by_name


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


@pytest.mark.row(176)
def test_the_page_of_laws_shows_the_results_that_are_here_and_ours_keep_all() -> None:
    results = json.loads((RESULTS / "laws.json").read_text(encoding="utf-8"))
    assert laws_table(RESULTS) in (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")
    ours = {each["status"] for name, peer in results["peers"].items() if name.startswith("moe_mk") for each in peer}
    assert ours == {"kept"}
