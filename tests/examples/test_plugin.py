"""The sample wheel: built, installed into a folder, and then seen, explained and run like any other backend."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from moe_mk.errors import ConfigError
from moe_mk.experts import EXPERTS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples/04_custom_backend_plugin"
GROUPS = ("prepare_finalize", "experts", "oracles", "eplb_policies", "residency_policies", "network_links")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs python with the wheel, built from a copy, so that the example stays as it is, and one that cannot load."""
    folder = tmp_path_factory.mktemp("plugin")
    copied, wheels, site = folder / "src", folder / "wheels", folder / "site"
    shutil.copytree(PLUGIN, copied, ignore=shutil.ignore_patterns("__pycache__"))
    pip = "pip --disable-pip-version-check -q wheel --no-deps --no-build-isolation -w".split()
    built = subprocess.run(
        [sys.executable, "-m", *pip, str(wheels), str(copied)], capture_output=True, text=True, timeout=110
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = wheels.glob("moe_mk_sample-*.whl")
    with ZipFile(wheel) as archive:  # what pip would do in a process of its own
        archive.extractall(site)
    (lost := site / "lost-1.0.dist-info").mkdir()
    (lost / "METADATA").write_text("Name: lost")
    (lost / "entry_points.txt").write_text("".join(f"[moe_mk.{group}]\nlost = lost:Lost\n" for group in GROUPS))
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)

    return run


COMMANDS = (
    ("doctor", "--json"),
    ("explain", "deepseek_v3", "--ranks", "2", "--prepare-finalize", "one_by_one", "--experts-backend", "matmul_loop",
     "--json"),
    ("explain", "deepseek_v3", "--prepare-finalize", "one_by_one"),
    ("explain", "deepseek_v3", "--ranks", "2", "--device", "cpu", "--json"),
)  # fmt: skip
IN_ONE_PROCESS = """
import json, sys
from typer.testing import CliRunner
from moe_mk.lab.cli import app
done = [CliRunner().invoke(app, list(command)) for command in json.loads(sys.argv[1])]
print(json.dumps([(one.exit_code, one.stdout, one.stderr) for one in done]))
"""


