"""Both wheels in an environment of their own: the plugin is found by its metadata and works, and is missed by name."""

import os
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest
import torch
from hatchling.builders.wheel import WheelBuilder

CONTRIB = Path(__file__).resolve().parents[1]
ROOT = CONTRIB.parents[1]

WITH_IT = """
import sys
from functools import partial
import torch
import moe_mk, moe_mk_contrib
from moe_mk.comm.threads import ThreadWorld
from moe_mk.external.library import LIBRARIES, emulated
from moe_mk.flight import wait
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.quant import FP32
from moe_mk.tokens import ExpertOutput, OutputStage, Routing

assert moe_mk.__file__.startswith(sys.prefix) and moe_mk_contrib.__file__.startswith(sys.prefix)
names = [name for name in PREPARE_FINALIZE if PREPARE_FINALIZE.distribution(name) == "moe-mk-contrib"]
assert sorted(names) == sys.argv[1].split(",") and not PREPARE_FINALIZE.broken, (names, PREPARE_FINALIZE.broken)
assert all(PREPARE_FINALIZE.is_foreign(name) for name in names)
assert {"mori", "nccl", "nixl_ep"} <= emulated() <= set(LIBRARIES)

place, world = ExpertMap.linear(4, 2), ThreadWorld(2, timeout_s=20.0)
x = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]
# token 0 of rank 0 is for both ranks, token 1 for rank 1, that of rank 1 for rank 0
ids = [[[0, 3], [2, -1]], [[0, 1]]]
def exchange(comm, x_TH, ids_TK):
    tables, cpu = place.tables(torch.device("cpu")), torch.device("cpu")
    context = TransportContext(comm, place, tables, FP32, FP32, 2, 2, cpu, max_num_tokens=4, allow_emulated=True)
    transport, ids_TK = PREPARE_FINALIZE["mori"](context), torch.tensor(ids_TK, dtype=torch.int32)
    tokens = wait(transport.prepare(x_TH, Routing(ids_TK, torch.ones(ids_TK.shape).masked_fill(ids_TK < 0, 0.0))))
    y_RH = (1 + 9 * comm.rank) * tokens.x_RH.values  # experts of rank 1 multiply by ten
    return wait(transport.finalize(ExpertOutput(y_RH, OutputStage.REDUCED), tokens)).tolist()
jobs = [partial(exchange, *own) for own in zip(world.communicators(), x, ids)]
assert world.together(jobs) == [[[11.0, 22.0], [30.0, 40.0]], [[5.0, 6.0]]]
"""

WITHOUT_IT = """
import sys
import moe_mk
from moe_mk import ConfigError, MoEConfig, Problem, oracle
from moe_mk.config import device_profile, load_config
from moe_mk.quant import BF16

for settings in ({"prepare_finalize": "mori"}, {"trust": ["mori"]}):
    config = load_config("tiny").with_(ep=2, **settings)
    try:
        oracle.select(Problem(config, device_profile("cpu"), BF16, 16, frozenset()))
    except ConfigError as error:
        assert "mori" in str(error) and "pip install ./contrib/moe_mk_contrib" in str(error), error
    else:
        raise AssertionError(settings)
"""


def build(root: Path, into: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HATCH_BUILD_NO_HOOKS", "true")  # without compiled kernels
        return Path(next(iter(WheelBuilder(str(root)).build(directory=str(into), versions=["standard"]))))


@pytest.mark.slow
@pytest.mark.row(159)
def test_the_wheel_is_a_plugin_of_the_installed_wheel_of_the_core(tmp_path: Path) -> None:
    wheels = [build(root, tmp_path) for root in (ROOT, CONTRIB)]
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    # What the wheels require is borrowed from this environment, without its own moe-mk, so that nothing is downloaded.
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if "moe_mk" not in path.name and path.suffix != ".pth":
            (borrowed / path.name).symlink_to(path)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words: str | Path) -> None:
        done = subprocess.run([python, *words], cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    pip = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check")
    run(*pip, wheels[0])
    run("-c", WITHOUT_IT)
    run(*pip, wheels[1])
    project = tomllib.loads((CONTRIB / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    run("-c", WITH_IT, ",".join(sorted(project["entry-points"]["moe_mk.prepare_finalize"])))
