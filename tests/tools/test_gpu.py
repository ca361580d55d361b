"""The GPU queue on a machine without a GPU: order, budgets, what it continues from, what travels, what it reports."""

import json
import os
import subprocess
import sys
import zipfile
from argparse import Namespace
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.cli.conftest import printed
from tools import gpu, gpu_carry, gpu_report
from tools.gpu import MORE_TO_DO, Command, Part, Result, State
from tools.pages import between

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


def test_a_dry_run_shows_the_order_and_the_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry-run"]) == 0
    shown = capsys.readouterr().out
    order = ["command 1", "ceilings", "tests: ops", "latency: 256 experts, built-in", "command 2", "peers: 32"]
    order += ["command 3", "tune: 256", "switch: pdl", "command 4", "tests: stress", "latency: 256 experts, tuned"]
    assert sorted(order, key=shown.index) == order
    assert shown.count(f"of {NINE_MINUTES} s at most") == 4 and "160 s  tune: 32 experts" in shown


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


def latency(contender: str, median: float, tokens: int = 64, **more: Any) -> dict[str, Any]:
    line = {"kind": "latency", "case": f"32 experts, {tokens} tokens", "order": [32, tokens], "contender": contender}
    return line | {"median_us": median, "p25_us": median - 1, "p75_us": median + 1, "of_floor": 0.75} | more


CEILINGS = {"kind": "ceilings", "device": "A GPU", "versions": {"torch": "2.11.0"}, "read_gbs": 4400.4}
CEILINGS |= {"fp8_tflops": 1500.0}


