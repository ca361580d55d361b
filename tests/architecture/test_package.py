"""The wheel and the sdist hold what an installation needs, and nothing that was built."""

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from functools import partial
from pathlib import Path

import pytest
import torch
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from tests.docs.pages import PAGES, blocks

ROOT = Path(__file__).resolve().parents[2]
AS_A_NEWCOMER = """
import json, shlex, sys
from typer.testing import CliRunner
import moe_mk
from moe_mk.lab.cli import app

example, commands = json.load(sys.stdin)
assert "site" in moe_mk.__file__, moe_mk.__file__
for command in ("moe-mk make-checkpoint ds3 --experts 16 --hidden 256 --intermediate 128", *commands):
    done = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
    assert done.exit_code == 0, (command, done.output)
exec(example)
"""


def files_below(folder: str) -> set[str]:
    """Source files below a folder of the repository, relative to it."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so", ".o"))
    return {path.relative_to(ROOT / folder).as_posix() for path in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Without compiled kernels: they have a test of their own, tests/kernels/native/test_prebuilt.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HATCH_BUILD_NO_HOOKS", "true")
        built = next(
            iter(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"]))
        )
    return zipfile.ZipFile(built)


def test_the_wheel_holds_the_package_and_its_configurations(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    expected = {f"moe_mk/{name}" for name in files_below("moe_mk")} | {
        f"moe_mk/configs/{name}" for name in files_below("configs")
    }
    assert {"moe_mk/py.typed", "moe_mk/errors.py", "moe_mk/configs/models/deepseek_v3.yaml"} <= expected
    assert {name for name in names if ".dist-info/" not in name} == expected


INSTALLED = """
import sys, torch, moe_mk
from moe_mk import DeepseekV3MoE
from moe_mk.comm.network.setup import open_network_heap  # the proxies over TCP
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
assert moe_mk.__file__.startswith(sys.prefix), moe_mk.__file__
sizes = dict(num_experts=4, hidden_size=128, intermediate_size=128, top_k=2, num_groups=1, top_k_groups=1)
write_checkpoint(sys.argv[1], CheckpointShape(**sizes))
layer = DeepseekV3MoE.from_checkpoint(sys.argv[1], layer=3)
assert layer(torch.ones(3, 128, dtype=torch.bfloat16)).isfinite().all()
device = [name for name in sys.modules if name.split(".")[0] in ("triton", "nvshmem", "deep_ep", "nixl", "flashinfer")]
assert not device, device
"""


@pytest.mark.slow
@pytest.mark.row(159)
def test_pip_installs_the_wheel_into_an_empty_environment_where_it_runs_without_a_device_library(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    # What the wheel requires is taken from this environment, so that nothing is downloaded.
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = partial(subprocess.run, cwd=tmp_path, env=clean, check=False, capture_output=True, text=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"]
    refused = run([*pip, str(wheel.filename)])
    assert refused.returncode != 0 and "No matching distribution found for" in refused.stderr, "it states requirements"
    done = run([*pip, "--no-deps", str(wheel.filename)])
    assert done.returncode == 0, done.stderr
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "after.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    done = run([python, "-c", INSTALLED, str(tmp_path / "checkpoint")])
    assert done.returncode == 0, done.stderr
    command = run([tmp_path / "venv" / "bin" / "moe-mk", "--version"])
    assert command.returncode == 0, command.stderr


def test_the_wheel_brings_a_command_a_licence_and_its_requirements(wheel: zipfile.ZipFile) -> None:
    info = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    assert "moe-mk = moe_mk.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    metadata = message_from_string(wheel.read(f"{info}/METADATA").decode())
    always = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    names = {need.split("<")[0].split(">")[0].lower() for need in always}
    assert names == {"torch", "numpy", "pydantic", "safetensors", "pyyaml"}
    assert "torch>=2.11" in always, "without an upper bound that is not a known failure"


def test_the_sdist_can_be_built_and_tested(tmp_path: Path) -> None:
    with tarfile.open(
        next(iter(SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])))
    ) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    expected = {"pyproject.toml", "constraints.txt", "hatch_build.py", "Makefile", "LICENSE", "tests/rows.yaml"}
    assert expected | {"tools/features.py"} <= names
    assert {f"configs/{name}" for name in files_below("configs")} <= names
    assert not [name for name in names if name.startswith((".venv", "build")) or "__pycache__" in name]


@pytest.mark.slow
def test_the_example_of_the_readme_and_every_explain_command_of_the_docs_run_from_the_wheel(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "site")
    example = next(block.body for block in blocks(ROOT / "README.md", "python"))
    assert "print(layer.explain())" in example
    lines = [line for page in PAGES for block in blocks(page, "console") for line in block.body.splitlines()]
    commands = sorted({line.removeprefix("$ ") for line in lines if line.startswith("$ moe-mk explain ")})
    assert len(commands) >= 2
    done = subprocess.run(
        [sys.executable, "-c", AS_A_NEWCOMER],
        input=json.dumps([example, commands]),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "* " in done.stdout and "refused" in done.stdout
