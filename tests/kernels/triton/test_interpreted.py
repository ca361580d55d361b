"""The Triton kernels in the interpreter, against the reference. Each file runs in a process of its own: Triton decides
when it is imported whether kernels are compiled or interpreted.
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
pytestmark = pytest.mark.timeout(240)


def run_interpreted(file: str, *options: str, seconds: int = 230) -> str:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", *options]
    done = subprocess.run(
        [*command, str(HERE / file)], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, text=True, timeout=seconds,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@cache
def passed_ops() -> list[str]:
    """The tests of the single operations, which are run once for all rows."""
    return re.findall(r"^PASSED \S+::(.+)$", run_interpreted("interpreted_ops.py", "-rp"), re.MULTILINE)


@pytest.mark.row(98)
def test_ops_equal_the_reference() -> None:
    assert len(passed_ops()) == 72


@pytest.mark.row(7)
def test_weights_of_the_router_are_within_one_ulp_of_f64() -> None:
    assert sum("one_ulp" in name for name in passed_ops()) == 4


@pytest.mark.row(69)
def test_the_gate_of_few_tokens_sums_exact_products() -> None:
    assert sum("gate" in name for name in passed_ops()) == 10


@pytest.mark.row(111)
def test_experts_equal_the_reference() -> None:
    assert re.search(r"\b([5-9]|[1-9][0-9]) passed", run_interpreted("interpreted_experts.py", "-m", "not slow"))


@pytest.mark.row(84)
def test_every_type_of_weights_equals_the_reference() -> None:
    assert re.search(r"\b54 passed", run_interpreted("interpreted_weight_types.py"))


@pytest.mark.parametrize(
    "file,marked,passed",
    [("mxfp4", "not thorough", 8), ("mxfp4", "thorough", 17), ("biases", "not slow", 22), ("gluon", "not slow", 35)],
)
def test_more_cases_equal_the_reference(file: str, marked: str, passed: int) -> None:
    assert re.search(rf"\b{passed} passed", run_interpreted(f"interpreted_{file}.py", "-m", marked))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["fp8", "ue8m0", "bf16"])
def test_experts_pass_the_whole_conformance_kit(form: str) -> None:
    options = ("-m", "slow", "-k", f"whole_kit and {form}")
    assert "1 passed" in run_interpreted("interpreted_experts.py", *options, seconds=590)
