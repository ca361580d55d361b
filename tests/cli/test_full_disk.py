"""A verb that cannot write ends with 2, names the file and a remedy, and leaves every folder as it was. The limit on
the size of files stands for a full disk, at several numbers of bytes: the system returns "File too large"."""

import resource
import shutil
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from tests.cli.conftest import moe_mk, printed, usage_error
from tests.support.tiers import quick_where, slow

SMALL = ("--experts", 8, "--hidden", 256, "--intermediate", 256)
RUN = ("run", "{tiny}", "--tokens", 1, "--repeats", 1)
BENCH = ("bench", "{tiny}", "--tokens", 1, "--repeats", 1)
VERBS: dict[str, tuple[object, ...]] = {
    "make-checkpoint": ("make-checkpoint", "{out}", *SMALL),
    "make-checkpoint again": ("make-checkpoint", "{mine}", *SMALL, "--seed", 1),
    "make-checkpoint gguf": ("make-checkpoint", "{out}", *SMALL, "--quant", "q8_0"),
    "make-checkpoint like": ("make-checkpoint", "{out}", "--like", "{tiny}/config.json"),
    "convert": ("convert", "{tiny}", "{out}", "--to", "bf16"),
    "convert into": ("convert", "{tiny}", "{empty}", "--to", "bf16"),
    "convert gguf": ("convert", "{tiny}", "{out}", "--to", "q8_0"),
    "convert store": ("convert", "{tiny}", "{out}", "--store"), "derive": ("derive", "{tiny}", "--out", "{out}"),
    "run out": (*RUN, "--out", "{out}"), "run plot": (*RUN, "--plot", "{out}"), "run trace": (*RUN, "--trace", "{out}"),
    "run record": (*RUN, "--record-trace", "{out}"), "timeline": ("plan", "timeline", "--trace", "{out}"),
    "run store": (*RUN, "--memory", "1MB", "--store", "{out}"),
}  # fmt: skip
LONG: dict[str, tuple[object, ...]] = {
    "bench out": (*BENCH, "--out", "{out}"),
    "bench plot": (*BENCH, "--plot", "{out}"),
    "bench store": (*BENCH, "--memory", "1MB", "--steps", 4, "--store", "{out}"),
    "certify": ("certify", "no_ep", "--quick", "--no-processes", "--out", "{out}"),
    "compile": ("compile", "{tiny}", "--tokens", 5, "--out", "{out}"),
    "chaos": ("chaos", "--worlds", 1, "--transport", "all_gather", "--out", "{out}"),
}
"""{out} does not exist yet; {mine} is an earlier checkpoint, {empty} an empty folder. The last takes seconds; it writes
its report like the certificate before it."""


def files(folder: Path) -> dict[str, bytes]:
    """Every file with its content, every folder without one."""
    return {str(path): b"" if path.is_dir() else path.read_bytes() for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    ("verb", "limit"),
    [
        *((verb, 700) for verb in VERBS), *slow(*zip(VERBS, cycle((0, 20_000)), strict=False)),
        *slow(*zip(LONG, cycle((0, 700, 20_000)), strict=False)),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_named_and_nothing_is_left(
    verb: str, limit: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {name: tmp_path / name for name in ("out", "mine", "empty")}
    names["empty"].mkdir()
    monkeypatch.chdir(tmp_path)
    assert "again" not in verb or moe_mk("make-checkpoint", names["mine"], *SMALL).exit_code == 0
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # CPython keeps a module whose bytes were not all written
    before, (soft, hard) = files(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        done = moe_mk(*(str(word).format(tiny=tiny, **names) for word in (VERBS | LONG)[verb]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if done.exit_code == 0:  # it was small enough
        assert names["out"].stat().st_size <= limit
        return
    assert done.exit_code == 2 and "Traceback" not in done.output, done.output
    target = names[{"again": "mine", "into": "empty"}.get(verb.split()[-1], "out")]
    temporary = verb in LONG and ("a temporary" in done.stderr or "/moe-mk-" in done.stderr)
    assert temporary or str(target) in done.stderr, done.stderr
    assert "; name another f" in done.stderr, done.stderr
    assert files(tmp_path) == before


@pytest.mark.parametrize("verb", quick_where(lambda verb: verb == "run record", [*VERBS, *LONG][:-1]))
def test_names_of_files_need_not_be_utf8(verb: str, tiny: Path, tmp_path: Path) -> None:
    inside = tmp_path / "\udcff"  # as Python reads the byte 0xff
    names = {name: inside / name for name in ("out", "mine", "empty", "tiny")}
    shutil.copytree(tiny, names["tiny"])
    printed(*(str(word).format(**names) for word in (VERBS | LONG)[verb]))
    if verb == "run record":
        printed("place", "--trace", names["out"].rename(inside / "trace.safetensors"), "--gpus", 2)


@pytest.mark.slow
def test_what_is_no_regular_file_is_written_directly_and_named() -> None:
    assert "/dev/full: " in usage_error("plan", "timeline", "--trace", "/dev/full")
    command = [sys.executable, "-m", "moe_mk", "plan", "timeline", "--trace", "/dev/stdout"]
    assert b'"traceEvents"' in subprocess.run(command, capture_output=True, check=True).stdout
