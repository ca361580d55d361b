"""The Triton kernels in the interpreter, against the reference. Their files run in processes of their own: Triton
decides when it is imported whether kernels are compiled or interpreted.
"""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
EXPERTS = {
    "biases": 22, "experts": 30, "mxfp4": 25, "one_sided": 9, "one_sided_transport": 18,
    "paged": 9, "weight_types": 54,
}  # fmt: skip
"""Tests of each file that one process runs."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


def run_interpreted(*files: str | Path, options: tuple[str, ...] = ("-m", "not stress"), seconds: int = 470) -> str:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-rpfE", "-p", "no:cacheprovider", "-n", "0", *options]
    paths = [str(each if isinstance(each, Path) else HERE / f"interpreted_{each}.py") for each in files]
    done = subprocess.run(
        [*command, *paths], cwd=ROOT, text=True, timeout=seconds,
        env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.stdout


@cache
def passed_of(*files: str) -> tuple[list[tuple[str, str]], str]:
    """File and name of the tests that passed, and all that was printed."""
    printed = run_interpreted(*files)
    return re.findall(r"^PASSED \S+/interpreted_(\w+)\.py::(.+)$", printed, re.MULTILINE), printed


def check_passed(number: int, file: str, part: str = "") -> None:
    found, printed = passed_of("ops") if file == "ops" else passed_of(*EXPERTS)
    assert sum(where == file and part in name for where, name in found) == number, printed
    assert not re.search(rf"^(FAILED|ERROR) \S+/interpreted_{file}\.py", printed, re.MULTILINE), printed


@pytest.mark.row(98)
def test_ops_equal_the_reference() -> None:
    check_passed(72, "ops")


@pytest.mark.row(7)
def test_weights_of_the_router_are_within_one_ulp_of_f64() -> None:
    check_passed(4, "ops", "one_ulp")


@pytest.mark.row(69)
def test_the_gate_of_few_tokens_sums_exact_products() -> None:
    check_passed(10, "ops", "gate")


@pytest.mark.row(111)
def test_experts_equal_the_reference() -> None:
    check_passed(EXPERTS["experts"], "experts")


@pytest.mark.row(84)
def test_every_type_of_weights_equals_the_reference() -> None:
    check_passed(EXPERTS["weight_types"], "weight_types")


@pytest.mark.parametrize("file", sorted({*EXPERTS} - {"experts", "paged", "weight_types"}))
def test_more_cases_equal_the_reference(file: str) -> None:
    check_passed(EXPERTS[file], file)


@pytest.mark.row(174)
def test_experts_below_a_gpu_have_the_bits_of_those_on_it() -> None:
    check_passed(EXPERTS["paged"], "paged")


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["fp8", "ue8m0", "bf16"])
def test_experts_pass_the_whole_conformance_kit(form: str) -> None:
    options = ("-m", "stress", "-k", f"whole_kit and {form}")
    assert "1 passed" in run_interpreted("experts", options=options, seconds=590)
