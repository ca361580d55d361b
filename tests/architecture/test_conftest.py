"""What tests/conftest.py promises to every test, seen from outside in runs of small test files."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tiers import pairwise_cover, quick_where, slow

TESTS = Path(__file__).resolve().parents[1]

LEAKS = """
import random
import numpy, pytest, torch

def test_dtype_leaks(): torch.set_default_dtype(torch.bfloat16)
def test_device_leaks(): torch.set_default_device("meta")
def test_gradients_leak(): torch.set_grad_enabled(False)
def test_defaults_are_restored():
    assert torch.empty(1).dtype == torch.float32 and torch.empty(1).device.type == "cpu" and torch.is_grad_enabled()

DRAWN = []
def draw(): return random.random(), float(numpy.random.rand()), float(torch.rand(()))
@pytest.mark.parametrize("n", [1, 2])
def test_seeds_are_fixed(n):
    DRAWN.append(draw())
    assert len(set(DRAWN)) == 1

@pytest.mark.gpu
def test_on_gpu(): assert torch.cuda.is_available()
@pytest.mark.row(66, "23a")
def test_known_rows(): pass
"""


def test_a_pairwise_cover_has_every_pair_of_values_that_the_product_has() -> None:
    product = [row for row in itertools.product(range(5), "abcd", (1, 2, 4), "xy") if row[:2] != (0, "a")]
    cover = pairwise_cover(product, chosen=[7])
    assert 7 in cover and 19 <= len(cover) <= 25 < len(product)
    for one, other in itertools.combinations(range(4), 2):
        pairs = {(row[one], row[other]) for row in product}
        assert {(product[number][one], product[number][other]) for number in cover} == pairs
    assert cover == pairwise_cover(product, chosen=[7]), "the same on every run"


def test_cases_are_quick_or_slow_in_the_cover_or_stress() -> None:
    marked = quick_where(lambda a, b: a == b == 0, itertools.product(range(2), repeat=2), lambda a, b: (a, b, a ^ b))
    tiers = {case.values: [mark.name for mark in case.marks] for case in marked}
    assert tiers == {(0, 0): [], (0, 1): ["slow"], (1, 0): ["slow"], (1, 1): ["slow"]}
    halves = quick_where(lambda a, b: False, itertools.product(range(2), repeat=2), lambda a, b: (a, 0))
    assert [case.marks[0].name for case in halves] == ["slow", "stress", "slow", "stress"]
    assert [case.marks[0].name for case in slow(1, 2)] == ["slow", "slow"]


def test_recorded_durations_are_of_tests_that_exist() -> None:
    recorded = {name.partition("[")[0] for name in json.loads((TESTS / "durations.json").read_text())}
    gone = [name for name in recorded if not is_there(*name.split("::", 1))]
    assert not gone, f"{sorted(gone)}; python tools/durations.py build/junit/all.xml"


def is_there(path: str, name: str) -> bool:
    file = TESTS.parent / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return f"def {name}(" in text or f"\n{name} = with_cases(" in text


def run_pytest(folder: Path, source: str) -> str:
    """Run one small test file below a copy of the conftest, and return what pytest printed."""
    for name in ("conftest.py", "durations.json", "rows.yaml"):
        shutil.copy(TESTS / name, folder)
    (folder / "test_small.py").write_text(source)
    options = ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider", "-rsfE"]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    return subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False
    ).stdout


@pytest.mark.slow
def test_leaked_defaults_fail_and_seeds_are_fixed(tmp_path: Path) -> None:
    stated = run_pytest(tmp_path, LEAKS)
    leaks = re.findall(r"^ERROR \S+::(\w+) - .*the test left", stated, re.MULTILINE)
    assert leaks == ["test_dtype_leaks", "test_device_leaks", "test_gradients_leak"], stated
    if torch.cuda.is_available():
        assert re.search(r"8 passed, 3 errors", stated), stated
    else:
        assert re.search(r"SKIPPED .* needs a CUDA device", stated), stated
        assert re.search(r"7 passed, 1 skipped, 3 errors", stated), stated
