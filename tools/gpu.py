"""Tests, tuning and measurement on a GPU: four commands of at most nine minutes, each useful alone.

    python tools/gpu.py 1                 correctness, and the latency of this project's kernels
    python tools/gpu.py 2                 other implementations, each in a process of its own
    python tools/gpu.py 3                 tuning
    python tools/gpu.py 4                 the complete layer, other weight formats, stress, tuned tiles
    python tools/gpu.py                   all four
    python tools/gpu.py --dry-run         the parts of all four with their limits, on any machine

The limits of a command's parts add up to less than nine minutes. After every part the output folder (--out, the
variable OUT, or build/gpu/out) holds everything that exists by then, in at most eight files below 16 MiB: `state.json`,
`results.jsonl`, `report.md`, `log.txt`, and archives of compiled kernels and tuned tiles. A later run continues from
such a folder (--resume, by default `.peers/out`); other sources start anew. Nothing is downloaded: wheels in
`.peers/whl` are installed first. Exit status 0: all parts passed; 1: one failed; 75: more to do.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import gpu_carry, gpu_report

ROOT = Path(__file__).resolve().parents[1]
WORK = Path("build/gpu")
COMMAND_SECONDS = 540
SETUP_SECONDS = 20
"""Of a command: installing wheels, and unpacking what an earlier one compiled."""
MORE_TO_DO = 75
SOURCES = ("moe_mk", "contrib", "tests/gpu", "benchmarks", "tools")
CONTRIB = ROOT / "contrib" / "moe_mk_contrib"
TAIL = 40


@dataclass(frozen=True)
class Part:
    """One process of a command."""

    name: str
    arguments: tuple[str, ...]
    seconds: int
    """The limit after which it is ended."""


@dataclass(frozen=True)
class Command:
    """Parts that run together, in the order in which they give the most if they are cut short."""

    number: int
    title: str
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> int:
        """The longest that it can take."""
        return SETUP_SECONDS + sum(part.seconds for part in self.parts)


@dataclass(frozen=True)
class Result:
    status: str
    """"passed", "failed", "ran out of time" or "to be continued"."""
    seconds: float
    tail: str


Run = Callable[[Part], Result]


PARTS = """
1 correctness, and the latency of this project's kernels
    35 ceilings: benchmarks/gpu_tools.py ceilings CEILINGS RESULTS
    120 tests: ops and tiny layers: TESTS tests/gpu/test_ops.py tests/gpu/test_experts.py -k "test_ops or tiny"
    60 tests: one tile of each engine at full size: TESTS tests/gpu/test_experts.py -k smallest_tile
    55 sanitizer: benchmarks/gpu_tools.py sanitize RESULTS
    110 latency: 32 experts, built-in tiles: LATENCY --tiles built-in --experts 32 --seconds 95
    130 latency: 256 experts, built-in tiles: LATENCY --tiles built-in --experts 256 --seconds 115
2 other implementations
    255 peers: 32 experts: VERSUS --experts 32 --seconds 235
    255 peers: 256 experts: VERSUS --experts 256 --seconds 235
3 tuning
    160 tune: 256 experts: TUNE --slots 256 --budget 120
    160 tune: 32 experts: TUNE --slots 32 --budget 120
4 the complete layer, other formats, stress, tuned tiles
    60 tests: layer and streams: TESTS tests/gpu/test_layer.py tests/gpu/test_tiles.py
    60 layer: eager and graph: benchmarks/layer_gpu.py --what "eager and graph" CEILINGS RESULTS
    80 tests: one-sided: TESTS tests/gpu/test_one_sided.py -n 2
    70 layer: formats: benchmarks/layer_gpu.py --what formats CEILINGS RESULTS
    60 tests: mxfp4 and int8: TESTS tests/gpu/test_weight_types.py -k "smallest_tile or is_exact"
    70 tests: stress: TESTS tests/gpu/test_stress.py -n 1
    55 latency: 32 experts, tuned tiles: LATENCY --tiles tuned --experts 32 --seconds 40
    65 latency: 256 experts, tuned tiles: LATENCY --tiles tuned --experts 256 --seconds 50