def test_a_report_compares_each_peer_with_what_took_turns_with_it(tmp_path: Path) -> None:
    file, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    lines = [CEILINGS, latency("moe_mk, Triton", 500.0), latency("moe_mk, Triton", 400.0, gbs=3000.0, sm_mhz=1980)]
    lines += [latency("moe_mk, Gluon", 320.0), latency("a peer", 640.0, ours_us=400.0, error=0.0123)]
    lines += [{"kind": "skipped", "contender": "another", "reason": "ImportError: none"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "lat')
    page.write_text(f"# Before\n{gpu_report.BEGIN}\nold\n{gpu_report.END}\nafter\n")
    command = ["--results", str(file), "--page", str(page)]
    assert gpu_report.main(command) == 0 and gpu_report.main(command) == 0
    written = page.read_text()
    assert written.startswith("# Before\n") and written.endswith("\nafter\n") and "old" not in written
    assert "A GPU, torch 2.11.0. Ceilings: 4400 GB/s read and 1500 FP8 TFLOP/s, measured." in written
    assert "| moe_mk, Triton | 400.0 | 399.0 | 401.0 | 3000 | - | 75% | 1980 | - | 1.25 |" in written
    assert "| a peer | 640.0 | 639.0 | 641.0 | - | - | 75% | - | 0.0123 | 1.60 |" in written
    assert "another did not take part: ImportError: none." in written and "500.0" not in written


def test_without_measured_results_there_is_no_report(tmp_path: Path) -> None:
    file, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    page.write_text("page")
    assert gpu_report.main(["--results", str(file), "--page", str(page)]) == 1
    assert page.read_text() == "page"
    gpu.write_report(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ValueError, match="no results"):
        gpu_report.page([])
    with pytest.raises(ValueError, match="needs one line <!-- experts_gpu: begin -->"):
        between("nothing", gpu_report.BEGIN, gpu_report.END, "text")
    page = between(gpu_report.PAGE.read_text(), gpu_report.BEGIN, gpu_report.END, "x")
    assert page.count("x\n" + gpu_report.END) == 1


WORKER = """
import json, sys, time
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "prepare" and "{how}" == "fails":
        found = {{"failed": "RuntimeError: no kernel"}}
    elif do == "replay" and "{how}" == "hangs":
        time.sleep(60)
    elif do == "replay" and "{how}" == "dies":
        sys.exit(3)
    else:
        found = {{"error": 0.01}} if do == "prepare" else {{"us": 5.0}}
    print(json.dumps(found), flush=True)
"""


@pytest.mark.parametrize(
    "how,reason", [("fails", "no kernel"), ("dies", "status 3"), ("hangs", "no answer to replay within")]
)
def test_a_peer_that_fails_dies_or_hangs_leaves_our_numbers_alone(
    how: str, reason: str, benchmarks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import experts_gpu as versus

    monkeypatch.setattr(versus, "REPLAY_SECONDS", 0.3)
    pair = [
        versus.Contender(name, [sys.executable, "-c", WORKER.format(how=kind)])
        for name, kind in (("ours", "works"), ("peer", how))
    ]
    found = list(versus.compare(pair, (1, 16), 3, 20.0))
    for each in pair:
        each.close()
    assert reason in pair[1].failure and not pair[0].failure
    expected = [] if how == "fails" else [(1, "ours", [5.0] * 3, 0.01)]
    assert found == expected, "ours alone, and no further number of tokens without a pair"


def test_own_tiles_are_measured_though_one_engine_fails_and_known_results_are_kept(
    benchmarks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import experts_gpu

    def command(name: str, *_: object) -> list[str]:
        return [sys.executable, "-c", WORKER.format(how="fails" if name == broken else "works")]

    monkeypatch.setattr(experts_gpu, "command_of", command)
    given = Namespace(experts=32, tiles="built-in", folder=tmp_path, rounds=1, seconds=20.0, ceilings=None)
    given.results, broken = tmp_path / "results.jsonl", experts_gpu.GLUON
    assert experts_gpu.against_limits(given) == 0
    seen = [line["contender"] for line in gpu_report.read(given.results)]
    assert seen == [experts_gpu.OURS] * len(experts_gpu.TOKENS) + [broken]
    broken, given.seconds = "", -1.0
    assert experts_gpu.against_limits(given) == MORE_TO_DO, "out of time before anything is measured"


def test_two_contenders_take_turns(benchmarks: str) -> None:
    from experts_gpu_cases import in_turns

    order = list[str]()

    def once(name: str) -> float:
        order.append(name)
        return float(len(order))

    assert in_turns(["a", "b"], 2, once) == {"a": [5.0, 8.0], "b": [6.0, 7.0]}
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]


VLLM_FILE = """
import vllm.envs as envs


@triton.jit
def write_zeros_to_output(c_ptr, BLOCK: tl.constexpr):
    tl.store(c_ptr + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))


@triton.jit
def fused_moe_kernel(
    a_ptr, EM,
    top_k: tl.constexpr,
):
    write_zeros_to_output(a_ptr, top_k)
"""


def test_the_kernel_of_vllm_is_taken_out_of_its_wheel(tmp_path: Path, benchmarks: str) -> None:
    pytest.importorskip("triton")
    import experts_gpu_peers as peers

    wheel, folder = tmp_path / "vllm.whl", tmp_path / "vllm"
    inside = gpu_carry.VLLM_FOLDER
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{inside}fused_moe.py", VLLM_FILE)
        config = {"1": {"BLOCK_SIZE_M": 16}, "64": {"BLOCK_SIZE_M": 64}, "triton_version": "3.4.0"}
        for device in ("H200", "A100"):
            name = f"E=32,N=2048,device_name=NVIDIA_{device},dtype=fp8_w8a8,block_shape=[128,128].json"
            archive.writestr(f"{inside}configs/{name}", json.dumps(config))
        archive.writestr("vllm/other.py", "")
    taken = gpu_carry.take_vllm(wheel, folder)
    assert len(taken) == 2 and "fused_moe.py" in taken and "H200" in taken[0]
    kernel = peers.vllm_kernel(folder)
    assert kernel.arg_names == ["a_ptr", "EM", "top_k"] and "write_zeros_to_output" in kernel.fn.__globals__
    assert peers.vllm_config(folder, 32, 2048, 50) == {"BLOCK_SIZE_M": 64}
    assert peers.vllm_config(folder, 256, 2048, 1)["BLOCK_SIZE_M"] == 16
    assert peers.launch_arguments(["EM"], {"EM": 1, "N": 2}) == {"EM": 1}
    with pytest.raises(Exception, match="(?s)another version.*new_ptr"):
        peers.launch_arguments(["EM", "new_ptr"], {"EM": 1})
    with pytest.raises(FileNotFoundError, match="gpu_carry"):
        peers.vllm_kernel(tmp_path / "none")


@pytest.mark.parametrize("experts,tokens", [(32, 16), (256, 8)])
def test_peers_sort_assignments_as_their_libraries_ask(experts: int, tokens: int, benchmarks: str) -> None:
    pytest.importorskip("triton")
    import torch
    from experts_gpu_peers import by_expert, vllm_lists

    from moe_mk.quant import BF16
    from moe_mk.tokens import RowTokens

    ids = torch.rand((tokens, experts)).argsort(1)[:, :8].int()
    ids[torch.rand(ids.shape) < 0.5] = -1
    given = RowTokens(BF16.quantize(torch.zeros((tokens, 8))), ids, torch.rand(ids.shape), experts)
    order, blocks, padded = vllm_lists(given, 16)
    assert len(order) == 16 * len(blocks) and int(padded) <= len(order)
    flat = ids.flatten()
    for at, choice in enumerate(order.tolist()):
        assert choice == len(flat) or flat[choice] == blocks[at // 16]
    assert sorted(choice for choice in order.tolist() if choice < len(flat)) == torch.nonzero(flat >= 0)[:, 0].tolist()
    placed = by_expert(given, lambda counts: torch.full_like(counts, 64))
    assert torch.equal(placed.target // 64, placed.expert) and placed.rows == 64 * experts


def test_everything_that_is_needed_is_pinned_and_nothing_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    constraints = (gpu.ROOT / "constraints.txt").read_text()
    wanted = gpu_carry.pinned(gpu_carry.NEEDED, constraints)
    assert any(each.startswith("pydantic==") for each in wanted) and not any("scipy" in each for each in wanted)
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


def test_a_plugin_that_is_there_as_sources_is_found(tmp_path: Path) -> None:
    (found,) = metadata.distributions(path=[str(gpu.registered(gpu.CONTRIB, tmp_path))])
    points = {(point.group, point.name): point for point in found.entry_points}
    assert found.name == "moe-mk-contrib" and points["moe_mk.triton_engines", "gluon"].load().name == "gluon"


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
