"""`import moe_mk` waits for nothing, and whatever it promises is there when it is asked for."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import moe_mk

SOURCE = Path(str(moe_mk.__file__))
ALONE = """
import os, sys
from importlib import import_module
import moe_mk
assert "torch" not in sys.modules, "import moe_mk imports torch"
assert set(moe_mk.__all__) <= set(dir(moe_mk)) and "oracle" in dir(moe_mk)
assert moe_mk.ConfigError.__module__ == "moe_mk.errors" and "torch" not in sys.modules

import torch, numpy, pydantic, safetensors.torch

def first(line):
    child = os.fork()
    if child == 0:
        try:
            exec(line, {})
        except BaseException as problem:
            print(line, repr(problem), flush=True)
        os._exit(0)
    os.waitpid(child, 0)

for name in sys.argv[1:]:
    first(f"import {name}")
first("import moe_mk; moe_mk.oracle.fp8.select_fp8_moe_backend; moe_mk.comm.groups.ParallelGroups")
first("from moe_mk.experts.base import EXPERTS; assert 'triton' in EXPERTS and 'cpu_native' in EXPERTS")
first("from moe_mk.experts.monolithic import MONOLITHIC; assert list(MONOLITHIC)")
first("from moe_mk.prepare_finalize.base import PREPARE_FINALIZE as all; assert {'one_sided', 'deepep_ht'} <= set(all)")
first("from moe_mk.oracle.base import ORACLES; assert len(list(ORACLES)) == 8")
first("from moe_mk.placement.eplb import EPLB_POLICIES as all; assert {'compat', 'flat', 'hybrid'} <= set(all)")
"""

WITHOUT_THE_LAB = """
import sys
for name in ("typer", "rich", "click", "pygments", "shellingham", "scipy", "matplotlib"):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
import importlib.metadata
importlib.metadata.entry_points = lambda **group: ()  # plugins are imported at the first look-up
import moe_mk.layer
modules = [name for name in sys.modules if name.split(".")[0] == "moe_mk"]
assert len(modules) <= 126 and not [name for name in modules if name.startswith("moe_mk.lab")], modules
registries = moe_mk.experts.EXPERTS, moe_mk.prepare_finalize.PREPARE_FINALIZE
read = {registry.origin(name) for registry in registries for name in registry} & sys.modules.keys()
assert read <= {"moe_mk.prepare_finalize.no_ep"}, read
import numpy as np, torch
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
sizes = dict(num_experts=8, hidden_size=128, intermediate_size=128, top_k=2, num_groups=1, top_k_groups=1)
write_checkpoint(sys.argv[1], CheckpointShape(**sizes))
layer = moe_mk.DeepseekV3MoE.from_checkpoint(sys.argv[1], layer=3)
y_TH = layer(torch.ones(3, 128, dtype=torch.bfloat16))
assert y_TH.isfinite().all() and y_TH.any() and "no_ep" in str(layer.explain())

from moe_mk.placement.eplb import Topology, plan
import moe_mk.rebalance
load_XE, topology = np.arange(1.0, 17).reshape(2, 8), Topology(4, nodes=2, slots=3)
moved = plan(np.flip(load_XE, 1).copy(), topology, old=plan(load_XE, topology), groups=2)
assert len(moved.moves)

from moe_mk.__main__ import main
main()
"""


def seen_by_a_type_checker() -> dict[str, str]:
    """Names of the front door, each with the module that a type checker reads it from."""
    (block,) = [
        node for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    ]  # fmt: skip
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in found for alias in node.names}


def test_a_type_checker_and_a_program_see_the_same() -> None:
    homes = seen_by_a_type_checker()
    assert homes.keys() | {"__version__"} == set(moe_mk.__all__)
    for name, module in homes.items():
        expected = import_module(f"moe_mk.{name}") if module == "moe_mk" else getattr(import_module(module), name)
        assert getattr(moe_mk, name) is expected, name


def test_all_of_it_can_be_taken_at_once() -> None:
    taken: dict[str, object] = {}
    exec("from moe_mk import *", taken)
    assert set(moe_mk.__all__) <= taken.keys()


def test_what_is_not_there_is_stated() -> None:
    with pytest.raises(AttributeError, match=r"module 'moe_mk' has no attribute 'DeepSeekV3MoE'"):
        moe_mk.DeepSeekV3MoE  # noqa: B018
    assert not hasattr(moe_mk, "utils")


def test_a_layer_imports_no_backend_and_needs_no_package_of_the_lab_as_the_command_does(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_THE_LAB, str(tmp_path / "checkpoint")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (3, "moe-mk: the command needs typer: pip install 'moe-mk[lab]'\n")
    assert done.stdout == ""


def test_names_imported_at_first_use_are_no_modules_of_their_package() -> None:
    lazy = [path for path in SOURCE.parent.rglob("__init__.py") if "at_first_use(__name__" in path.read_text()]
    assert len(lazy) >= 7
    for init in lazy:
        package = import_module(".".join(("moe_mk", *init.parent.relative_to(SOURCE.parent).parts)))
        block = next(node for node in ast.parse(init.read_text()).body if isinstance(node, ast.If))
        named = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
        modules = {path.stem for path in init.parent.iterdir()} - set(getattr(package, "_ROOMS", ()))
        assert not modules & set(named), package
        assert all(getattr(package, name) is not None for name in named)


@pytest.mark.slow
def test_any_room_can_be_entered_first_and_registers_its_plugins() -> None:
    rooms = sorted(
        f"moe_mk.{path.stem}" for path in SOURCE.parent.iterdir()
        if (path.suffix == ".py" and "__" not in path.stem) or (path / "__init__.py").exists()
    )  # fmt: skip
    assert "moe_mk.kernel" in rooms and "moe_mk.layer" in rooms
    done = subprocess.run([sys.executable, "-c", ALONE, *rooms], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