@pytest.fixture(scope="module")
def stated(with_plugin: Run) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each of COMMANDS; one process, because starting one takes longer than they do."""
    done = with_plugin("-c", IN_ONE_PROCESS, json.dumps(COMMANDS))
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def test_doctor_lists_both_and_the_wheel_they_come_from(stated: list[tuple[int, str, str]]) -> None:
    code, out, err = stated[0]
    assert code == 0, err
    reported = json.dumps(json.loads(out))
    assert "one_by_one" in reported and "matmul_loop" in reported and "moe-mk-sample" in reported
    assert reported.count("lost (lost:Lost): ModuleNotFoundError") == len(GROUPS)


def test_explain_prices_them_or_states_what_is_against_them(stated: list[tuple[int, str, str]]) -> None:
    code, out, err = stated[1]
    assert code == 0, err
    decision = json.loads(out)
    assert (decision["chosen"]["prepare_finalize"], decision["chosen"]["experts"]) == ("one_by_one", "matmul_loop")
    refused, _, why = stated[2]
    assert refused == 3
    assert "needs 2 ranks or more, the group has 1" in why


def test_nothing_is_selected_because_a_wheel_is_installed(stated: list[tuple[int, str, str]]) -> None:
    code, out, err = stated[3]
    assert code == 0, err
    decision, why = json.loads(out), set[str]()
    for verdict in decision["verdicts"]:
        if {verdict["prepare_finalize"], verdict["experts"]} & {"one_by_one", "matmul_loop"}:
            assert verdict["cost_us"] is None
            why |= {each["text"].partition(", and")[0] for each in verdict["reasons"] if each["code"] == "trust"}
    why = {each for each in why if "moe-mk-contrib" not in each}  # of the other half of a pair
    assert why == {
        f"is not of this package but of moe-mk-sample (moe_mk_sample.{where})"
        for where in ("transport:OneByOne", "experts:MatmulLoop")
    }


def test_they_run_and_agree_with_the_reference(with_plugin: Run) -> None:
    done = with_plugin(str(PLUGIN / "run.py"))
    assert done.returncode == 0, done.stderr
    stated = re.fullmatch(r"one_by_one \+ matmul_loop: relative difference from the reference (\S+)\n", done.stdout)
    assert stated, done.stdout
    # Seven roundings to bf16 of the loop, and one of each rank's part: far above it would be a lost assignment.
    assert 0.0 < float(stated[1]) < 8**0.5 * 2**-8


STORED = """
import moe_mk
model = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "quant": {"weights": "mxfp6_e3m2"}}
config = moe_mk.MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test")
print(moe_mk.MoELayer(config).explain().chosen.experts, config.model.quant.weight_scheme.num_bytes(128, 256))
"""


def test_its_number_format_is_a_value_of_the_settings(with_plugin: Run) -> None:
    done = with_plugin("-W", "ignore", "-c", STORED)
    assert done.stdout.split() == ["torch_cpu", str(128 * (256 * 3 // 4 + 256 // 32))], done.stderr


ROUTED = """
import torch, moe_mk
model = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "quant": {"weights": "fp32"}}
config = moe_mk.MoEConfig.parse({"model": model, "router": {"top_k": 4, "kind": "top_p"}}, "a test")
layer = moe_mk.MoELayer(config, dtype=torch.float32)
logits = torch.tensor([[9.0, 0, 0, 0, 0, 0, 0, 0], [1.0, 1, 1, 1, 1, 1, 1, 1], [2.0, 2, -9, -9, -9, -9, -9, -9]])
routing = layer.router(logits)
print((routing.ids_TK >= 0).sum(1).tolist(), routing.weights_TK.sum(1).tolist())
from moe_mk.lab.testing.conformance import check_router
print(check_router(layer.router, num_experts=8, top_k=4))
"""


def test_its_router_is_a_value_of_the_settings(with_plugin: Run) -> None:
    done = with_plugin("-W", "ignore", "-c", ROUTED)
    assert done.stdout.split("\n")[:2] == ["[1, 4, 2] [1.0, 1.0, 1.0]", "20"], done.stdout + done.stderr


SELECTS = """
import sys, moe_mk
model = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "quant": {"weights": "bf16"}}
config = moe_mk.MoEConfig.parse({"model": model, "router": {"top_k": 2}, "kernel": {"max_num_tokens": 8}}, "a test")
chosen = moe_mk.MoELayer(config.with_(tuned_dir=sys.argv[1])).explain().chosen
print(chosen.experts, chosen.cost_source)
"""
TUNE = "tune matmul_loop --hidden 256 --intermediate 128 --slots 8 --top-k 2 --weights plain --tokens 1,8"


@pytest.mark.stress
@pytest.mark.timeout(500)
def test_a_wheel_is_selected_once_it_is_certified_and_timed(with_plugin: Run, tmp_path: Path) -> None:
    assert with_plugin("-c", SELECTS, str(tmp_path)).stdout.split()[0] != "matmul_loop"
    for command in ("certify matmul_loop", f"{TUNE} --budget 20"):
        done = with_plugin("-m", "moe_mk", *command.split(), "--tuned-dir", str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
    (timed,) = tmp_path.glob("*/matmul_loop/H256*[0-9].json")
    slower = with_plugin("-c", SELECTS, str(tmp_path)).stdout.split()
    timed.write_text(re.sub(r'"microseconds": [0-9.e-]+', '"microseconds": 0.001', timed.read_text()))
    faster = with_plugin("-c", SELECTS, str(tmp_path)).stdout.split()
    assert faster == ["matmul_loop", "measured"] and slower[0] in ("matmul_loop", "cpu_native", "torch_cpu")


@pytest.mark.stress
def test_both_are_certified_as_they_come_out_of_the_wheel(with_plugin: Run) -> None:
    for name, origin in (("one_by_one", "transport:OneByOne"), ("matmul_loop", "experts:MatmulLoop")):
        done = with_plugin("-m", "moe_mk", "certify", name, "--quick", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        certificate = json.loads(done.stdout)
        assert certificate["passed"] and certificate["not_covered"] == []
        assert certificate["backend"]["origin"] == f"moe-mk-sample (moe_mk_sample.{origin})"
        on_processes = [one for one in certificate["coverage"] if one["check"].startswith("2 processes")]
        assert len(on_processes) == (name == "one_by_one")


def test_without_the_wheel_the_names_are_unknown() -> None:
    with pytest.raises(ConfigError, match="no experts backend is called 'matmul_loop'"):
        _ = EXPERTS["matmul_loop"]
