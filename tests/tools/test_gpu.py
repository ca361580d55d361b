"""The GPU queue on a machine without a GPU: what it would do, that it goes on where it stopped, and what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tools import gpu, gpu_carry, gpu_report
from tools.gpu import MORE_TO_DO, Part

NINE_MINUTES = 540


def python(name: str, code: str, seconds: int = 20) -> Part:
    return Part(name, ("-c", code), seconds, ("-c", "print('nothing')"))


def queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *parts: Part) -> Any:
    monkeypatch.setattr(gpu, "parts", lambda out: parts)
    return lambda *options: gpu.main(["--out", str(tmp_path), "--wheels", str(tmp_path / "none"), *options])


def test_every_part_ends_within_nine_minutes_and_names_a_file_that_is_there() -> None:
    parts = gpu.parts(Path("out"))
    names = [part.name for part in parts]
    assert names[:4] == ["ceilings", "tests: ops", "tests: tiny shapes", "tests: one-sided"]
    order = ["measure: 32 experts, built-in tiles", "report: built-in tiles", "tune: 32 experts", "report: tuned tiles"]
    assert sorted(order, key=names.index) == order, "what was measured is on the page before tiles are tuned"
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        assert part.seconds < NINE_MINUTES
        files = [word for word in part.arguments if word.endswith(".py")]
        assert len(files) == 1 and (gpu.ROOT / files[0]).is_file()


@pytest.mark.thorough
def test_a_dry_run_asks_each_part_what_it_would_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--only", "ceilings", "report", "measure: 8"]) == 0
    stated = capfd.readouterr().out
    assert "would read 8 GiB" in stated and "0 results in" in stated
    assert "   8 experts     64 tokens    64.00 rows an expert" in stated
    assert "peer DeepGEMM, GEMMs only: left out, deep_gemm is not installed" in stated
    assert not (tmp_path / "state.json").exists(), "a dry run does nothing"


def test_what_is_done_is_not_done_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    note = f"open({str(trace)!r}, 'a').write('x')"
    run = queue(monkeypatch, tmp_path, python("one", note), python("two", f"import sys; {note}; sys.exit(3)"))
    assert run() == 1 and trace.read_text() == "xx"
    assert run() == 1 and trace.read_text() == "xxx", "only what failed runs again"
    assert "done      one" in capfd.readouterr().out
    monkeypatch.setattr(gpu, "fingerprint", lambda root: "other sources")
    assert run("--only", "one") == 0 and trace.read_text() == "xxxx", "other sources start anew"


def test_a_part_that_hangs_is_ended_and_the_queue_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = queue(monkeypatch, tmp_path, python("hangs", "import time; time.sleep(60)", 1), python("next", "print(1)"))
    assert run() == 1
    found = json.loads((tmp_path / "state.json").read_text())["results"]
    assert found["hangs"]["status"] == "ran out of time" and found["next"]["status"] == "passed"
    assert found["next"]["tail"] == "1\n"


def test_no_part_starts_that_may_not_end_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    more = python("continues", f"import sys; sys.exit({MORE_TO_DO})", 5)
    run = queue(monkeypatch, tmp_path, more, python("long", "raise SystemExit(1)", 500))
    assert run("--seconds", "100") == MORE_TO_DO
    found = json.loads((tmp_path / "state.json").read_text())["results"]
    assert found["continues"]["status"] == "to be continued" and "long" not in found


def line(experts: int, **results: dict[str, float]) -> dict[str, Any]:
    return {
        "experts": experts, "tokens": 64, "rows_an_expert": 512 / experts, "floor_us": 300.0, "results": results,
        "skipped": {"a peer": "ModuleNotFoundError: No module named 'peer'"},
    }  # fmt: skip


def test_the_report_writes_its_part_of_the_page_alone(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    page.write_text(f"# Before\n{gpu_report.BEGIN}\nold\n{gpu_report.END}\nafter\n")
    results.mkdir()
    about = {"device": "A GPU", "python": "3.12", "versions": {"torch": "2.11.0"}, "rates_are": "measured here"}
    about |= {"rates": {"memory_gbs": 4400.0, "fp8_tflops": 1500.0}}
    for experts in (8, 256):
        given = about | {"lines": [line(experts, ours={"median_us": 400.0, "of_floor": 0.75})]}
        (results / f"experts_gpu_e{experts}.json").write_text(json.dumps(given))
    command = ["--results", str(results), "--plot", str(tmp_path / "plot.png"), "--page", str(page)]
    assert gpu_report.main(command) == 0 and gpu_report.main(command) == 0
    written = page.read_text()
    assert written.startswith("# Before\n") and written.endswith("\nafter\n") and "old" not in written
    assert "A GPU, Python 3.12, torch 2.11.0. Ceilings: 4400 GB/s read and 1500 FP8 TFLOP/s, measured here." in written
    assert written.index("| 256 | 64 | 2.00 | 300 | 400 us (75 %) |") < written.index("| 8 | 64 | 64.00 |")
    assert "a peer did not take part: ModuleNotFoundError" in written
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_page_without_its_marks_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs one line <!-- experts_gpu: begin -->"):
        gpu_report.replaced("nothing", "text")
    assert gpu_report.main(["--results", str(tmp_path), "--plot", "x", "--page", "y"]) == 1, "nothing to report"


def test_the_real_page_has_its_marks() -> None:
    assert gpu_report.replaced(gpu_report.PAGE.read_text(), "x").count("x\n" + gpu_report.END) == 1


def test_the_tuner_tries_a_few_tiles_for_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(gpu.ROOT / "benchmarks"))
    import experts_gpu_tune as tune

    for rows in (0.03, 1.0, 16.0, 128.0, 1024.0, 8192.0):
        tiles = [tile for tile in tune.CANDIDATES if tune.sensible(tile, rows)]
        assert 3 <= len(tiles) and {tile.engine for tile in tiles} == {"triton", "gluon"}, rows
    assert len(set(tune.CANDIDATES)) == len(tune.CANDIDATES)


def test_a_tile_that_hung_is_known_in_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(gpu.ROOT / "benchmarks"))
    from experts_gpu_tune import CANDIDATES, Suspects

    file = tmp_path / "suspects.json"
    first = Suspects(file)
    first.trying(CANDIDATES[0])
    first.trying(None)
    first.trying(CANDIDATES[1])  # and never comes back
    assert Suspects(file).hung == {str(CANDIDATES[1])}
    assert sys.modules["experts_gpu_tune"].Suspects is Suspects


def test_everything_that_is_needed_is_pinned_and_nothing_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    constraints = (gpu.ROOT / "constraints.txt").read_text()
    wanted = gpu_carry.pinned(gpu_carry.NEEDED, constraints)
    assert "pydantic==" + metadata.version("pydantic") in wanted
    with pytest.raises(KeyError, match="no-such-thing"):
        gpu_carry.pinned(["no-such-thing"], constraints)
    assert gpu_carry.main(["--dry-run", "--peers"]) == 0
    stated = capsys.readouterr().out
    assert "--python-version 3.12 --only-binary=:all:" in stated and "sgl-deep-gemm==0.1.5.post1" in stated
    # What the requirements need in turn is there as well: torch, numpy and triton are the machine's own.
    own, carried = {"torch", "numpy", "triton"}, {canonical(name) for name in gpu_carry.NEEDED}
    for name in sorted(carried):
        for need in metadata.requires(name) or []:
            requirement = Requirement(need)
            if requirement.marker is None or requirement.marker.evaluate({"extra": "", "python_version": "3.12"}):
                assert canonical(requirement.name) in carried | own, f"{name} needs {requirement.name}"


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


def test_every_part_imports_with_what_is_carried_and_the_machine_has() -> None:
    allowed, left = {canonical(name) for name in gpu_carry.NEEDED} | {"moe-mk"}, ["torch", "triton", "numpy"]
    while left:
        allowed.add(canonical(name := left.pop()))
        with suppress(metadata.PackageNotFoundError):
            needs = [Requirement(each) for each in metadata.requires(name) or []]
            found = [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
            left += [each for each in found if canonical(each) not in allowed]
    files = [word for part in gpu.parts(Path("out")) for word in part.arguments if word.endswith(".py")]
    modules = {file.removesuffix(".py").replace("/", ".") for file in files} | {"experts_gpu_peers", "xdist"}
    modules = {each.removeprefix("benchmarks.") for each in modules} - {"moe_mk.cli.__main__"}
    modules |= {"moe_mk.cli.app", "moe_mk.cli.tune"}  # a verb imports its own when it is called
    if find_spec("triton") is not None:
        folder = gpu.ROOT / "moe_mk" / "kernels" / "triton"
        modules |= {f"moe_mk.kernels.triton.{each.stem}" for each in folder.glob("*.py") if each.stem != "interpreter"}
    else:
        modules -= {"experts_gpu_peers"}
    paths = os.pathsep.join(map(str, (gpu.ROOT, gpu.ROOT / "benchmarks")))
    command = [sys.executable, "-c", ONLY_WHAT_IS_CARRIED, ",".join(allowed), ",".join(modules)]
    done = subprocess.run(
        command, cwd=gpu.ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")
