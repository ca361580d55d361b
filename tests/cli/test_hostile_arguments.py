"""Arguments out of range end in a message and a code, before any work, and take nothing away."""

import errno
import os
import shutil
from argparse import ArgumentError, ArgumentParser
from pathlib import Path

import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints import CheckpointShape, is_complete, write_checkpoint
from moe_mk.lab.checkpoints.convert import convert_checkpoint
from moe_mk.lab.cli.exits import named
from moe_mk.lab.cli.options import settings_of
from moe_mk.lab.cli.outputs import format_of, output_file
from tests.cli.conftest import Invoke, usage_error

SMALL = ("--hidden", 128, "--intermediate", 128)
SHAPE = CheckpointShape(
    num_experts=4, hidden_size=128, intermediate_size=128, num_groups=1, top_k_groups=1, top_k=2, layers=(3,)
)
HUGE = 10**23


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "ck é", SHAPE)
    return tmp_path / "ck é"


def test_a_full_disk_keeps_the_earlier_checkpoint_and_makes_no_folder(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(small)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for folder in (small, small.parent / "new" / "er"):
        with pytest.raises(ConfigError, match=r"has \d+ k?B free"):
            write_checkpoint(folder, SHAPE, seed=1)
    assert is_complete(small, SHAPE) and not (small.parent / "new").exists()


def test_a_conversion_goes_through_a_link_and_into_the_working_folder(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "away")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for target, folder in ((tmp_path / "link", "away"), (Path("."), "here")):
        convert_checkpoint(small, target, "bf16")
        assert (tmp_path / folder / "conversion.json").is_file()
    assert (tmp_path / "link").is_symlink() and not list(tmp_path.glob("*.partial"))


def test_a_layer_of_few_experts_is_written_and_found_under_its_number(invoke: Invoke, tmp_path: Path) -> None:
    """Groups and top-k follow the number of experts, and `run` finds the layer; counts that are none are refused."""
    for count in (1, 2, 3, 7, 8, 12, 31):
        folder = tmp_path / str(count)
        done = invoke("make-checkpoint", folder, "--num-experts", count, "--layer", count, *SMALL)
        assert done.exit_code == 0, done.output
        assert invoke("inspect", folder, "--json").stdout == invoke("inspect-checkpoint", folder, "--json").stdout
    done = invoke("run", tmp_path / "7", "--tokens", 1, "--repeats", 1)
    assert done.exit_code == 0 and "7 experts" in done.stdout and "PASS" in done.stdout, done.output
    for count in (0, -3):
        assert "must be at least 1" in usage_error("make-checkpoint", tmp_path / "none", "--num-experts", count, *SMALL)


def test_any_integer_is_a_seed(invoke: Invoke, small: Path) -> None:
    for seed in (HUGE, -HUGE):
        assert invoke("bisect", "reference", "reference", "--tokens", 2, *SMALL, "--seed", seed).exit_code == 0
        assert invoke("run", small, "--tokens", 1, "--repeats", 1, "--seed", seed).exit_code == 0


@pytest.mark.parametrize("words, stated", [
    (("bisect", "reference", "reference", "--hidden", HUGE), "2147483647"),
    (("bisect", "reference", "reference", "--hidden", 2**31 - 1, "--tokens", 2**31 - 1), "fit into memory"),
    (("certify", "reference", "--import", ""), "--import : Empty module name"),
    (("certify", "reference", "--import", "."), "--import .: "),
    (("certify", "reference", "--out", "nowhere/x"), "--out nowhere/x is in a folder that does not exist"),
    (("certify", "reference", "--out", "/proc/x"), "--out /proc/x cannot be written: "),
    (("bench", "--out", "/proc/x"), "--out /proc/x cannot be written: "),
    (("bench", "--out", "/"), "--out / is a folder"),
    (("tune", "cpu_native", "--device", "cpu:-1", "--dry-run"), "'cpu:-1' is not a device"),
    (("tune", "cpu_native", "--tuned-dir", "nowhere", "--budget", "nan"), "the budget of nan s"),
    (("tune", "cpu_native", "--tokens", HUGE, "--dry-run"), "holds a number outside [0, 2147483647]"),
    (("bench", "--memory", "9" * 5000), "is no amount above 0"),
    (("plan", "timeline", "--late", f"{'9' * 5000}=1"), "is not a list such as 3=50"),
    (("plan", "timeline", "--late", "\u00b2=1"), "is not a list such as 3=50"),
    (("plan", "timeline", "--late", "1=inf"), "is not a list such as 3=50"),
    *((("plan", "timeline", f"--{each}", HUGE), "2147483647") for each in ("top-k", "hidden", "tokens", "experts")),
])  # fmt: skip
def test_what_is_out_of_range_is_reported(invoke: Invoke, words: tuple[object, ...], stated: str) -> None:
    done = invoke(*words)
    assert done.exit_code == 2 and stated in " ".join(done.stderr.split())


def test_the_last_of_settings_holds(tmp_path: Path) -> None:
    (file := tmp_path / "a.yaml").write_text("router: {top_k: 3}")
    for words, last in (([str(file), "router.top_k=2"], 2), (["router.top_k=2", str(file)], 3)):
        assert settings_of(words) == {"router.top_k": last}


def test_experts_of_another_device_are_not_tuned_here(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("tune", "triton", *SMALL, "--slots", 4, "--tuned-dir", tmp_path)
    assert done.exit_code == 3 and "experts 'triton' run on cuda, this device is cpu" in done.stderr
    assert not any(tmp_path.iterdir())


def test_more_ranks_than_a_machine_starts_are_refused(small: Path) -> None:
    assert "exceeds 65536" in usage_error("run", small, "--ranks", 10**14)


def test_a_picture_lies_where_it_was_asked_for(invoke: Invoke, small: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench = ("bench", small, "--tokens", 1, "--repeats", 1, "--plot")
    assert "name it stages.png" in usage_error(*bench, tmp_path / "stages.xyz")
    assert invoke(*bench, tmp_path / "stages").exit_code == 0 and format_of(Path("X.PNG")) == "png"
    assert (tmp_path / "stages").is_file() and not (tmp_path / "stages.png").exists()


def test_a_defect_and_a_closed_pipe_are_no_refusal() -> None:
    full = named(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"))
    assert str(full).startswith("/x: No space left on device")
    assert str(named(OSError(errno.EXDEV, "elsewhere", "/a", None, "/b"))).startswith("/b: elsewhere")
    assert isinstance(named(MemoryError()), ConfigError)
    for problem in (OverflowError("int too large"), TypeError("Overflow when unpacking long long")):
        assert "a number is too large" in str(named(problem))
    for problem in (RuntimeError("shape"), BrokenPipeError(errno.EPIPE, "gone"), TimeoutError("late")):
        assert named(problem) is None


def test_a_script_refuses_a_result_file_that_cannot_be_written(tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--json", type=output_file)
    assert parser.parse_args(["--json", str(tmp_path / "a.json")]).json == tmp_path / "a.json"
    assert not any(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match=r"argument --json: the file /proc/x cannot be written: .*; name a file in"):
        parser.parse_args(["--json", "/proc/x"])
