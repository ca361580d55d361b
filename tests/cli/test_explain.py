"""`moe-mk explain` for devices of other machines: the libraries it assumes, a warning if only the reference serves."""

import json
from pathlib import Path

import pytest

from moe_mk.lab.cli import explain
from tests.cli.conftest import Invoke

H200 = ("explain", "deepseek_v3", "--device", "h200", "--ranks", "8")


@pytest.fixture(autouse=True)
def a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, with a compiler as its only library."""
    monkeypatch.setattr(explain, "is_profile_here", lambda profile: profile.kind == "cpu")
    monkeypatch.setattr(explain, "installed", lambda _cache_dir: frozenset({"c++"}))


def test_another_machine_is_assumed_to_have_the_libraries_of_its_device(invoke: Invoke) -> None:
    stated = invoke(*H200).stdout
    (line,) = [line for line in stated.splitlines() if line.startswith("libraries")]
    assert line.split("assumed: ")[1].startswith("deep_ep, deep_gemm, ") and "triton" in line and "mori" not in line
    assert "there is no h200 here; --installed assumes only what is installed here" in line
    assert "is not installed" not in stated and "allow_emulated" not in stated and "warning" not in stated
    amd = json.loads(invoke("explain", "deepseek_v3", "--device", "mi300x", "--json").stdout)["problem"]["installed"]
    assert "deep_ep" not in amd


@pytest.mark.parametrize("words", [("--installed",), ("--installed", "--tokens", "64"), ("--installed=here",)])
def test_installed_without_a_value_assumes_what_is_here_and_warns_of_the_reference(
    invoke: Invoke, words: tuple[str, ...]
) -> None:
    done = invoke(*H200, *words)
    assert done.exit_code == 0 and "libraries   installed here: c++\n" in done.stdout
    assert "warning     reference is the reference implementation, which is slow on h200" in done.stdout
    assert "triton [pip install 'moe-mk[cuda]']" in done.stdout
    assert "allow_emulated" not in done.stdout, "an emulation runs on the host"
    found = json.loads(invoke(*H200, *words, "--json").stdout)
    assert found["chosen"]["experts"] == "reference" and len(found["warnings"]) == 1


def test_a_wanted_pair_that_no_change_makes_eligible_ends_with_1(invoke: Invoke) -> None:
    for more in ((), ("--json",)):
        done = invoke("explain", "tiny", "--device", "cpu", "--want", "no_ep + flashinfer_trtllm", *more)
        assert done.exit_code == 1, done.output


def test_a_cpu_is_explained_with_what_is_installed(invoke: Invoke) -> None:
    words = ("explain", "deepseek_v3", "--experts", "reference")
    stated = invoke(*words).stdout
    assert "libraries" not in stated and "warning" not in stated
    assert json.loads(invoke(*words, "--json").stdout)["problem"]["installed"] == ["c++"]


def test_a_shipped_configuration_is_found_without_a_source_tree(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("explain", "configs/models/tiny.yaml").exit_code == 0
    assert "neither a file nor a shipped model" in invoke("explain", "elsewhere/tiny.yaml").stderr
