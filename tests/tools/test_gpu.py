"""The GPU queue on a machine without a GPU: order, budgets, what it continues from, what travels, what it reports."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cli.conftest import printed
from tools import gpu, gpu_carry
from tools.gpu import MORE_TO_DO, Command, Part, Result, State

NINE_MINUTES = 540


def test_four_commands_end_within_nine_minutes_and_name_files_that_are_there() -> None:
    queue = gpu.commands(Path("work"), Path("out"))
    assert [command.number for command in queue] == [1, 2, 3, 4]
    parts = [part for command in queue for part in command.parts]
    assert len({part.name for part in parts}) == len(parts)
    for command in queue:
        assert command.seconds <= NINE_MINUTES, command.title
    for part in parts:
        files = [word for word in part.arguments if word.endswith(".py")]
        assert all((gpu.ROOT / file).is_file() for file in files)
        assert files or "candidates" in printed(*part.arguments[2:], "--dry-run"), "of `python -m moe_mk`"
        pairs = zip(part.arguments, part.arguments[1:], strict=False)
        asked = [float(value) for word, value in pairs if word in ("--seconds", "--budget")]
        assert all(seconds < part.seconds - 5 for seconds in asked), "a part ends by itself before it is ended"


def part(name: str, seconds: int = 100, *arguments: str) -> Part:
    return Part(name, arguments, seconds)


QUEUE = (Command(1, "first", (part("a"), part("b"), part("c"))), Command(2, "second", (part("d"),)))


def test_a_run_that_was_cut_off_continues_with_what_is_left(tmp_path: Path) -> None:
    ran, written = list[str](), list[str]()

    def run(one: Part) -> Result:
        if one.name == "c" and "c" not in ran:
            ran.append("c")
            raise KeyboardInterrupt
        ran.append(one.name)
        return Result("failed" if ran == ["a", "b"] else "passed", 1.0, "")

    with pytest.raises(KeyboardInterrupt):
        gpu.queue(QUEUE, State(tmp_path / "state.json", "x"), run, lambda: written.append("x"), say=lambda _: None)
    assert ran == ["a", "b", "c"] and len(written) == 2, "results are written after every part"
    again = State(tmp_path / "state.json", "x")
    assert gpu.queue(QUEUE, again, run, lambda: None, say=lambda _: None) == 0
    assert ran == ["a", "b", "c", "b", "c", "d"], "what passed is not run again; what failed is"
    assert not State(tmp_path / "state.json", "other sources").results


def test_no_part_starts_that_may_not_end_in_time_and_a_later_command_has_its_own_time(tmp_path: Path) -> None:
    clock, ran = [0.0], list[str]()

    def run(one: Part) -> Result:
        clock[0] += 440.0 if one.name == "a" else 5.0
        ran.append(one.name)
        return Result("to be continued" if one.name == "d" else "passed", 5.0, "")

    state = State(tmp_path / "state.json", "x")
    assert gpu.queue(QUEUE, state, run, lambda: None, lambda: clock[0], lambda _: None) == MORE_TO_DO
    assert ran == ["a", "d"]


def test_a_process_that_hangs_is_ended_and_its_output_is_kept(tmp_path: Path) -> None:
    code = "import time; print('before', flush=True); time.sleep(60)"
    found = gpu.process(part("hangs", 6, "-c", code), os.environ, tmp_path / "log.txt")
    assert found.status == "ran out of time" and found.tail == "before\n" == (tmp_path / "log.txt").read_text()


def test_tuned_tiles_and_kernels_return_in_few_files_and_are_found_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_carry, "ARCHIVE", 60_000)
    work, out, elsewhere = (tmp_path / name for name in ("work", "out", "elsewhere"))
    for number in range(6):
        kernel = work / "triton_cache" / f"KEY{number}"
        kernel.mkdir(parents=True)
        (kernel / "k.cubin").write_bytes(os.urandom(50_000))
        (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": str(kernel / "k.cubin")}}))
        os.utime(kernel, (number, number))
    (work / "tuned").mkdir()
    (work / "tuned" / "case.json").write_text("{}")
    out.mkdir()
    left_out = gpu_carry.pack(work, out)
    assert left_out == ["triton_cache/KEY1", "triton_cache/KEY0"], "the oldest kernels"
    assert sorted(file.name for file in out.iterdir()) == [f"cache-{place}.zip" for place in range(4)]
    (out / "state.json").write_text('{"fingerprint": "x", "results": {"a": {"status": "passed"}}}')
    (out / "results.jsonl").write_text("{}\n")
    state = gpu.resume(out, tmp_path / "next", elsewhere, "x")
    assert state.passed(part("a")) and (tmp_path / "next" / "results.jsonl").is_file()
    group = json.loads((elsewhere / "triton_cache" / "KEY5" / "__grp__k.json").read_text())["child_paths"]
    assert Path(group["k.cubin"]).is_file() and Path(group["k.cubin"]).is_relative_to(elsewhere)
    assert (elsewhere / "tuned" / "case.json").is_file()
    gpu.resume(out, tmp_path / "other", elsewhere, "other sources")
    assert not (tmp_path / "other" / "results.jsonl").exists(), "results of other sources do not mix"


ONLY_WHAT_IS_CARRIED = """
import importlib, sys
from importlib.metadata import packages_distributions

allowed, modules = (set(word.split(",")) for word in sys.argv[1:3])
of = packages_distributions()


class Nothing:
    def find_spec(self, name, path=None, target=None):
        owners = {each.lower().replace("_", "-") for each in of.get(name, [])}
        if "." not in name and owners and not owners & allowed:
            raise ModuleNotFoundError(f"{name} of {sorted(owners)} is neither carried nor the machine's own")
        return None


sys.meta_path.insert(0, Nothing())
for name in sorted(modules):
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_every_part_imports_with_what_is_carried_and_the_machine_has() -> None:
    allowed, left = (
        {canonical(name) for name in gpu_carry.NEEDED} | {"moe-mk", "moe-mk-contrib"},
        ["torch", "triton", "numpy"],
    )
    while left:
        allowed.add(canonical(name := left.pop()))
        with suppress(metadata.PackageNotFoundError):
            needs = [Requirement(each) for each in metadata.requires(name) or []]
            found = [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
            left += [each for each in found if canonical(each) not in allowed]
    parts = [part for command in gpu.commands(Path("work"), Path("out")) for part in command.parts]
    files = [word for part in parts for word in part.arguments if word.endswith(".py")]
    modules = {file.removesuffix(".py").replace("/", ".") for file in files} | {"experts_gpu_peers", "xdist"}
    modules = {each.removeprefix("benchmarks.") for each in modules}
    if find_spec("triton") is not None:
        folder = gpu.ROOT / "moe_mk" / "kernels" / "triton"
        modules |= {f"moe_mk.kernels.triton.{each.stem}" for each in folder.glob("*.py") if each.stem != "interpreter"}
    else:
        modules -= {"experts_gpu_peers", "layer_gpu"}
    paths = os.pathsep.join(map(str, (gpu.ROOT, gpu.ROOT / "benchmarks", gpu.CONTRIB)))
    command = [sys.executable, "-c", ONLY_WHAT_IS_CARRIED, ",".join(allowed), ",".join(modules)]
    done = subprocess.run(
        command, cwd=gpu.ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")
