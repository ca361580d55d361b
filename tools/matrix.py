"""Run the quick tests in environments with other versions of Python, torch and numpy.

python tools/matrix.py python3.14:==2.15.0:==2.5.5 ...      interpreter:torch:numpy, one after the other
python tools/matrix.py here                                 in the environment of this interpreter

Without arguments: this interpreter with the oldest and the newest torch and numpy that pip finds for it. Results are
added to benchmarks/results/matrix.json; `make features` writes the table of docs/quickstart.md from it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULTS, WHERE = ROOT / "benchmarks/results/matrix.json", ROOT / ".venv-matrix"
VERSIONS = "import sys, numpy, torch; print(sys.version.split()[0], torch.__version__, numpy.__version__)"
LEFT_OPEN = re.compile("(torch|numpy|setuptools|triton)==")
KEY = ("python", "torch", "numpy", "wanted")


def made(cell: str) -> str:
    """Make the environment of a cell; its interpreter. Raises ValueError with the last line of pip."""
    interpreter, torch, numpy = cell.split(":")
    shutil.rmtree(WHERE, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", str(WHERE)], check=True)
    kept, python = WHERE / "constraints.txt", str(WHERE / "bin/python")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept.write_text("\n".join(line for line in pinned if not LEFT_OPEN.match(line)), encoding="utf-8")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(kept)]
    wanted = [f"torch{torch}", f"numpy{numpy}", "-e", ".[dev]", "-e", "contrib/moe_mk_contrib"]
    installed = subprocess.run([*pip, *wanted], cwd=ROOT, capture_output=True, text=True, check=False)
    if installed.returncode:
        raise ValueError(installed.stderr.strip().splitlines()[-1])
    return python


def tried(cell: str) -> dict[str, Any]:
    """Versions of a cell and counts of its tests, or why it cannot be installed."""
    try:
        python = sys.executable if cell == "here" else made(cell)
    except ValueError as problem:
        return {"wanted": cell, "problem": str(problem)}
    named = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True, cwd="/").stdout.split()
    report, one_thread = ROOT / "build/junit/matrix.xml", os.environ | {"OMP_NUM_THREADS": "1"}
    quick = re.search(r"^QUICK := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert quick is not None
    tests = ["-q", "-m", quick[1], "-n", "2", "--dist", "loadfile", "tests", "contrib/moe_mk_contrib/tests"]
    subprocess.run([python, "-m", "pytest", "--junitxml", str(report), *tests], cwd=ROOT, check=False, env=one_thread)
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(str(suite.get(name))) for name in ("tests", "failures", "errors", "skipped")}
    return dict(zip(KEY, named, strict=False)) | counts | {"date": f"{datetime.now(UTC):%Y-%m-%d}"}


def main(cells: Sequence[str]) -> int:
    """Exit 1 where a test failed."""
    stated = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = dict(re.findall(r'^ +"(torch|numpy)>=([0-9.]+)"', stated, re.MULTILINE))
    least = f"{sys.executable}:=={oldest['torch']}.*:=={oldest['numpy']}.*"
    bad = 0
    for cell in cells or (least, f"{sys.executable}:>={oldest['torch']}:>={oldest['numpy']}"):
        found = tried(cell)
        print(json.dumps(found), flush=True)
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
        others = [each for each in known if any(each.get(name) != found.get(name) for name in KEY)]
        RESULTS.write_text(json.dumps([*others, found], indent=1) + "\n", encoding="utf-8")
        bad += found.get("failures", 0) + found.get("errors", 0)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
