"""The Gluon GEMMs between interpreted Triton kernels, in a process of their own."""

import re
from pathlib import Path

import pytest

from tests.kernels.triton.test_interpreted import run_interpreted

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
GEMMS = 35


def test_gemms_equal_the_reference() -> None:
    printed = run_interpreted(Path(__file__).with_name("interpreted_gluon.py"))
    assert len(re.findall(r"^PASSED ", printed, re.MULTILINE)) == GEMMS, printed
    assert not re.search(r"^(FAILED|ERROR) ", printed, re.MULTILINE), printed
