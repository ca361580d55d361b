"""Everything a GPU has to say about this project, in one command that can be cut short and started again.

    python tools/gpu.py                   all parts that are not done yet, in order
    python tools/gpu.py --seconds 560     no part that may not end within this time is started
    python tools/gpu.py --dry-run         what each part would do, on a machine without a GPU

Parts are processes of less than nine minutes each: ceilings, correctness on tiny shapes and of one-sided transports,
peers and ours in turns, correctness at full size, tuning, and peers and ours again with what tuning found. What is done
is noted in `build/gpu/state.json` with the sources it was done for; other sources start anew. Nothing is fetched:
wheels in `.peers/whl` are installed into `build/gpu/site` first. Exit status 0: all parts passed; 1: one failed; 75:
more to do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("build/gpu")
MORE_TO_DO = 75
SOURCES = ("moe_mk", "tests/gpu", "benchmarks", "tools")


@dataclass(frozen=True)
class Part:
    """One process of the queue."""

    name: str
    arguments: tuple[str, ...]
    seconds: int
    """After which it is ended; below nine minutes."""
    dry: tuple[str, ...]
    """Arguments that show what it would do, without a GPU."""


@dataclass(frozen=True)
class Result:
    """What became of a part."""

    status: str
    """"passed", "failed", "ran out of time" or "to be continued"."""
    seconds: float
    tail: str


def parts(out: Path) -> tuple[Part, ...]:
    """The queue, in the order in which it gives the most if it is cut short."""
    ceilings, results = str(out / "ceilings.json"), out / "results"

    def tests(name: str, *arguments: str, seconds: int = 480) -> Part:
        report = f"--junitxml={out / 'tests' / name}.xml"
        run = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", report, *arguments)
        return Part(f"tests: {name}", run, seconds, ("-m", "pytest", "-q", "-n", "0", "--collect-only", *arguments))

    def script(name: str, file: str, *arguments: str, seconds: int = 520) -> Part:
        return Part(name, (file, *arguments), seconds, (file, *arguments, "--dry-run"))

    def bench(experts: int, tiles: str) -> Part:
        json_file = str(results / f"experts_gpu_e{experts}.json")
        chosen = ("--experts", str(experts), "--ceilings", ceilings, "--json", json_file)
        return script(f"measure: {experts} experts, {tiles} tiles", "benchmarks/experts_gpu.py", *chosen)

    def tune(experts: int) -> Part:
        chosen = ("--experts", str(experts), "--folder", "configs/tuned", "--suspects", str(out / "suspects.json"))
        return script(f"tune: {experts} experts", "benchmarks/experts_gpu_tune.py", *chosen)

    def tune_type(weights: str) -> Part:
        sizes = ("--slots", "32", "--top-k", "8", "--tokens", "1,16,128,1024", "--budget", "400")
        command = ("tune", "triton", "--weights", weights, *sizes, "--device", "cuda")
        run = ("-P", "moe_mk/cli/__main__.py", *command)  # without -P its folder would hide the bisect of Python
        return Part(f"tune: {weights}", run, 520, (*run, "--dry-run"))

    experts_file = "tests/gpu/test_experts.py"
    page = ("--results", str(results), "--plot", str(out / "experts_gpu.png"))

    def report(tiles: str) -> Part:
        return script(f"report: {tiles} tiles", "tools/gpu_report.py", *page, seconds=60)

    return (
        script("ceilings", "tools/gpu_ceilings.py", "--json", ceilings, seconds=120),
        tests("ops", "tests/gpu/test_ops.py", seconds=240),
        tests("tiny shapes", experts_file, "-k", "tiny"),
        tests("one-sided", "tests/gpu/test_one_sided.py", seconds=300),
        *(bench(experts, "built-in") for experts in (32, 256, 8)),
        report("built-in"),
        tests("tiles by hand", experts_file, "-k", "gluon and not tiny"),
        tests("triton tiles", experts_file, "-k", "not gluon and not tiny"),
        tests("layer", "tests/gpu/test_layer.py", seconds=240),
        tests("streams", "tests/gpu/test_tiles.py", seconds=240),
        *(tune(experts) for experts in (32, 256, 8)),
        *(bench(experts, "tuned") for experts in (32, 256, 8)),
        report("tuned"),
        tests("weight types", "tests/gpu/test_weight_types.py"),
        tune_type("mxfp4"),
    )


class State:
    """Which parts are done, in a file."""

    def __init__(self, file: Path, fingerprint: str) -> None:
        self.file, self.fingerprint = file, fingerprint
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.results: dict[str, Any] = found.get("results", {}) if found.get("fingerprint") == fingerprint else {}

    def passed(self, part: Part) -> bool:
        """Whether a part need not run again."""
        return bool(self.results.get(part.name, {}).get("status") == "passed")

    def note(self, part: Part, result: Result) -> None:
        """Write down what became of a part, at once."""
        self.results[part.name] = asdict(result)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"fingerprint": self.fingerprint, "results": self.results}, indent=2)
        self.file.write_text(text + "\n", encoding="utf-8")


def fingerprint(root: Path) -> str:
    """What the results belong to: the contents of the sources, with or without a repository around them."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def run(part: Part, environment: Mapping[str, str], *, dry: bool) -> Result:
    """Run one part, its output shown as it comes; the last lines are kept."""
    arguments, started = part.dry if dry else part.arguments, time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        ["timeout", "--kill-after=10", str(part.seconds), sys.executable, *arguments], cwd=ROOT, env=dict(environment),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines = [*lines[-39:], line]
    stated = {0: "passed", 124: "ran out of time", 137: "ran out of time", MORE_TO_DO: "to be continued"}
    return Result(stated.get(process.returncode, "failed"), round(time.monotonic() - started, 1), "".join(lines))