"""
"""Commands, and their parts: the limit in seconds, the name, and the arguments of Python."""
WORDS = {
    "LATENCY": "benchmarks/experts_gpu.py TUNED CEILINGS RESULTS",
    "VERSUS": "benchmarks/experts_gpu.py CEILINGS RESULTS",
    "TUNE": "-m moe_mk tune triton --device cuda --weights fp8 --activations fp8 --top-k 8 --tokens 1,16,128,1024,8192 "
    "--tuned-dir WORK/tuned --json",
    "TESTS": "-m pytest -q -n 8 -p no:cacheprovider -m gpu --junitxml=WORK/tests/NAME.xml",
    "RESULTS": "--results OUT/results.jsonl",
    "CEILINGS": "--ceilings WORK/ceilings.json",
    "TUNED": "--folder WORK/tuned",
}
"""What words in capitals of PARTS stand for."""


def commands(work: Path, out: Path) -> tuple[Command, ...]:
    """The queue. work: for tuned tiles, ceilings and reports of tests; out: for results."""
    found: list[tuple[str, list[Part]]] = []
    for line in PARTS.strip().splitlines():
        if not line.startswith(" "):
            found.append((line, []))
            continue
        named, text = line.strip().rsplit(": ", 1)
        limit, _, name = named.partition(" ")
        for word, meaning in WORDS.items():
            text = re.sub(rf"\b{word}\b", meaning, text)
        places = {"NAME": name.removeprefix("tests: ").replace(" ", "_"), "WORK": str(work), "OUT": str(out)}
        words = (re.split(r"\b(NAME|WORK|OUT)\b", word) for word in shlex.split(text))
        arguments = tuple("".join(places.get(piece, piece) for piece in pieces) for pieces in words)
        found[-1][1].append(Part(name, arguments, int(limit)))
    return tuple(Command(int(title[0]), title[2:], tuple(parts)) for title, parts in found)


class State:
    """Which parts are done, in a file."""

    def __init__(self, file: Path, fingerprint: str) -> None:
        self.file, self.fingerprint = file, fingerprint
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.continues = found.get("fingerprint") == fingerprint
        self.results: dict[str, Any] = found.get("results", {}) if self.continues else {}

    def passed(self, part: Part) -> bool:
        """Whether a part need not run again."""
        return bool(self.results.get(part.name, {}).get("status") == "passed")

    def note(self, part: Part, result: Result) -> None:
        self.results[part.name] = asdict(result)
        text = json.dumps({"fingerprint": self.fingerprint, "results": self.results}, indent=2)
        replacement = self.file.with_suffix(".new")
        replacement.write_text(text + "\n", encoding="utf-8")
        replacement.replace(self.file)


def fingerprint(root: Path) -> str:
    """The contents of the sources that results belong to, with or without a repository around them."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def process(part: Part, environment: Mapping[str, str], log: Path) -> Result:
    """Run one part. Its output is shown and logged as it comes; the last lines are kept."""
    started, lines = time.monotonic(), list[str]()
    with (
        log.open("a", encoding="utf-8") as kept,
        subprocess.Popen(
            ["timeout", "--kill-after=5", str(part.seconds - 5), sys.executable, *part.arguments], cwd=ROOT,
            env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as running,
    ):  # fmt: skip
        assert running.stdout is not None
        for line in running.stdout:
            kept.write(line)
            kept.flush()
            sys.stdout.write(line)
            sys.stdout.flush()
            lines = [*lines[1 - TAIL :], line]
    stated = {0: "passed", 124: "ran out of time", 137: "ran out of time", MORE_TO_DO: "to be continued"}
    status = stated.get(running.returncode, "failed")
    if status == "passed" and '"complete": false' in "".join(lines):  # as `moe-mk tune` ends once its budget has
        status = "to be continued"
    return Result(status, round(time.monotonic() - started, 1), "".join(lines))


def environment(wheels: Path, work: Path) -> dict[str, str]:
    """The environment of every part; carried wheels are installed next to the machine's own packages."""
    given, paths, site = dict(os.environ), [str(ROOT), str(CONTRIB), str(registered(CONTRIB, work))], work / "site"
    found = sorted(wheels.glob("*.whl"))
    if found:
        if not site.is_dir():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
            subprocess.run([*pip, *map(str, found)], check=True, timeout=300)
        # DeepGEMM keeps compiled kernels under a key that contains the path of its headers.
        paths.append(str(site))
        given["DG_JIT_CACHE_DIR"] = str(work / "deep_gemm_cache")
    given["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [given.get("PYTHONPATH")])])
    given["TRITON_CACHE_DIR"] = str(work / "triton_cache")
    return given | {"PYTHONUNBUFFERED": "1"}


def registered(project: Path, work: Path) -> Path:
    """A folder with the metadata of a plugin that is there as sources, so that its entry points are found."""
    facts = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = work / "plugins"
    info = folder / f"{facts['name'].replace('-', '_')}-{facts['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {facts['name']}\nVersion: {facts['version']}\n")
    groups = facts["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{n} = {at}" for n, at in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def queue(
    wanted: Sequence[Command], state: State, run: Run, after: Callable[[], None],
    now: Callable[[], float] = time.monotonic, say: Callable[[str], Any] = print,
) -> int:  # fmt: skip
    """Run what is left of the commands. A part starts only if it ends within its command's nine minutes.

    after: called after every part, to write what exists by then.
    """
    left = failed = 0
    for command in wanted:
        say(f"command {command.number}: {command.title}; {command.seconds} of {COMMAND_SECONDS} s at most")
        started = now() - SETUP_SECONDS
        for part in command.parts:
            if state.passed(part):
                say(f"  done             {part.name}")
                continue
            if now() - started + part.seconds > COMMAND_SECONDS:
                left += 1
                say(f"  later            {part.name}")
                continue
            result = run(part)
            state.note(part, result)
            after()
            left += result.status == "to be continued"
            failed += result.status in ("failed", "ran out of time")
            say(f"  {result.status:16} {part.name}: {result.seconds:.0f} s of {part.seconds}")
    return 1 if failed else (MORE_TO_DO if left else 0)


def resume(folder: Path, out: Path, work: Path, state_of: str) -> State:
    """Continue from the files of an earlier run of the same sources; tuned tiles and kernels stay in any case."""
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and folder.resolve() != out.resolve() and not (out / "state.json").is_file():
        for file in sorted(folder.iterdir()):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    gpu_carry.unpack(out, work)
    state = State(out / "state.json", state_of)
    if not state.continues:
        for name in ("results.jsonl", "report.md", "log.txt"):
            (out / name).unlink(missing_ok=True)
    return state


def write_report(out: Path) -> None:
    """The results so far as a page; none without results."""
    lines = gpu_report.read(out / "results.jsonl")
    if lines:
        (out / "report.md").write_text(gpu_report.page(lines), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", type=int, nargs="*", help="numbers of commands, 1 to 4; default: all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or WORK / "out"))
    parser.add_argument("--resume", type=Path, default=ROOT / ".peers" / "out", help="what an earlier run wrote")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".peers" / "whl")
    parser.add_argument("--work", type=Path, default=ROOT / WORK)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    out, work = given.out.resolve(), given.work.resolve()
    if not set(given.command) <= {1, 2, 3, 4}:
        parser.error(f"commands are 1 to 4, not {given.command}")
    chosen = [each for each in commands(work, out) if not given.command or each.number in given.command]
    if given.dry_run:
        for each in chosen:
            print(f"command {each.number}: {each.title}; {each.seconds} of {COMMAND_SECONDS} s at most")
            print(*(f"  {part.seconds:3} s  {part.name}" for part in each.parts), sep="\n")
        return 0
    state = resume(given.resume, out, work, fingerprint(ROOT))
    of_parts = environment(given.wheels, work)

    def after() -> None:
        write_report(out)
        gpu_carry.pack(work, out)

    return queue(chosen, state, lambda part: process(part, of_parts, out / "log.txt"), after)


if __name__ == "__main__":
    sys.exit(main())
