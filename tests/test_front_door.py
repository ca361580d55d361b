"""`import moe_mk` waits for nothing, and whatever it promises is there when it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import moe_mk
from moe_mk.moved import new_name

SOURCE = Path(str(moe_mk.__file__))
ALONE = """
import os, sys
from importlib import import_module
import moe_mk
assert "torch" not in sys.modules, "import moe_mk imports torch"
assert set(moe_mk.__all__) <= set(dir(moe_mk)) and "oracle" in dir(moe_mk)
assert moe_mk.ConfigError.__module__ == "moe_mk.errors" and "torch" not in sys.modules

import torch, numpy, scipy, pydantic, safetensors.torch

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
first("from moe_mk.prepare_finalize.base import PREPARE_FINALIZE as all; assert 'one_sided' in all and 'mori' in all")
first("from moe_mk.oracle.base import ORACLES; assert len(list(ORACLES)) == 8")
first("from moe_mk.placement.eplb import EPLB_POLICIES as all; assert {'compat', 'flat', 'hybrid'} <= set(all)")
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


@pytest.mark.parametrize("old", ["testing.certify", "plan", "verify", "cli.exits", "trace.chrome", "weights.convert"])
def test_a_module_of_the_lab_has_its_old_name_for_one_release(old: str) -> None:
    sys.modules.pop(f"moe_mk.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"moe_mk.{old} is now moe_mk.lab\.\w+"):
        module = import_module(f"moe_mk.{old}")
    assert module is sys.modules[new_name(f"moe_mk.{old}")] and module.__name__.startswith("moe_mk.lab.")


def test_names_that_left_a_package_have_their_old_place_too() -> None:
    with pytest.warns(DeprecationWarning, match="moe_mk.weights.write_checkpoint is now moe_mk.lab.checkpoints"):
        from moe_mk.weights import write_checkpoint
    assert write_checkpoint.__module__ == "moe_mk.lab.checkpoints.synthesize"
    with pytest.raises(AttributeError, match="no attribute 'write_checkpoints'"):
        moe_mk.weights.write_checkpoints  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="moe_mk.planner"):
        import_module("moe_mk.planner")


@pytest.mark.thorough
def test_any_room_can_be_entered_first_and_registers_its_plugins() -> None:
    rooms = sorted(
        f"moe_mk.{path.stem}" for path in SOURCE.parent.iterdir()
        if (path.suffix == ".py" and "__" not in path.stem) or (path / "__init__.py").exists()
    )  # fmt: skip
    assert "moe_mk.kernel" in rooms and "moe_mk.layer" in rooms
    done = subprocess.run([sys.executable, "-c", ALONE, *rooms], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