def environment(wheels: Path, site: Path) -> dict[str, str]:
    """The environment of every part; wheels that were brought along are installed beside the machine's own packages."""
    given = dict(os.environ)
    paths = [str(ROOT)]
    found = sorted(wheels.glob("*.whl"))
    if found:
        if not site.is_dir():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
            subprocess.run([*pip, *map(str, found)], check=True, timeout=300)
        # Always the same path: DeepGEMM keeps compiled kernels under a key that contains it.
        paths.append(str(site))
        given.setdefault("DG_JIT_CACHE_DIR", str(site.parent / "deep_gemm_cache"))
    given["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [given.get("PYTHONPATH")])])
    given.setdefault("TRITON_CACHE_DIR", str((ROOT / OUT / "triton_cache").resolve()))
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left of the queue."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="+", default=[], help="parts by how their names start")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no part that may end later")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".peers" / "whl")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    started, state = time.monotonic(), State(given.out / "state.json", fingerprint(ROOT))
    wanted = [part for part in parts(given.out) if not given.only or part.name.startswith(tuple(given.only))]
    with_wheels = environment(given.wheels, (ROOT / OUT / "site").resolve())
    left, failed = 0, 0
    for part in wanted:
        if not given.dry_run and state.passed(part):
            sys.stdout.write(f"done      {part.name}\n")
            continue
        if not given.dry_run and time.monotonic() - started + part.seconds > given.seconds:
            left += 1
            sys.stdout.write(f"later     {part.name}\n")
            continue
        what = "would run" if given.dry_run else "run      "
        sys.stdout.write(f"{what} {part.name}: python {' '.join(part.arguments)}\n")
        sys.stdout.flush()
        result = run(part, with_wheels, dry=given.dry_run)
        left += result.status == "to be continued"
        failed += result.status in ("failed", "ran out of time")
        sys.stdout.write(f"{result.status:9} {part.name} after {result.seconds} s\n")
        if not given.dry_run:
            state.note(part, result)
    return 1 if failed else (MORE_TO_DO if left else 0)


if __name__ == "__main__":
    sys.exit(main())
